"""A whole run on this machine, from the command line to the files that it leaves, and what goes on from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from forked import ForkedCommand, role_name
from launched import (
    CONFIG,
    EVALUATE,
    GROUPS,
    LIMIT_S,
    ROLES,
    STEPS,
    Launched,
    command,
    environment,
    groups_in,
    launched,
    newest_checkpoint,
    num_consumed,
    state_of,
    until,
)
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_hpc.fs import read_json
from areal_hpc.report import prove_run


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Launched, list[str]]]:
    """A run from its start to its end, and what everybody could read of its processes meanwhile."""
    directory = tmp_path_factory.mktemp("whole")
    busy = "generation.max_running=1"  # the engine is what the run waits for: new weights meet an answer under way
    with launched(directory, model, *EVALUATE, busy, fresh=True) as started:
        started.wait_for_step(1)
        lines = [" ".join(process.cmdline()) for process in started.roles().values()]
        assert started.wait() == 0, started.text
        yield started, lines


@pytest.fixture(scope="module")
def exported(finished: tuple[Launched, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exports") / "trained"
    told = command("export", finished[0].run.root, "--step", str(STEPS), directory)
    assert (told.returncode, told.stderr) == (0, ""), told.stderr
    assert told.stdout == f"{directory}: the weights of step {STEPS}; give it as model.path to any run or engine\n"
    return directory


def test_a_run_trains_all_its_steps_and_leaves_its_report(finished: tuple[Launched, list[str]]) -> None:
    started, _ = finished
    assert state_of(started.run) == "finished"
    assert [record.number("step") for record in started.records("step")] == list(range(1, STEPS + 1))
    assert num_consumed(started.run) == STEPS * GROUPS
    proof = prove_run(started.run)
    assert (proof.violations, proof.steps, proof.trained) == ((), STEPS, STEPS * GROUPS)
    assert started.run.evaluated_steps() >= {0, STEPS}
    assert read_json(started.run.summary)["last_step"] == STEPS
    assert started.run.curves("png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in started.run.curves("svg").read_bytes()[:1000]


def test_no_process_is_left_and_each_role_was_there(finished: tuple[Launched, list[str]]) -> None:
    started, lines = finished
    assert len(lines) == len(ROLES)
    assert len(started.seen) > len(ROLES), "reward processes were not seen"
    assert started.left_over() == []


def test_the_secret_is_in_no_command_line_log_record_or_configuration(finished: tuple[Launched, list[str]]) -> None:
    started, lines = finished
    token = started.run.token.read_text(encoding="ascii")
    assert len(token) > 30
    assert started.run.token.stat().st_mode & 0o077 == 0
    others = [path for path in started.run.root.rglob("*") if path.is_file() and path != started.run.token]
    assert len(others) > 10
    assert [path for path in others if token.encode() in path.read_bytes()] == []
    assert token not in started.text + "".join(lines)


def test_logs_hold_lines_of_ours_and_nothing_else(finished: tuple[Launched, list[str]]) -> None:
    started, _ = finished
    for name in ROLES:
        role, index = name.split("-")
        lines = started.run.attempt(1).log(role, int(index)).read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if f" {name} " not in line and not line.startswith("  | ")] == []


def test_the_weights_have_moved_and_are_still_numbers(finished: tuple[Launched, list[str]], model: Path) -> None:
    before = load_file(model / "model.safetensors")
    (path,) = newest_checkpoint(finished[0].run).path.rglob("model.safetensors")
    after = load_file(path)
    assert before.keys() == after.keys()
    assert all(np.isfinite(tensor).all() for tensor in after.values())
    assert all(not np.array_equal(before[name], after[name]) for name in before)


def test_answers_say_under_which_weights_they_went_on(finished: tuple[Launched, list[str]]) -> None:
    """Versions may rise inside an answer, never fall, and never pass what was published. Whether one is under way when
    new weights come is chance here; ``test_embedded_interruptions`` sees to it."""
    groups = groups_in(finished[0].run)
    for ticket, group in groups:
        for trajectory in group.trajectories:
            versions = trajectory.versions[trajectory.loss_mask]
            assert (np.diff(versions) >= 0).all()
            assert ticket <= versions[0] and versions[-1] <= STEPS
            assert (trajectory.versions[~trajectory.loss_mask] == -1).all()
    assert len(groups) >= STEPS * GROUPS


def test_no_trained_token_is_older_than_the_bound(finished: tuple[Launched, list[str]]) -> None:
    staleness = [record.number("ring_staleness_max") for record in finished[0].records("step")]
    assert max(staleness) == CONFIG["buffer"]["max_staleness"]


def test_an_export_is_the_checkpoint_as_any_reader_of_hugging_face_directories_has_it(
    exported: Path, finished: tuple[Launched, list[str]], model: Path
) -> None:
    masters = load_torch_file(newest_checkpoint(finished[0].run).path / "model.safetensors")
    weights = load_torch_file(exported / "model.safetensors")
    assert masters.keys() == weights.keys()
    assert all(torch.equal(masters[name], tensor) for name, tensor in weights.items())
    theirs, expected = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (exported, model))
    assert not expected.load_state_dict(masters, strict=False).unexpected_keys
    token_ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(theirs(token_ids).logits, expected(token_ids).logits)
    chat = [{"role": "user", "content": "train 7"}]
    before, after = (AutoTokenizer.from_pretrained(path).apply_chat_template(chat) for path in (model, exported))
    assert before == after


def test_a_second_run_begins_with_what_was_exported(
    exported: Path, finished: tuple[Launched, list[str]], tmp_path: Path
) -> None:
    """Its engine and trainer load it; at a learning rate that moves nothing it ends with the same weights."""
    with launched(tmp_path, exported, "trainer.total_steps=1", "trainer.optimizer.lr=1e-30") as second:
        assert second.wait() == 0, second.text
    masters, again = (
        load_file(newest_checkpoint(started.run).path / "model.safetensors") for started in (finished[0], second)
    )
    assert all(np.array_equal(masters[name], tensor) for name, tensor in again.items())


def test_an_evaluation_alone_measures_what_the_evaluator_of_the_run_did(
    exported: Path, finished: tuple[Launched, list[str]], tmp_path: Path
) -> None:
    """The last checkpoint of the run, and the same weights as a Hugging Face directory: the same answers, each; also
    where the evaluator or an engine is killed."""
    run = finished[0].run
    expected = read_json(run.evaluation(STEPS))
    told = evaluated(run.config, tmp_path, "evaluator-0", "generation.replicas=2", "--checkpoint", str(run.root))
    assert f"step {STEPS} of {run.root}\n" in told
    found = read_json(tmp_path / f"run-eval-run-{STEPS}" / "summary.json")
    evaluated(run.config, tmp_path, "generator-0", "--checkpoint", str(exported), "--out", str(tmp_path / "again"))
    assert found["answers"] == read_json(tmp_path / "again" / "summary.json")["answers"] == expected["answers"]
    assert found["reward_mean"] == expected["reward_mean"]
    served, weights = (path / "model.safetensors" for path in (tmp_path / f"run-eval-run-{STEPS}" / "model", exported))
    assert served.read_bytes() == weights.read_bytes()
    assert (found["version_min"], found["version_max"], found["pass_at_1"]) == (STEPS, STEPS, 1.0)


def evaluated(config: Path, directory: Path, victim: str, *words: str) -> str:
    """Run ``areal-hpc eval`` to its end, with a role killed as soon as it is there; what was printed."""
    output = directory / "eval.txt"
    output.touch()
    process = ForkedCommand(["eval", str(config), *EVALUATE, f"run_root={directory}", *words], output, environment())
    children = psutil.Process(process.pid).children
    until(f"{victim} to be there", lambda: [child for child in children() if role_name(child) == victim])[0].kill()
    code = process.wait(LIMIT_S)
    told = output.read_text(encoding="utf-8")
    assert code == 0, told
    assert f"{victim} ended with signal 9 (SIGKILL); it is started again" in told
    return told


def test_C2_C20_resuming_a_finished_run_ends_at_once_but_makes_up_a_lost_evaluation(
    finished: tuple[Launched, list[str]], model: Path
) -> None:
    run = finished[0].run
    run.evaluation(STEPS).unlink()
    with launched(run.root.parent, model, *EVALUATE, "--resume") as again:
        assert again.wait() == 0, again.text
        assert again.records("step") == []
    assert state_of(run, 2) == "finished"
    assert newest_checkpoint(run).version == (2, STEPS)
    assert num_consumed(run) == STEPS * GROUPS
    assert read_json(run.evaluation(STEPS))["epoch"] == 2

"""Whole runs on this machine: real processes, signals and kills, from the command line to the files they leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launched import CONFIG, GROUPS, Launched, arguments, command, launched, newest_checkpoint, num_consumed, until
from safetensors.numpy import load_file
from tiny_models import make_model

from areal_hpc.buffer.chain import ChainName
from areal_hpc.buffer.records import RecordType, group_ref
from areal_hpc.buffer.scan import ChainReader, GroupFetcher
from areal_hpc.fs import RunDir, read_json
from areal_hpc.report import prove_run
from areal_hpc.types import TrajectoryGroup

STEPS = CONFIG["trainer"]["total_steps"]
ROLES = ("trainer-0", "generator-0", "rollout-0", "evaluator-0")
EVALUATE = ("evaluation.every_steps=2", "evaluation.num_prompts=4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(path, "qwen3", 1, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    return path


def state_of(run: RunDir, epoch: int = 1) -> str:
    return str(read_json(run.attempt(epoch).state)["state"])


def groups_in(run: RunDir) -> list[tuple[int, TrajectoryGroup]]:
    """Every group that was sealed into the ring, with the weight version of its ticket."""
    chains, fetcher, found = run.ring / "chains", GroupFetcher(run), []
    for text in os.listdir(chains):
        name = ChainName.parse(text)
        assert name is not None
        for record in ChainReader(chains, name).poll(last=True):
            if record.type is RecordType.DATA:
                ref = group_ref(text, record.meta, segment=record.segment, offset=record.offset, seq=record.seq)
                found.append((ref.version.step, fetcher.read(ref)))
    return found


# A whole run


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Launched, list[str]]]:
    """A run from its start to its end, and what everybody could read of its processes meanwhile."""
    directory = tmp_path_factory.mktemp("whole")
    with launched(directory, model, *EVALUATE) as started:
        started.wait_for_step(1)
        lines = [" ".join(process.cmdline()) for process in started.roles().values()]
        assert started.wait() == 0, started.text
        yield started, lines


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


def test_answers_go_on_under_new_weights_and_say_so(finished: tuple[Launched, list[str]]) -> None:
    """Versions may rise inside an answer, never fall, and never pass what was published when the group was sealed."""
    groups = groups_in(finished[0].run)
    spans = []
    for ticket, group in groups:
        for trajectory in group.trajectories:
            versions = trajectory.versions[trajectory.loss_mask]
            assert (np.diff(versions) >= 0).all()
            assert ticket <= versions[0] and versions[-1] <= STEPS
            assert (trajectory.versions[~trajectory.loss_mask] == -1).all()
            spans.append(int(versions[-1] - versions[0]))
    assert len(groups) >= STEPS * GROUPS
    assert any(spans), "no answer saw two versions"


def test_no_trained_token_is_older_than_the_bound(finished: tuple[Launched, list[str]]) -> None:
    staleness = [record.number("ring_staleness_max") for record in finished[0].records("step")]
    assert max(staleness) == CONFIG["buffer"]["max_staleness"]


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


# Stopping


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "stop"])
def test_a_stop_request_leaves_a_checkpoint_and_the_run_goes_on_from_it(how: str, model: Path, tmp_path: Path) -> None:
    steps = "trainer.total_steps=400"
    with launched(tmp_path, model, steps) as started:
        started.wait_for_step(2)
        began = time.monotonic()
        if how == "stop":
            told = command("stop", started.run.root)
            assert (told.returncode, told.stdout) == (0, f"{started.run.root}: stopped\n"), told.stderr
        else:
            started.process.send_signal(signal.Signals[how])
        assert started.wait() == 75, started.text
        assert time.monotonic() - began < 10.0 + (5.0 if how == "stop" else 0.0)  # the command has to start itself
        assert started.left_over() == []
    assert state_of(started.run) == "stopped"
    stopped_at = newest_checkpoint(started.run).version.step
    assert stopped_at == max(record.number("step") for record in started.records("step"))
    assert num_consumed(started.run) == stopped_at * GROUPS
    if how != "SIGTERM":
        return
    sealed = {group.position for _, group in groups_in(started.run)}
    last = stopped_at + 3
    with launched(tmp_path, model, f"trainer.total_steps={last}", "--resume") as again:
        assert again.wait() == 0, again.text
        assert [record.number("step") for record in again.records("step")] == list(range(stopped_at + 1, last + 1))
    assert num_consumed(again.run) == last * GROUPS  # so no position was trained twice
    twice = [group.position for _, group in groups_in(again.run)]
    assert len(twice) == len(set(twice)), "a group that was sealed before the stop was made again"
    assert sealed <= set(twice)


def test_a_scheduler_that_signals_every_process_at_once_costs_nothing(model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, "trainer.total_steps=400") as started:
        started.wait_for_step(2)
        for process in [*started.roles().values(), started.process]:
            process.send_signal(signal.SIGTERM)
        assert started.wait() == 75, started.text
        assert started.left_over() == []
    assert newest_checkpoint(started.run).version.step == max(r.number("step") for r in started.records("step"))


def test_a_second_request_ends_everything_at_once(model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, "trainer.total_steps=400", "limits.stop_s=100") as started:
        started.wait_for_step(1)
        started.roles()["trainer-0"].suspend()  # so the first request alone would take until limits.stop_s
        started.process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert started.process.poll() is None
        started.process.send_signal(signal.SIGINT)
        assert started.wait(limit_s=10.0) == 1, started.text
        assert started.left_over() == []
    assert state_of(started.run) == "aborted"


def test_a_trainer_that_is_killed_at_the_stop_limit_is_not_called_stopped(model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, "trainer.total_steps=400", "limits.stop_s=3") as started:
        started.wait_for_step(1)
        started.roles()["trainer-0"].suspend()
        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == 1
        assert "trainer-0 did not end within limits.stop_s and was killed" in started.text
        assert started.left_over() == []
    assert state_of(started.run) == "failed"


def test_a_stop_while_everything_still_starts_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, *EVALUATE) as started:
        until("the first role", started.roles)
        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == 75, started.text
        assert started.left_over() == []
    assert state_of(started.run) == "stopped"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_stop_while_the_model_is_made_leaves_no_run(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with launched(tmp_path, tmp_path / "model", "model.maker=tiny_task:make_for_ever") as started:
        until("the making to begin", (tmp_path / "making").exists)
        started.process.send_signal(number)
        assert started.wait(limit_s=10.0) == code
        assert "Traceback" not in started.text
        assert not started.run.root.exists()


# Kills


@pytest.mark.parametrize("name", ROLES)
def test_a_killed_role_ends_the_run_and_is_named(name: str, model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, "trainer.total_steps=400", *EVALUATE) as started:
        started.wait_for_step(1)
        started.roles()[name].kill()
        assert started.wait() == 1, started.text
        assert f"areal-hpc: {name} ended with signal 9 (SIGKILL); its log " in started.text
        assert "Traceback" not in started.text.split(f"{name} ended")[0]
        assert started.left_over() == []
    assert state_of(started.run) == "failed"


def test_a_killed_launcher_takes_its_roles_along_and_the_run_can_be_resumed(model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, "trainer.total_steps=400", *EVALUATE) as started:
        started.wait_for_step(2)
        started.process.kill()
        until("the roles to end", lambda: not started.left_over(), limit_s=15.0)
    assert state_of(started.run) == "running"
    assert "dead" in command("status", started.run.root).stdout
    assert command("stop", started.run.root).stdout == f"{started.run.root}: dead\n"
    stopped_at = newest_checkpoint(started.run).version.step  # the trainer had the time to commit
    assert stopped_at >= 2
    last = stopped_at + 2
    with launched(tmp_path, model, f"trainer.total_steps={last}", "--resume", *EVALUATE) as again:
        assert again.wait() == 0, again.text
    assert num_consumed(again.run) == last * GROUPS


# One run in one directory


def test_a_run_that_is_taken_over_stops_and_spoils_nothing(model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, "trainer.total_steps=400", "checkpoint.every_steps=2") as first:
        first.wait_for_step(3)
        last = newest_checkpoint(first.run).version.step + 10
        with launched(tmp_path, model, f"trainer.total_steps={last}", "--resume", "--takeover") as second:
            assert first.wait() == 1
            assert f"of {first.run.root} was replaced by attempt 2; this process must stop" in first.text
            assert second.wait() == 0, second.text
    assert state_of(first.run, 1) == "failed"
    assert state_of(first.run, 2) == "finished"
    assert newest_checkpoint(first.run).version == (2, last)
    assert num_consumed(first.run) == last * GROUPS


def test_a_run_in_use_is_refused_and_one_beside_it_is_not_disturbed(model: Path, tmp_path: Path) -> None:
    endless = "trainer.total_steps=400"
    words = [*arguments(tmp_path, model), "name=run", endless]
    with launched(tmp_path, model, endless) as first, launched(tmp_path, model, name="other") as other:
        first.wait_for_step(1)
        for extra in ([], ["--resume"]):
            second = command("run", *words, *extra)
            assert second.returncode == 2
            assert second.stderr.count("\n") == 1
            assert f"in use by process {first.process.pid} on " in second.stderr
            assert f"areal-hpc stop {first.run.root}" in second.stderr
        assert other.wait() == 0, other.text
        assert first.process.poll() is None, first.text
        assert command("stop", first.run.root).returncode == 0
        assert first.wait() == 75, first.text
        assert first.left_over() == other.left_over() == []
    assert num_consumed(other.run) == STEPS * GROUPS

    without = command("run", *words)
    assert (without.returncode, without.stderr.count("\n")) == (2, 1)
    assert "already holds a run; continue it with --resume" in without.stderr
    changed = command("run", *words, "--resume", "seed=7", "algorithm.clip_high=0.3")
    assert (changed.returncode, changed.stderr.count("\n")) == (2, 1)
    assert "seed (was 1), algorithm.clip_high (was 0.2) would change within one run" in changed.stderr


# Shapes


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.ranks=2", "algorithm.minibatches=2"],
        ["generation.replicas=2", "rollout.workers=2"],
        ["buffer.max_staleness=0"],
        ["weights.transport=disk", "buffer.max_staleness=3", "algorithm.proximal=loglinear"],
    ],
    ids=" ".join,
)
def test_every_shape_of_a_run_finishes(words: list[str], model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, *words) as started:
        assert started.wait() == 0, started.text
        assert started.left_over() == []
    assert [record.number("step") for record in started.records("step")] == list(range(1, STEPS + 1))
    assert num_consumed(started.run) == STEPS * GROUPS
    if "buffer.max_staleness=0" in words:
        assert {record.number("ring_staleness_max") for record in started.records("step")} == {0}


def test_two_trainer_ranks_stop_together_and_one_that_dies_ends_the_run(model: Path, tmp_path: Path) -> None:
    words = ("trainer.ranks=2", "trainer.total_steps=400")
    with launched(tmp_path, model, *words) as started:
        started.wait_for_step(1)
        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == 75, started.text
    stopped_at = newest_checkpoint(started.run).version.step
    with launched(tmp_path, model, *words, "--resume") as again:
        again.wait_for_step(stopped_at + 1)
        again.roles()["trainer-1"].kill()
        assert again.wait() == 1
        assert "areal-hpc: trainer-1 ended with signal 9 (SIGKILL)" in again.text
        assert again.left_over() == []


# Rewards and inputs that do not work


def test_samples_whose_reward_hangs_or_raises_are_failed_and_never_0(model: Path, tmp_path: Path) -> None:
    words = ("rollout.reward=tiny_task:sometimes", "rollout.reward_timeout_s=0.3", "rollout.attempts=1")
    with launched(tmp_path, model, *words, "rollout.reward_workers=2") as started:
        assert started.wait() == 0, started.text
        assert started.left_over() == []
    outcomes = [record.values["outcome"] for record in started.records("group")]
    assert outcomes.count("failed") >= 2
    assert {record.values["reason"] for record in started.records("group") if record.values["outcome"] == "failed"} == {
        "RewardError"
    }
    trained = [trajectory.reward for _, group in groups_in(started.run) for trajectory in group.trajectories]
    assert min(trained) >= 1.0, "a failed reward was counted"  # an empty answer is worth exactly 1
    steps = started.records("step")
    assert [record.number("step") for record in steps] == list(range(1, STEPS + 1))
    assert all((record.number("reward_mean") or 0.0) >= 1.0 for record in steps)
    dropped = steps[-1].number("ring_dropped_failed")
    assert dropped is not None and 0 < dropped <= outcomes.count("failed")


def test_a_reward_that_never_works_ends_the_run_and_says_so(model: Path, tmp_path: Path) -> None:
    words = ("rollout.reward=tiny_task:never", "rollout.attempts=1", "rollout.concurrency=4")
    with launched(tmp_path, model, *words) as started:
        assert started.wait() == 1
        assert "areal-hpc: rollout-0 ended with exit code 1" in started.text
        assert "this prompt has no reward" not in started.text
        assert "no text has a reward" in started.text
        assert started.left_over() == []


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.path=/nowhere/model", "model.path: there is no directory /nowhere/model"),
        ("prompts.train=/nowhere/data.jsonl", "/nowhere/data.jsonl"),
        ("prompts.train=tiny_task:Missing", "tiny_task:Missing"),
        ("rollout.reward=tiny_task:missing", "tiny_task:missing"),
        ("rollout.reward=no_such_module:reward", "no_such_module"),
        ("rollout.workflow=tiny_task:Missing", "rollout.workflow = 'tiny_task:Missing' cannot be imported"),
    ],
)
def test_what_is_missing_is_found_before_anything_is_written(
    word: str, message: str, model: Path, tmp_path: Path
) -> None:
    told = command("run", *arguments(tmp_path, model), word)
    assert told.returncode == 2, told.stderr
    assert told.stderr.count("\n") == 1, told.stderr
    assert message in told.stderr
    assert not (tmp_path / "run").exists()

"""A short kill storm: every kind of victim, every phase, and in the end nothing lost and nothing trained twice.

Two storms, since a whole run takes too long to start for forty kills in a minute. The larger one runs the product's
launcher, roles, ring, loop, commits and journals, each role a process of its own, with stand-ins for what has no part
in exactly-once (``tests/stand_ins.py``), so that an attempt lasts a second. The smaller one is the whole product:
torch, the embedded engine, weight broadcasts over gloo, reward processes. ``tests/benchmarks/kill_storm.py`` is the
long one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from launched import REPOSITORY, environment, newest_checkpoint
from stand_ins import ROWS
from storm_terms import CONFIG, How, Phase
from tiny_models import make_model

from areal_hpc.cli import main
from areal_hpc.fs import publish_json, read_json
from areal_hpc.journal import Kind, entries
from areal_hpc.report.ledger import read_evidence
from areal_hpc.report.proof import surviving
from areal_hpc.run_dir import RunDir

KILLS = 44
KILLS_OF_THE_WHOLE = 3
SEED = 20
LIMIT_S = 280.0
NUM_ROWS = CONFIG["prompts"]["limit"]


def storm(directory: Path, how: How, kills: int, model: Path = Path("none")) -> dict[str, Any]:
    """What a storm found; it has a process of its own, since it forks."""
    words = [str(directory), "--how", how, "--kills", str(kills), "--seed", str(SEED), "--model", str(model)]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests" / "storm.py"), *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stdout, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], RunDir]:
    directory = tmp_path_factory.mktemp("storm")
    return storm(directory, How.STAND_INS, KILLS), RunDir(directory / "run")


def check(found: dict[str, Any], kills: int) -> None:
    assert found["failures"] == []
    assert found["proof"]["violations"] == []
    assert (found["lost"], found["twice"], found["failed_resumes"]) == (0, 0, 0)
    assert found["kills"] == kills
    assert found["proof"]["steps"] == found["proof"]["checkpoint"][1] > 0


def test_C6_C26_nothing_is_lost_and_nothing_trained_twice(survived: tuple[dict[str, Any], RunDir]) -> None:
    found, _ = survived
    check(found, KILLS)
    assert set(found["kills_by_phase"]) == set(Phase), "some phase was never hit"
    assert set(found["kills_by_victim"]) >= {"trainer", "rollout", "generator", "launcher", "everything"}
    assert found["proof"]["finished_epochs"] >= 2
    assert found["proof"]["steps_taken_back"] > 0, "no kill cost a step"
    assert found["proof"]["max_staleness"] == CONFIG["buffer"]["max_staleness"]


def test_the_weights_were_trained_on_what_the_journal_says_and_on_nothing_else(
    survived: tuple[dict[str, Any], RunDir],
) -> None:
    """The trainer's weights are the rows that it was trained on; which rows can be trained is known beforehand."""
    found, run = survived
    checkpoint = newest_checkpoint(run)
    steps: list[list[int]] = read_json(checkpoint.path / ROWS)
    attempts = read_evidence(run, checkpoint.version.epoch).attempts
    noted = [entry for _, entry in surviving(attempts, checkpoint.version) if entry.kind is Kind.STEP]
    assert steps == [sorted(int(one.prompt_id.rpartition("/")[2]) for one in entry.trained) for entry in noted]
    times = Counter(row for rows in steps for row in rows)
    assert set(times) == {row for row in range(NUM_ROWS) if row % 7 != 3 and row % 5 != 2}, (
        "others fail or are all alike"
    )
    assert min(times.values()) >= found["proof"]["finished_epochs"]


def test_the_ledger_command_proves_it(
    survived: tuple[dict[str, Any], RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    found, run = survived
    assert main(["ledger", str(run.root)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("run run: proven\n  violations       none\n")
    assert f"data epochs      {found['proof']['finished_epochs']} finished, of {NUM_ROWS} prompts each\n" in text
    assert main(["ledger", str(run.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found["proof"]


def forget_a_consumed_position(run: RunDir) -> str:
    """A checkpoint that would train position 0 again, with a manifest that vouches for it."""
    checkpoint = newest_checkpoint(run)
    consumed = checkpoint.state["ring"]["consumed"]
    consumed["above"] = sorted({*range(1, consumed["low"]), *consumed["above"]})
    consumed["low"] = 0
    rewrite_state(checkpoint.path, checkpoint.state)
    return "does not count position 0 as consumed, so it would be trained again"


def rewrite_state(path: Path, state: Any) -> None:
    publish_json(path / "state.json", state)
    data = (path / "state.json").read_bytes()
    body = read_json(path / "MANIFEST.json")["body"]
    body["files"]["state.json"] = {"size": len(data), "crc32c": google_crc32c.value(data)}
    crc = google_crc32c.value(json.dumps(body, sort_keys=True).encode())
    publish_json(path / "MANIFEST.json", {"body": body, "crc32c": crc})


def count_a_position_that_was_never_trained(run: RunDir) -> str:
    checkpoint = newest_checkpoint(run)
    consumed = checkpoint.state["ring"]["consumed"]
    never = max([consumed["low"], *consumed["above"]]) + 50
    consumed["above"] = [*consumed["above"], never]
    rewrite_state(checkpoint.path, checkpoint.state)
    return f"counts position {never} as consumed, but no step was trained on it"


def damage_the_journal(run: RunDir) -> str:
    """One bit of the last attempt's first step."""
    epoch = max(epoch for epoch in range(1, 1000) if entries(run, epoch))
    path = run.journal / f"e{epoch:08d}.log"
    data = bytearray(path.read_bytes())
    data[data.index(b'"trained"') + 3] ^= 1
    path.write_bytes(data)
    return f"the journal of attempt {epoch} has no mark of the checkpoint of step "


@pytest.mark.parametrize(
    "spoil",
    [forget_a_consumed_position, count_a_position_that_was_never_trained, damage_the_journal],
    ids=lambda spoil: spoil.__name__,
)
def test_the_ledger_command_finds_what_is_wrong_and_names_it(
    spoil: Callable[[RunDir], str],
    survived: tuple[dict[str, Any], RunDir],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = RunDir(Path(shutil.copytree(survived[1].root, tmp_path / "run")))
    told = spoil(copy)
    assert main(["ledger", str(copy.root)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("run run: VIOLATED\n")
    assert told in text


@pytest.mark.long
def test_the_whole_product_survives_as_well(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(model, "qwen3", 1, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    found = storm(tmp_path, How.FORKS, KILLS_OF_THE_WHOLE, model)
    check(found, KILLS_OF_THE_WHOLE)

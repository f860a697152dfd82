"""What a run in Slurm jobs has cost: computed by hand from two attempts of 60 and 30 s."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.cluster.jobs import parse_accounts
from areal_hpc.errors import SubmissionError
from areal_hpc.fs import publish_json, read_json
from areal_hpc.liveness import seats
from areal_hpc.liveness.job import note_satellite
from areal_hpc.report import usage, write_report
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Record
from areal_hpc.telemetry.records import to_line

BEGAN = 1000.0
ACCOUNTS = """\
12+0|NODE_FAIL|0:0|0:0|a|b|61|1800000|
12+0.0|FAILED|1:0||a|b|60|99|
12+1|NODE_FAIL|0:0|0:0|a|b|61|1800000|
12+0|COMPLETED|0:0|0:0|c|d|31|3600000|
12+1|COMPLETED|0:0|0:0|c|d|31||
"""


def attempt(run: RunDir, epoch: int, state: str, seconds: float, restarts: int) -> None:
    made = run.attempt(epoch).create()
    publish_json(made.state, {"state": state, "host": "n1", "pid": 7, "boot": "b", "start_ticks": 1})
    nodes, gpus = {"trainer": ["n1"], "generation": ["n2", "n3"]}, {"trainer": 0, "generation": 4}
    job = {"job_id": "12", "restarts": restarts, "after": "", "nodes": nodes, "gpus": gpus, "time": BEGAN}
    publish_json(made.job, job)
    values: dict[str, Any] = {"step": epoch, "seconds_step": 20.0, "seconds_wait": 5.0, "tokens_trained": 600}
    record = Record(time=BEGAN + seconds, role="trainer", index=0, epoch=epoch, kind="step", values=values)
    made.records("trainer", 0).write_bytes(to_line(record))
    for index, at_work_s in ((0, 12.0), (1, 3.0)):  # of 20 s each; earlier records are of less
        loads = [{"busy_s": share * at_work_s, "up_s": share * 20.0} for share in (0.25, 1.0)]
        lines = [
            to_line(Record(time=BEGAN, role="generator", index=index, epoch=epoch, kind="generation", values=load))
            for load in loads
        ]
        made.records("generator", index).write_bytes(b"".join(lines))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path / "run")
    attempt(made, 1, "running", 60.0, 0)
    attempt(made, 2, "finished", 30.0, 1)
    return made


def report(run: RunDir, *, ask: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """The rows that concern usage, and those facts."""
    stream = io.StringIO()
    write_report(run, stream, ask=ask)
    rows = {line[2:14].strip(): line[14:].strip() for line in stream.getvalue().splitlines()[1:]}
    facts: dict[str, Any] = json.loads(run.summary.read_text(encoding="utf-8")).get("usage", {})
    return rows, facts


def test_hours_and_shares_by_hand(run: RunDir) -> None:
    rows, facts = report(run, ask=False)
    assert facts["node_hours"] == {"trainer": 90 / 3600, "generation": 180 / 3600}
    assert facts["gpu_hours"] == {"generation": 8 * 90 / 3600}
    assert facts["outside_steps_share"] == pytest.approx(1 - 40 / 90)
    assert facts["trainer_idle_share"] == pytest.approx(1 - 30 / 90)
    assert facts["engines_idle_share"] == pytest.approx(1 - 15 / 40)
    assert rows["idle"] == "trainer 67% of the time, engines 62%; 56% of it all outside of steps"
    assert facts["tokens_per_gpu_hour"] == pytest.approx(1200 / 0.2)
    assert rows["node-hours"] == "generation 0.05, trainer 0.025"
    assert rows["GPU-hours"] == "generation 0.2"
    assert rows["efficiency"] == "6,000 tokens trained per GPU-hour"
    assert "energy" not in rows


def test_who_made_a_step_that_was_taken_back_was_not_idle(run: RunDir) -> None:
    """The first attempt made step 2 as well: its tokens count once, its seconds were spent."""
    values = {"step": 2, "seconds_step": 20.0, "seconds_wait": 5.0, "tokens_trained": 600}
    record = Record(time=BEGAN + 60.0, role="trainer", index=0, epoch=1, kind="step", values=values)
    with run.attempt(1).records("trainer", 0).open("ab") as file:
        file.write(to_line(record))
    _, facts = report(run, ask=False)
    assert facts["outside_steps_share"] == pytest.approx(1 - 60 / 90)
    assert facts["trainer_idle_share"] == pytest.approx(1 - 45 / 90)
    assert facts["tokens_per_gpu_hour"] == pytest.approx(1200 / 0.2)


def joined(run: RunDir, epoch: int, index: int, up_s: float, **holder: Any) -> None:
    """An engine that came from outside."""
    made = run.attempt(epoch)
    seat = seats.take(made, index, holder)
    assert seat.index == index
    told = {"busy_s": up_s / 2, "up_s": up_s}
    record = Record(time=BEGAN, role="generator", index=index, epoch=epoch, kind="generation", values=told)
    made.records("generator", index).write_bytes(to_line(record))


def test_satellites_are_counted_by_what_their_engines_served(run: RunDir) -> None:
    """Two engines of two GPUs each on one node, for 36 s, and one with a node without GPUs to itself."""
    for index in (2, 3):
        joined(run, 1, index, 36.0, job="13_1", engines=2, gpus=4)
    joined(run, 2, 2, 18.0, job="", engines=1, gpus=0)
    rows, facts = report(run, ask=False)
    assert facts["node_hours"] == pytest.approx(
        {"trainer": 90 / 3600, "generation": 180 / 3600, "satellites": (36 + 18) / 3600}
    )
    assert facts["gpu_hours"] == pytest.approx({"generation": 8 * 90 / 3600, "satellites": 4 * 36 / 3600})
    assert facts["tokens_per_gpu_hour"] == pytest.approx(1200 / 0.24)
    assert facts["engines_idle_share"] == pytest.approx(1 - (30 + 45) / (80 + 90))
    assert rows["node-hours"] == "generation 0.05, trainer 0.025, satellites 0.015"
    assert rows["GPU-hours"] == "generation 0.2, satellites 0.04"


SATELLITES = """\
13_1|PREEMPTED|0:0|0:0|a|b|72|1800000|billing=4,cpu=4,gres/gpu=4,mem=1G,node=1
13_1.batch|CANCELLED|0:15||a|b|72||cpu=4,node=1
13_1|RUNNING|0:0|0:0|c||36||billing=4,cpu=4,gres/gpu=4,mem=1G,node=1
15_2|COMPLETED|0:0|0:0|c|d|18||cpu=4,node=2
"""


def test_slurms_accounts_know_better_what_satellites_held(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for job in ("13_1", "15_2", "12"):  # the last is the run's own
        note_satellite(run, job)
    joined(run, 1, 2, 20.0, job="13_1", engines=1, gpus=4)
    rows = {("12", "13", "15"): ACCOUNTS + SATELLITES}
    monkeypatch.setattr(usage, "accounted", lambda jobs: parse_accounts(rows[tuple(jobs)]))
    _, facts = report(run, ask=True)
    assert facts["node_hours"]["satellites"] == pytest.approx((72 + 36 + 2 * 18) / 3600)
    assert facts["gpu_hours"]["satellites"] == pytest.approx(4 * (72 + 36) / 3600)
    assert facts["energy_kwh"] == pytest.approx(2.5)


def test_gpus_that_two_roles_share_a_node_with_are_counted_by_role_and_so_are_those_that_nobody_has(
    run: RunDir,
) -> None:
    """Of 60 and 30 s: 8 GPUs on one node, of which the trainer has 2 and the engines 4."""
    for epoch in (1, 2):
        job = read_json(run.attempt(epoch).job)
        shared = {
            "nodes": {"trainer": ["n1"]},
            "gpus": {"trainer": 8},
            "devices": {"trainer": 2, "generator": 4, "rollout": 0},
        }
        publish_json(run.attempt(epoch).job, job | shared)
    rows, facts = report(run, ask=False)
    assert facts["gpu_hours"] == {"trainer": 180 / 3600, "generator": 360 / 3600, "unused": 180 / 3600}
    assert rows["GPU-hours"] == "generator 0.1, trainer 0.05, unused 0.05"


def test_how_each_attempt_ended_with_what_only_the_accounts_know(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "accounted", lambda jobs: parse_accounts(ACCOUNTS) if jobs == ["12"] else [])
    rows, _ = report(run, ask=True)
    assert rows["energy"] == "2 kWh"
    assert rows["attempt 1"] == "job 12, 0:01:00, cut off: NODE_FAIL"
    assert rows["attempt 2"] == "job 12, requeue 1, 0:00:30, finished"


def test_without_accounts_the_files_speak_alone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: object) -> None:
        raise SubmissionError("there are none")

    monkeypatch.setattr(usage, "accounted", none)
    rows, _ = report(run, ask=True)
    assert rows["attempt 1"] == "job 12, 0:01:00, running, unless it was cut off"


def test_an_attempt_that_the_launcher_gave_up_says_why(run: RunDir) -> None:
    values = {"process": "run", "reason": "trainer-0 ended with signal 9", "pause_s": 0.0}
    line = to_line(Record(time=BEGAN, role="launcher", index=0, epoch=2, kind="restart", values=values))
    run.attempt(2).records("launcher", 0).write_bytes(line)
    rows, _ = report(run, ask=False)
    assert rows["attempt 1"] == "job 12, 0:01:00, trainer-0 ended with signal 9"


def test_a_run_on_one_machine_has_no_such_rows(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.attempt(1).create()
    rows, facts = report(run, ask=True)
    assert facts == {}
    assert not any(name.startswith(("attempt ", "node")) for name in rows)


def test_a_run_on_one_machine_that_slurm_jobs_have_joined_has_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path / "run")
    publish_json(run.attempt(1).create().state, {"state": "finished", "host": "n1", "pid": 7, "boot": "b"})
    note_satellite(run, "13_1")
    note_satellite(run, "15_2")
    monkeypatch.setattr(usage, "accounted", lambda jobs: {("13", "15"): parse_accounts(SATELLITES)}[tuple(jobs)])
    rows, facts = report(run, ask=True)
    assert facts["node_hours"] == pytest.approx({"satellites": (72 + 36 + 2 * 18) / 3600})
    assert facts["gpu_hours"] == pytest.approx({"satellites": 4 * (72 + 36) / 3600})
    assert facts["tokens_per_gpu_hour"] is None, "of the trainer's nobody knows"
    assert rows["node-hours"] == "satellites 0.04"
    assert rows["attempt 1"] == "not in a job, finished"

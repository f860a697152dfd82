"""What ``areal-hpc why`` says of a run that runs, one whose launcher is gone, and one that has ended."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_hpc import cli
from areal_hpc.cluster.owner import Owner, start_ticks
from areal_hpc.fs import publish_json
from areal_hpc.liveness.observer import Observer
from areal_hpc.report import why_lines
from areal_hpc.run_dir import RunDir

BATCH: dict[str, Any] = {"what": "a batch", "parties": ["rollout-0"], "limit_s": 1800.0}
TICKET: dict[str, Any] = {"what": "a free ticket", "parties": ["trainer-0"], "limit_s": None}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path / "run")
    made.config.write_text("limits: {quiet_s: 25.0, start_s: 300.0, of_an_older_version: 1}\n")
    return made


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


class Attempt:
    def __init__(self, run: RunDir, state: str, **changes: Any) -> None:
        self.dir = run.attempt(1).create()
        self.owner = Owner.this_process().record()
        publish_json(self.dir.state, {"state": state, **self.owner, **changes})
        self.beats: dict[str, dict[str, Any]] = {}

    def says(self, name: str, *waits: dict[str, Any], moved: float = 40.0, **changes: Any) -> None:
        (self.dir.logs / f"{name}.log").touch()
        told = [{"seconds": 30.0, "count": 1, "about": "", **wait} for wait in waits]
        self.beats[name] = {
            **{"incarnation": 0, "counter": 5, "ended": False, "waits": told},
            **{"achieved": {"steps": {"count": 3, "seconds": moved}}, **self.owner, **changes},
        }
        self.publish(name)

    def publish(self, name: str) -> None:
        publish_json(self.dir.heartbeats / f"{name}.json", self.beats[name])

    def beat(self, _: float) -> None:
        """Everybody who lives beats, instead of sleeping."""
        for name, beat in self.beats.items():
            if beat["pid"] == self.owner["pid"]:
                beat["counter"] += 1
                self.publish(name)


def test_a_run_that_gets_on_says_so(run: RunDir) -> None:
    attempt = Attempt(run, "running")
    attempt.says("trainer-0", BATCH)
    attempt.says("rollout-0", TICKET, moved=1.0)
    lines = why_lines(run, sleep=attempt.beat)
    assert lines[:4] == [
        "run run, attempt 1: running",
        "trainer-0 waits for rollout-0: a batch (30 s of 1800 s)",
        "<- rollout-0 waits for trainer-0: a free ticket (30 s); achieved: steps 3 (1 s ago)",
        "nobody stands still; the chain ends with rollout-0",
    ]
    assert lines[4:] == [
        "all waits:",
        "  rollout-0 waits for trainer-0: a free ticket (30 s)",
        "  trainer-0 waits for rollout-0: a batch (30 s of 1800 s)",
    ]


def test_a_process_that_is_gone_or_stopped_is_found_at_once(run: RunDir, other: subprocess.Popen[bytes]) -> None:
    attempt = Attempt(run, "running")
    attempt.says("trainer-0", BATCH)
    attempt.says("rollout-0", TICKET, pid=other.pid, start_ticks=start_ticks(other.pid), moved=1.0)
    other.send_signal(19)
    while Owner.from_record(attempt.beats["rollout-0"]).kernel_state() != "T":
        pass
    told = "\n".join(why_lines(run, sleep=attempt.beat))
    where = f"process {other.pid} on {socket.gethostname()}"
    assert f"{where} is stopped by a signal: `kill -CONT {other.pid}` lets it go on" in told
    assert "stand still: rollout-0, trainer-0; the chain ends with rollout-0" in told
    other.kill()
    other.wait()
    told = "\n".join(why_lines(run, sleep=attempt.beat))
    assert f"<- rollout-0 is gone: {where} ended without a word" in told


def test_one_on_another_host_is_judged_by_its_counter_alone(run: RunDir) -> None:
    attempt, now = Attempt(run, "running"), 0.0
    observer = Observer(attempt.dir, silent_s=6.0, start_s=300.0, at_once=True, clock=lambda: now)
    attempt.says("rollout-0", TICKET, host="node17", pid=1)
    (seen,) = observer.look(["rollout-0"])
    assert (seen.absent, observer.has_proof(seen)) == ("", False)
    now = 7.0
    (seen,) = observer.look(["rollout-0"])
    assert seen.absent == "has given no sign of life for 7 s; process 1 on node17"
    assert seen.waits[0].seconds == 37.0, "a wait goes on while nothing is heard"
    attempt.beats["rollout-0"]["counter"] += 1
    attempt.publish("rollout-0")
    (seen,) = observer.look(["rollout-0"])
    assert (seen.absent, observer.has_proof(seen)) == ("", True)


def test_one_that_is_not_up_yet_is_said_to_come_up(run: RunDir) -> None:
    attempt = Attempt(run, "running")
    attempt.says("rollout-0", TICKET)
    (attempt.dir.logs / "trainer-0.log").touch()
    clocked = iter(range(10**6))
    lines = why_lines(run, sleep=attempt.beat, clock=lambda: float(next(clocked)))
    assert lines[1].startswith("trainer-0 is at work: coming up, no heartbeat yet (")
    assert lines[2] == "nobody stands still; the chain ends with trainer-0"


def test_logs_of_slurms_steps_and_of_engines_servers_are_no_processes_that_come_up(run: RunDir) -> None:
    attempt = Attempt(run, "running")
    attempt.says("rollout-0", TICKET)
    for name in ("step-0", "sglang-0", "vllm-0", "sglang-part-1"):
        (attempt.dir.logs / f"{name}.log").touch()
    looks: list[float] = []
    lines = why_lines(run, sleep=lambda pause_s: (looks.append(pause_s), attempt.beat(pause_s))[1])
    assert lines[-2:] == ["all waits:", "  rollout-0 waits for trainer-0: a free ticket (30 s)"]
    assert len(looks) == 1  # as soon as its heart was seen to beat


def test_a_run_that_was_killed_tells_what_it_waited_for_last(run: RunDir) -> None:
    attempt = Attempt(run, "running", start_ticks=1)
    attempt.says("trainer-0", BATCH, pid=1 << 22)
    attempt.says("rollout-0", TICKET, ended=True)
    lines = why_lines(run)
    assert lines[0] == "run run, attempt 1: its launcher is gone; this is what was last said"
    assert lines[1].startswith("trainer-0 waits for rollout-0: a batch (30 s of 1800 s)")
    assert lines[-1] == "  trainer-0 waits for rollout-0: a batch (30 s of 1800 s)"


def test_a_run_that_got_stuck_and_ended_tells_what_the_watchdog_said(run: RunDir) -> None:
    attempt = Attempt(run, "failed", about="stuck for 600 s at generator-0")
    attempt.says("trainer-0", ended=True)
    attempt.dir.stall.write_text("stuck for 600 s at generator-0:\ntrainer-0 waits for ...\n")
    assert why_lines(run) == [
        "run run, attempt 1: failed; this is what was last said",
        "stuck for 600 s at generator-0:",
        "trainer-0 waits for ...",
        "no process was cut off in a wait",
    ]


def test_a_run_without_a_process_or_a_start_says_so(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["why", str(run.root)]) == 0
    assert capsys.readouterr().out == "run run has not been started\n"
    Attempt(run, "running")
    assert why_lines(run) == ["run run, attempt 1: running", "no process has been started yet"]
    assert cli.main(["why", str(run.root / "nowhere")]) == 2

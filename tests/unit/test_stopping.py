"""Requests to stop: signals, and a file in the run directory."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.buffer.epochs import claim_epoch
from areal_hpc.cluster.owner import Owner
from areal_hpc.errors import RunDirError
from areal_hpc.fs import publish_json
from areal_hpc.liveness.stopping import Signals, asked_by, stop_run
from areal_hpc.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def leave(run: RunDir, state: str | None, **changes: Any) -> None:
    """An attempt as this process or, with ``changes``, another would have left it; None: it got no further yet."""
    owner = dataclasses.replace(Owner.this_process(), **changes).record()
    epoch = claim_epoch(run, owner)
    if state is not None:
        publish_json(run.attempt(epoch).create().state, {"state": state, **owner})


@pytest.fixture
def hangup() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler) and None
    signal.signal(signal.SIGHUP, before)


def test_signals_are_counted_and_given_back(hangup: Callable[[Any], None]) -> None:
    hangup(signal.SIG_DFL)
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert signals.count == 3
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("number", "in_a_job", "why"),
    [
        (signal.SIGINT, False, "Ctrl-C, or SIGINT"),
        (signal.SIGTERM, False, "SIGTERM"),
        (signal.SIGHUP, False, "its terminal was closed"),
        (signal.SIGTERM, True, "Slurm was to end its job"),
    ],
)
def test_who_asked_for_a_stop_is_known_by_the_first_signal_or_by_the_file(
    number: signal.Signals, in_a_job: bool, why: str, run: RunDir, hangup: Callable[[Any], None]
) -> None:
    hangup(signal.SIG_DFL)
    attempt = run.attempt(1).create()
    with Signals(from_scheduler=in_a_job) as signals:
        assert asked_by(attempt, signals) == ""
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked_by(attempt, signals) == why
        attempt.stop_request.touch()
        assert asked_by(attempt, signals) == "`areal-hpc stop` asked for it"


LATE = """
import sys
from areal_hpc.liveness.stopping import Signals
with Signals(from_scheduler=True):
    pass
print("over", flush=True)
sys.stdin.readline()
sys.exit(75)
"""


def test_in_a_schedulers_job_a_late_signal_does_not_take_the_exit_codes_place() -> None:
    """As at a time limit that a run has just kept: it has finished, and would be called failed."""
    process = subprocess.Popen([sys.executable, "-c", LATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "over\n"
    process.send_signal(signal.SIGTERM)
    process.communicate("\n", timeout=60)
    assert process.returncode == 75


def test_a_signal_interrupts_where_it_is_wanted_once_and_also_if_it_came_before() -> None:
    cleaned = []
    with Signals() as signals:
        with pytest.raises(KeyboardInterrupt), signals.interrupting():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                pytest.fail("it went on")
            finally:
                os.kill(os.getpid(), signal.SIGTERM)  # a scheduler sends several; this one finds a clean-up at work
                cleaned.append(True)
        assert (signals.count, cleaned) == (2, [True])
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), signals.interrupting():
            pytest.fail("it began")


def test_nohup_is_respected(hangup: Callable[[Any], None]) -> None:
    hangup(signal.SIG_IGN)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.count == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_stop_asks_by_a_file_and_waits_for_the_answer(run: RunDir) -> None:
    leave(run, "running")
    attempt = run.attempt(1)

    def answer() -> None:
        while not attempt.stop_request.exists():
            pass
        publish_json(attempt.state, {"state": "stopped", **Owner.this_process().record()})

    thread = threading.Thread(target=answer)
    thread.start()
    assert stop_run(run, timeout_s=20) == "stopped"
    thread.join()


@pytest.mark.parametrize("state", ["running", None])
def test_stop_of_a_run_whose_launcher_is_gone_says_so(state: str | None, run: RunDir) -> None:
    leave(run, state, start_ticks=1)
    run.attempt(1).create()
    assert stop_run(run, timeout_s=20) == "dead"
    assert not run.attempt(1).stop_request.exists()


def test_stop_gives_up_in_words(run: RunDir) -> None:
    leave(run, "running", host="node17")
    with pytest.raises(RunDirError, match=r"process \d+ on node17 did not stop in 0 s; wait longer with --timeout"):
        stop_run(run, timeout_s=0)
    assert run.attempt(1).stop_request.exists()


def test_a_launcher_between_two_attempts_is_asked_again_in_the_next(run: RunDir) -> None:
    leave(run, "restarting")

    def go_on() -> None:
        while not run.attempt(1).stop_request.exists():
            pass
        leave(run, "running")
        while not run.attempt(2).stop_request.exists():
            pass
        publish_json(run.attempt(2).state, {"state": "stopped", **Owner.this_process().record()})

    thread = threading.Thread(target=go_on)
    thread.start()
    assert stop_run(run, timeout_s=20) == "stopped"
    thread.join()

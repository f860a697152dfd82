"""``areal-hpc join``: how engines serve a run that they have joined, for how long, and what ends that."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs_to_join import ELSEWHERE, begin, end, run_to_join

from areal_hpc import telemetry
from areal_hpc.cli import main
from areal_hpc.cluster.local import Ended, LocalLauncher
from areal_hpc.cluster.owner import Owner
from areal_hpc.config.describe import dump
from areal_hpc.config.load import load
from areal_hpc.errors import NodeLost, RoleDied, RunDirError, WaitTimeout
from areal_hpc.exits import EXIT_DONE, EXIT_ELSEWHERE, EXIT_FAILED, EXIT_STOPPED, EXIT_UNNEEDED, EXIT_USER_ERROR
from areal_hpc.fs import publish, publish_json
from areal_hpc.liveness import seats
from areal_hpc.liveness.job import satellite_jobs
from areal_hpc.liveness.resting import resting
from areal_hpc.liveness.stopping import RUNNING
from areal_hpc.roles import joining
from areal_hpc.roles.joining import join_run
from areal_hpc.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_to_join(tmp_path)


class Engines:
    """Stands in for the processes of engines: they run until a test, or a stop, ends them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[str, int, dict[str, str]]] = []
        self.ending: list[Ended] = []
        self.on_start = lambda: None
        monkeypatch.setattr(LocalLauncher, "start", lambda launcher, *what: self._start(launcher, *what))  # noqa: PLW0108  a method
        monkeypatch.setattr(LocalLauncher, "died", lambda launcher: self._died(launcher))  # noqa: PLW0108
        monkeypatch.setattr(LocalLauncher, "stop", self._stop)
        monkeypatch.setattr(joining, "LOOK_S", 0.01)

    def _start(self, launcher: LocalLauncher, role: str, index: int, variables: dict[str, str]) -> None:
        launcher.running[role, index] = None  # type: ignore[assignment]
        self.started.append((f"{role}-{index}", launcher.num_starts[role, index], variables))
        launcher.attempt.log(role, index).touch()
        self.on_start()

    def _died(self, launcher: LocalLauncher) -> list[Ended]:
        ended, self.ending = self.ending, []
        for one in ended:
            del launcher.running[one.role, one.index]
        return ended

    @staticmethod
    def _stop(launcher: LocalLauncher, timeout_s: float, at_once: Any) -> list[Ended]:
        ended = [Ended(*key, EXIT_STOPPED) for key in launcher.running]
        launcher.running.clear()
        return ended


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """What comes late is ignored in a process that ends, which this one does not."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    return Engines(monkeypatch)


def join(run: RunDir, **options: Any) -> int:
    values: dict[str, Any] = {"num_engines": None, "after": 0, "wait_s": None, "environment": {}}
    return join_run(run.root, **{**values, **options})


def test_a_run_is_served_to_its_end(run: RunDir, engines: Engines) -> None:
    attempt = begin(run)
    engines.on_start = lambda: end(attempt, "finished") if len(engines.started) == 2 else None
    assert join(run, num_engines=2) == EXIT_DONE
    assert engines.started == [("generator-1", 0, {}), ("generator-2", 0, {})]
    assert seats.newest(attempt) == {}
    assert seats.vacant(attempt) == {"generator-1", "generator-2"}


def test_each_engine_is_bound_to_devices_of_its_own(
    run: RunDir, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    attempt = begin(run)
    engines.on_start = lambda: end(attempt, "finished") if len(engines.started) == 2 else None
    assert join(run, environment=os.environ) == EXIT_DONE
    assert [variables["CUDA_VISIBLE_DEVICES"] for _, _, variables in engines.started] == ["4", "6"]


def test_when_it_is_told_to_leave_it_leaves_its_seats(run: RunDir, engines: Engines) -> None:
    attempt = begin(run)
    engines.on_start = lambda: os.kill(os.getpid(), signal.SIGTERM)
    assert join(run, environment={"SLURM_JOB_ID": "12"}) == EXIT_STOPPED
    assert satellite_jobs(run) == ["12"]
    assert {name: seats.last(attempt)[0].holder()[name] for name in ("job", "engines", "gpus")} == {
        "job": "12",
        "engines": 1,
        "gpus": 0,
    }
    assert seats.vacant(attempt) == {"generator-1"}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_next_attempt_is_served_too(run: RunDir, engines: Engines) -> None:
    first = begin(run)

    def on_start() -> None:
        if len(engines.started) == 1:
            end(first, "stopped")
            begin(run)
        else:
            end(run.attempt(2), "finished")

    engines.on_start = on_start
    assert join(run) == EXIT_DONE
    assert [name for name, _, _ in engines.started] == ["generator-1", "generator-1"]
    assert seats.vacant(run.attempt(2)) == {"generator-1"}


def test_an_engine_that_dies_is_replaced_on_its_seat_and_its_device_is_free(run: RunDir, engines: Engines) -> None:
    attempt = begin(run)

    def on_start() -> None:
        if len(engines.started) == 1:
            engines.ending.append(Ended("generator", 1, -signal.SIGKILL))
        else:
            end(attempt, "finished")

    engines.on_start = on_start
    assert join(run) == EXIT_DONE
    assert [(name, incarnation) for name, incarnation, _ in engines.started] == [("generator-1", 0), ("generator-1", 1)]


def test_one_that_dies_again_and_again_is_not(run: RunDir, engines: Engines) -> None:
    publish(run.config, dump(load([run.config], ["limits.restarts=0"])).encode())
    attempt = begin(run)
    engines.on_start = lambda: engines.ending.append(Ended("generator", 1, EXIT_FAILED))
    with pytest.raises(RoleDied, match="generator-1 ended with exit code 1"):
        join(run)
    assert seats.vacant(attempt) == {"generator-1"}


def test_a_trainer_that_is_silent_for_too_long_is_not_served_again(run: RunDir, engines: Engines) -> None:
    publish(run.config, dump(load([run.config], ["limits.stall_s=1"])).encode())
    begin(run, owner=ELSEWHERE)
    publish_json(run.attempt(1).endpoint("trainer", 0), {"host": "127.0.0.1"})
    publish_json(run.attempt(1).state, {"state": RUNNING, **{**ELSEWHERE, "host": socket.gethostname() + "x"}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining._Visit, "_address", lambda _: "127.0.0.1")
        with pytest.raises(
            WaitTimeout, match=r"waited 0\.2 s for an attempt of .*run to work, which did not come; start"
        ):
            join(run)
    assert len(engines.started) == 1


def test_the_wait_for_a_run_is_named_and_has_a_limit_and_a_signal_ends_it(run: RunDir, engines: Engines) -> None:
    with pytest.raises(WaitTimeout, match=r"waited 0\.1 s for an attempt of .*--wait or limits\.rejoin_s"):
        join(run, wait_s=0.1)
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    assert join(run, wait_s=60) == EXIT_STOPPED
    assert engines.started == []


def test_a_job_whose_run_is_out_rests_and_one_outside_of_slurm_gives_up(run: RunDir, engines: Engines) -> None:
    job = {"SLURM_JOB_ID": "12"}
    with pytest.raises(WaitTimeout):
        join(run, wait_s=0.1, environment=job)  # typed in some job, which is not a satellite's to give back
    assert resting(run) == []
    assert join(run, wait_s=0.1, after=3, environment=job, may_rest=True) == EXIT_UNNEEDED
    assert (resting(run, 3), resting(run, 4)) == ([], ["12"])
    attempt = begin(run)
    engines.on_start = lambda: end(attempt, "finished")
    assert join(run, environment=job, may_rest=True) == EXIT_DONE
    assert resting(run) == [], "it has come again"


def test_a_job_whose_engines_die_too_often_rests_until_the_next_attempt(run: RunDir, engines: Engines) -> None:
    publish(run.config, dump(load([run.config], ["limits.restarts=0"])).encode())
    begin(run)
    engines.on_start = lambda: engines.ending.append(Ended("generator", 1, EXIT_FAILED))
    assert join(run, environment={"SLURM_JOB_ID": "12"}, may_rest=True) == EXIT_UNNEEDED
    assert (resting(run, 1), resting(run, 2)) == ([], ["12"])


def test_fault_17_a_job_whose_node_has_lost_its_devices_comes_again_without_it_and_rests_if_it_gets_it_again(
    run: RunDir, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    job = {"SLURM_JOB_ID": "12", "AREAL_HPC_AVOIDED": str(tmp_path / "avoided-12")}
    attempt = begin(run)
    engines.on_start = lambda: engines.ending.append(Ended("generator", 1, EXIT_ELSEWHERE))
    assert join(run, environment=job, may_rest=True) == EXIT_ELSEWHERE
    assert ((tmp_path / "avoided-12/n3").read_text(), resting(run)) == ("n3\n", [])
    assert seats.vacant(attempt) == {"generator-1"}
    assert join(run, environment=job, may_rest=True) == EXIT_ELSEWHERE, "Slurm may have been quicker than its script"
    assert join(run, environment=job, may_rest=True) == EXIT_UNNEEDED
    assert (resting(run, 1), resting(run, 2)) == ([], ["12"])
    with pytest.raises(NodeLost, match="node n3 has lost the devices of generator-1"):
        join(run, environment=job)  # typed in some job


def test_a_node_that_gives_up_stays_while_another_of_its_job_serves_and_leaves_with_it(
    run: RunDir, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is not held in the meantime: it would come again, held, when the run is over."""
    monkeypatch.setattr(joining, "LINGER_S", 0.02)
    job = {"SLURM_JOB_ID": "12", "AREAL_HPC_AVOIDED": str(tmp_path / "avoided-12")}
    attempt = begin(run)
    other = seats.take(attempt, 1, {"job": "12", "host": "n4", "pid": 1})
    stranger = seats.take(attempt, 1, {"job": "13", "host": "n5", "pid": 1})
    looks = []

    def looked(*_: Any) -> Any:
        looks.append(resting(run))
        if len(looks) == 4:
            ends()
        return real(run, "12")

    real = joining._others_serve
    monkeypatch.setattr(joining, "_others_serve", looked)
    engines.on_start = lambda: engines.ending.append(Ended("generator", 3, EXIT_ELSEWHERE))
    ends = other.leave
    assert join(run, environment=job, may_rest=True) == EXIT_ELSEWHERE
    assert (len(looks), len(engines.started)) == (4, 1), "it has not tried again meanwhile"

    looks.clear()
    back = seats.take(attempt, 1, {"job": "12", "host": "n4", "pid": 1})
    ends = lambda: end(attempt, "finished")  # noqa: E731
    assert join(run, environment=job, may_rest=True) == EXIT_DONE, "the run is over, and nobody comes again"
    assert (back.is_held(), stranger.is_held(), resting(run)) == (True, True, [])


def test_an_attempt_that_comes_up_is_waited_for_as_long_as_it_may_take(run: RunDir, engines: Engines) -> None:
    attempt = begin(run)
    attempt.endpoint("trainer", 0).unlink()
    with pytest.raises(WaitTimeout, match=r"waited 0\.3 s for the trainer of .* to come up"):
        publish(run.config, dump(load([run.config], ["limits.start_s=0.3"])).encode())
        join(run, wait_s=0.05)
    publish(run.config, dump(load([run.config], ["limits.start_s=60"])).encode())
    endpoint = {"host": "127.0.0.1", "pid": os.getpid()}
    timer = threading.Timer(0.3, lambda: publish_json(attempt.endpoint("trainer", 0), endpoint))
    timer.start()
    engines.on_start = lambda: end(attempt, "finished")
    assert join(run, wait_s=0.05) == EXIT_DONE
    assert len(engines.started) == 1


def test_an_old_attempts_end_is_not_that_of_a_run_submitted_anew(run: RunDir, engines: Engines) -> None:
    begin(run, "finished")
    with pytest.raises(WaitTimeout):
        join(run, after=1)
    assert join(run, after=0) == EXIT_DONE


def test_fault_29_a_run_whose_launcher_is_on_a_namesake_of_this_machine_is_refused_once_it_is_seen_to_live(
    run: RunDir, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it may be this machine before it was booted anew, whose launcher is gone."""
    attempt = begin(run, owner={**Owner.this_process().record(), "boot": "another"})
    monkeypatch.setattr(joining, "LOOK_S", 0.01)
    with pytest.raises(WaitTimeout):
        join(run, wait_s=0.1)

    def beats(counter: int) -> None:
        publish_json(attempt.heartbeat("trainer", 0), {"incarnation": 0, "counter": counter, "ended": False})

    refused = threading.Event()

    def live() -> None:
        counter = 0
        while not refused.wait(0.05):
            counter += 1
            beats(counter)

    heart = threading.Thread(target=live, daemon=True)
    heart.start()
    host = socket.gethostname()
    with pytest.raises(RunDirError, match=rf"one hostname: the run's first and this one, all named {host}; give each"):
        join(run, wait_s=60)
    refused.set()
    heart.join()
    assert engines.started == []


def test_a_run_of_one_machine_is_joined_on_it(run: RunDir, engines: Engines) -> None:
    begin(run, owner=ELSEWHERE)
    with pytest.raises(RunDirError, match=r"runs on n7 alone \(cluster\.shape=local\)"):
        join(run)
    assert engines.started == []


def test_the_command_hands_on_what_it_is_given_and_says_what_is_wrong(
    run: RunDir, engines: Engines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(telemetry, "setup_logging", lambda *_: None)
    assert main(["join", str(run.root / "nowhere")]) == EXIT_USER_ERROR
    assert "is not a run directory" in capsys.readouterr().err
    attempt = begin(run)
    assert main(["join", str(run.root), "--after", "1", "--wait", "0.1"]) == EXIT_FAILED
    assert "waited 0.1 s for an attempt of" in capsys.readouterr().err
    engines.on_start = lambda: end(attempt, "finished") if len(engines.started) == 3 else None
    assert main(["join", str(run.root), "--engines", "3"]) == EXIT_DONE

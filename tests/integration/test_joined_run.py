"""A run without an engine of its own, served by whoever joins: told to leave, killed, frozen, staying to the end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from forked import ForkedCommand
from launched import Launched, command, environment, launched, until
from test_live_roles import check_exactly_once, engine_events

from areal_hpc.exits import EXIT_DONE, EXIT_STOPPED
from areal_hpc.fs import read_json
from areal_hpc.liveness import seats


class Satellite:
    """``areal-hpc join`` and what it has started."""

    def __init__(self, started: Launched, number: int, engines: int) -> None:
        self.output = started.run.root.with_name(f"satellite-{number}.txt")
        words = ["join", str(started.run.root), "--engines", str(engines), "--wait", "100"]
        self.process = ForkedCommand(words, self.output, environment())
        self.seen: list[psutil.Process] = []

    def look(self) -> bool:
        with suppress(psutil.NoSuchProcess):
            self.seen = psutil.Process(self.process.pid).children(recursive=True)
        return bool(self.seen)

    def end(self) -> None:
        self.look()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.seen:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def satellite(started: Launched, number: int, engines: int = 1) -> Iterator[Satellite]:
    made = Satellite(started, number, engines)
    try:
        yield made
    finally:
        made.end()


def num_joined(started: Launched) -> int:
    return len(engine_events(started, "joined")) + len(engine_events(started, "back"))


def test_engines_join_and_leave_a_run_that_has_none(tmp_path: Path, model: Path) -> None:
    words = ("generation.replicas=0", "trainer.total_steps=16", "rollout.reward=tiny_task:paced", "limits.stop_s=5")
    frozen = ("limits.quiet_s=2", "limits.engine_s=4")
    with launched(tmp_path, model, *words, *frozen) as started:
        until("the configuration", started.run.config.exists)
        attempt = started.run.attempt(1)
        with satellite(started, 0) as leaves:
            started.wait_for_step(2)
            assert seats.present(attempt).keys() == {0}
            status = command("status", started.run.root).stdout
            assert "satellites   joined: generator-0 (" in status
            leaves.process.send_signal(signal.SIGTERM)
            assert leaves.process.wait(60) == EXIT_STOPPED, leaves.output.read_text()
        assert seats.vacant(attempt) == {"generator-0"}
        with satellite(started, 1, engines=2) as killed:
            until("an engine again", lambda: num_joined(started) >= 2)
            killed.look()
            killed.process.kill()
            until("their end", lambda: not seats.newest(attempt))  # they see that nobody is there who started them
        before = num_joined(started)
        with satellite(started, 2) as stays:
            until("an engine that stays", lambda: num_joined(started) > before)
            (engine,) = seats.present(attempt).values()
            pid = read_json(attempt.endpoint("generator", engine.index))["pid"]
            psutil.Process(pid).suspend()
            # There is place for one engine only, which it has until its satellite ends it.
            until("another in its place", lambda: set(seats.present(attempt).values()) - {engine})
            assert not psutil.pid_exists(pid)
            assert started.wait() == EXIT_DONE, started.text
            assert stays.process.wait(60) == EXIT_DONE, stays.output.read_text()
        assert len(started.run.all_attempts()) == 1
        check_exactly_once(started.run)
        assert num_joined(started) >= 3
        assert {path.name for path in attempt.logs.glob("generator-*")} == {"generator-0.log", "generator-1.log"}


def test_a_run_that_nobody_joins_for_longer_than_its_budget_stops_and_says_why(tmp_path: Path, model: Path) -> None:
    with launched(tmp_path, model, "generation.replicas=0", "limits.alone_s=1") as started:
        assert started.wait(60) == EXIT_STOPPED, started.text
        why = "no engine was there for 1 s (limits.alone_s)"
        assert (
            f"{why}, so the run stops; `areal-hpc resume` goes on: no satellite waits in Slurm's queue" in started.text
        )
        assert f"stopped: {why} (attempt 1)" in command("status", started.run.root).stdout
        assert len(started.run.all_attempts()) == 1
        assert started.left_over() == []

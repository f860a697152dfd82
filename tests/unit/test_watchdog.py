"""When the watchdog speaks and when it gives up, with a clock of the test's own and heartbeats that it writes."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.cluster.owner import Owner, start_ticks
from areal_hpc.config.schema import LimitsConfig
from areal_hpc.errors import Stalled
from areal_hpc.fs import read_if_listed
from areal_hpc.liveness import seats, stacks
from areal_hpc.liveness.picture import Seen
from areal_hpc.liveness.watchdog import Watchdog
from areal_hpc.run_dir import AttemptDir, RunDir
from areal_hpc.waits import ANYBODY, FILE_SYSTEM

LIMITS = LimitsConfig(quiet_s=24.0, engine_s=60.0, stall_s=100.0, start_s=300.0)
BATCH: dict[str, Any] = {"what": "a batch", "parties": ["rollout-0"], "limit_s": 1800.0}
ANSWER: dict[str, Any] = {"what": "an answer to /generate", "parties": ["generator-0"], "limit_s": 600.0}
IDLE: dict[str, Any] = {"what": "requests", "parties": [ANYBODY], "limit_s": None}
WEIGHTS: dict[str, Any] = {"what": "weights; held by update", "parties": ["trainer-0"], "limit_s": None}
TICKET: dict[str, Any] = {"what": "a free ticket", "parties": ["trainer-0"], "limit_s": None}


@dataclass
class Process:
    pid: int

    def send_signal(self, number: int) -> None:
        raise AssertionError(f"nothing here sends signal {number}")


class World:
    """A run of a trainer and a rollout worker; each second everybody beats who is not silenced."""

    def __init__(self, attempt: AttemptDir) -> None:
        self.attempt, self.now = attempt, 0.0
        self.asked: list[tuple[int, bool]] = []
        self.achieved_s = 0.0
        self.owner = Owner.this_process().record()
        self.running: dict[tuple[str, int], stacks.Process] = {}
        self.running |= {("trainer", 0): Process(self.owner["pid"]), ("rollout", 0): Process(self.owner["pid"])}
        self.watchdog = Watchdog(attempt, LIMITS, clock=lambda: self.now)

    def beat(
        self, role: str, *waits: dict[str, Any], moved: float | None = None, counter: int | None = None, **more: Any
    ) -> None:
        achieved = {} if moved is None else {"steps": {"count": 1, "seconds": self.now - moved}}
        told = [{"seconds": self.now, "count": 1, "about": "", **wait} for wait in waits]
        state = {"incarnation": 0, "counter": int(self.now) if counter is None else counter, "ended": False}
        beat = {**self.owner, **state, "waits": told, "achieved": achieved, **more}
        self.attempt.heartbeat(role, 0).write_text(json.dumps(beat))  # there is nobody who could read a half

    @property
    def num_requests(self) -> int:
        return int(read_if_listed(self.attempt.stacks / stacks.REQUEST) or 0)

    def until(self, moment: float, beats: Callable[[], None]) -> None:
        while self.now < moment:
            self.now += 1.0
            beats()
            self.watchdog.look(self.running)

    def all_wait(self) -> None:
        self.beat("trainer", BATCH, moved=self.achieved_s)
        self.beat("rollout", TICKET)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> World:
    caplog.set_level(logging.WARNING)
    made = World(RunDir.create(tmp_path / "run").attempt(1).create())
    monkeypatch.setattr(stacks, "ask_silent", lambda process, wake=False: made.asked.append((process.pid, wake)))
    return made


def test_a_run_that_gets_on_is_left_alone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def beats() -> None:
        world.beat("trainer", BATCH, moved=world.now - world.now % 10)
        world.beat("rollout", TICKET)

    world.until(150.0, beats)
    assert caplog.records == []
    assert world.asked == []
    assert not world.attempt.stall.exists()


@pytest.mark.parametrize(("num_others", "looks"), [(0, 30), (300, 10), (3000, 3)])
def test_many_are_looked_at_more_rarely_and_never_too_rarely_to_name_a_stall(
    world: World, monkeypatch: pytest.MonkeyPatch, num_others: int, looks: int
) -> None:
    """In 30 seconds: each second, each three, and each twelve, which is half of ``quiet_s``."""
    looked: list[float] = []
    monkeypatch.setattr(
        world.watchdog._observer, "look", lambda names: looked.append(world.now) or [Seen(name="trainer-0", ended=True)]
    )
    others = {("generator", index): Process(1) for index in range(num_others - 2)}
    world.running |= others
    world.until(30.0, lambda: None)
    assert len(looked) == looks


def test_a_stall_is_named_once_and_in_time_and_then_ends_the_attempt(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.until(23.0, world.all_wait)
    assert caplog.records == []
    world.until(24.0, world.all_wait)
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("stuck for 24 s at trainer-0, rollout-0: trainer-0 waits for rollout-0: a batch (")
    assert second == f"the stacks of all roles are in {world.attempt.stacks}"
    assert world.attempt.stall.read_text().startswith("stuck for 24 s at trainer-0, rollout-0:\ntrainer-0 waits")
    assert (world.num_requests, world.asked) == (1, [])  # those whose heart beats are asked by a file
    with pytest.raises(Stalled, match=r"stuck for 100 s at trainer-0, rollout-0:\n.*\n(.*\n)*.*limits\.stall_s"):
        world.until(200.0, world.all_wait)
    assert world.now == LIMITS.stall_s
    assert len(caplog.records) == 2
    assert (world.num_requests, world.asked) == (2, [])
    assert world.attempt.stall.read_text().startswith("stuck for 100 s")


def test_one_that_falls_silent_is_named_though_the_trainer_gets_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def beats() -> None:
        world.beat("trainer", moved=world.now)
        world.beat("rollout", TICKET, counter=min(int(world.now), 10))

    world.until(33.0, beats)
    assert caplog.records == []
    world.until(34.0, beats)
    pid = world.owner["pid"]
    assert f"rollout-0 has given no sign of life for 24 s; process {pid} on " in caplog.text
    assert world.asked == [(pid, False)]
    with pytest.raises(Stalled, match=r"stuck for 100 s at rollout-0"):
        world.until(300.0, beats)
    assert world.asked == [(pid, False), (pid, True)]


@dataclass
class Engine:
    """A process that takes signals."""

    pid: int
    signals: list[int] = field(default_factory=list)

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.fixture
def engine(world: World) -> Engine:
    made = Engine(world.owner["pid"])
    world.running["generator", 0] = made
    return made


def test_fault_41_an_engine_that_answers_nobody_is_ended_alone(
    world: World, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Its heart beats, it believes that it is idle, and a request has waited for it for a minute."""

    def beats() -> None:
        world.beat("trainer", BATCH, moved=0.0)
        world.beat("rollout", TICKET, ANSWER)
        world.beat("generator", IDLE, moved=1.0)

    world.until(59.0, beats)
    assert engine.signals == []
    world.until(62.0, beats)
    assert engine.signals == [signal.SIGKILL]
    assert "generator-0 waits for whoever asks: requests (6" in caplog.text
    assert "longer than limits.engine_s = 60 s, so it is killed and replaced" in caplog.text

    engine.pid += 1  # the next one comes up, and what its predecessor said last is still there
    world.until(80.0, beats)
    assert engine.signals == [signal.SIGKILL]

    def again() -> None:
        world.beat("trainer", BATCH, moved=world.now)
        world.beat("rollout", TICKET, ANSWER, moved=world.now)
        world.beat("generator", moved=world.now, pid=engine.pid, incarnation=1)

    world.until(300.0, again)
    assert engine.signals == [signal.SIGKILL]


@pytest.mark.parametrize("engine_s", [60.0, 0.0])
def test_fault_41_one_that_has_joined_and_answers_nobody_is_given_up_and_not_ended_from_here(
    world: World, caplog: pytest.LogCaptureFixture, engine_s: float
) -> None:
    limits = dataclasses.replace(LIMITS, engine_s=engine_s)
    world.watchdog = Watchdog(world.attempt, limits, clock=lambda: world.now)
    seat = seats.take(world.attempt, 0, {"host": "n7"})

    def beats() -> None:
        world.beat("trainer", BATCH, moved=world.now)
        world.beat("rollout", TICKET, ANSWER)
        world.beat("generator", IDLE, moved=1.0)

    world.until(59.0, beats)
    assert seat.is_held()
    world.until(62.0, beats)
    assert seat.is_held() == (engine_s == 0.0), "0 never does"
    if engine_s:
        assert "generator-0 on n7 hangs: generator-0 waits for whoever asks: requests (6" in caplog.text
        assert "longer than limits.engine_s: its seat is free for another engine" in caplog.text


def test_fault_41_an_engine_without_a_sign_of_life_is_ended_though_nobody_waits_for_it(
    world: World, engine: Engine
) -> None:
    def beats() -> None:
        world.beat("trainer", moved=world.now)
        world.beat("rollout", TICKET)
        world.beat("generator", IDLE, counter=min(int(world.now), 10))

    world.until(69.0, beats)
    assert engine.signals == []
    world.until(70.0, beats)
    assert engine.signals == [signal.SIGKILL]


@pytest.mark.parametrize(
    ("waits", "moves", "asked"),
    [([IDLE], False, False), ([WEIGHTS], False, True), ([], True, True)],
    ids=["idle", "waits for weights", "generates"],
)
def test_an_engine_that_is_idle_or_held_or_slow_is_left_alone(
    waits: list[dict[str, Any]], moves: bool, asked: bool, world: World, engine: Engine
) -> None:
    def beats() -> None:
        world.beat("trainer", BATCH, moved=0.0)
        world.beat("rollout", TICKET, *([ANSWER] if asked else []))
        world.beat("generator", *waits, moved=world.now if moves else 0.0)

    world.until(LIMITS.stall_s - 1.0, beats)
    assert engine.signals == []


@pytest.mark.parametrize("worker_s", [60.0, 0.0])
def test_fault_24_a_worker_that_hangs_is_ended_and_one_that_does_not_end_by_it_ends_the_attempt(
    world: World, caplog: pytest.LogCaptureFixture, worker_s: float
) -> None:
    """Its heart beats, and a file call of it has no end."""
    world.watchdog = Watchdog(world.attempt, dataclasses.replace(LIMITS, worker_s=worker_s), clock=lambda: world.now)
    worker = Engine(world.owner["pid"])  # takes signals, and nothing comes of them
    world.running["rollout", 0] = worker
    call = {"what": "reading ring/CONTROL.json", "parties": [FILE_SYSTEM], "limit_s": None}

    def beats() -> None:
        world.beat("trainer", BATCH, moved=0.0)
        world.beat("rollout", call)

    world.until(59.0, beats)
    assert worker.signals == []
    world.until(75.0, beats)
    assert worker.signals == ([signal.SIGKILL] if worker_s else []), "once, and then it has as long again"
    assert ("longer than limits.worker_s = 60 s, so it is killed and replaced" in caplog.text) == bool(worker_s)
    with pytest.raises(Stalled, match=r"stuck for 100 s at rollout-0"):
        world.until(200.0, beats)


def test_an_engine_is_never_ended_where_that_is_switched_off(world: World, engine: Engine) -> None:
    world.watchdog = Watchdog(world.attempt, dataclasses.replace(LIMITS, engine_s=0.0), clock=lambda: world.now)

    def beats() -> None:
        world.beat("trainer", moved=world.now)
        world.beat("generator", IDLE, counter=1)

    world.until(LIMITS.stall_s - 1.0, beats)
    assert engine.signals == []


def test_who_gets_on_again_is_forgiven(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.until(90.0, world.all_wait)
    world.achieved_s = 91.0
    world.until(91.0, world.all_wait)
    assert caplog.records[-1].getMessage() == "the run gets on again"
    world.until(91.0 + 99.0, world.all_wait)  # counted anew
    assert caplog.text.count("stuck for 24 s") == 2


def test_an_instant_between_two_long_phases_is_no_stall(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of ten minutes is over, and the next batch is not at its first micro-batch yet."""
    saving = {"what": "writing the checkpoint of step 7", "parties": [], "limit_s": 1800.0}

    def beats() -> None:
        world.beat("trainer", *([saving] if world.now % 200 < 190 else []), moved=0.0)
        world.beat("rollout", TICKET)

    world.until(420.0, beats)
    assert caplog.records == []


def test_a_role_that_comes_up_has_its_own_limit(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.until(299.0, lambda: None)
    assert caplog.records == []
    world.until(330.0, lambda: None)
    assert "trainer-0 is at work: coming up, no heartbeat yet (3" in caplog.text
    assert world.asked == [], "the request would end a process that does not know it yet"


def test_another_process_of_that_role_is_not_asked_before_it_says_that_it_knows_how(world: World) -> None:
    world.running["rollout", 0] = Process(4711)
    world.beat("rollout", TICKET, counter=1)
    world.until(40.0, lambda: world.beat("trainer", moved=world.now))
    assert (world.num_requests, world.asked) == (1, [])


def test_one_that_is_stopped_is_not_asked_before_all_is_lost(world: World) -> None:
    """The signal would reach it in the instant in which it goes on, wherever that is."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        ticks = start_ticks(other.pid)
        world.running["rollout", 0] = Process(other.pid)
        other.send_signal(signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        world.beat("rollout", TICKET, counter=1, pid=other.pid, start_ticks=ticks)
        with pytest.raises(Stalled, match=rf"`kill -CONT {other.pid}` lets it go on"):
            world.until(300.0, lambda: world.beat("trainer", moved=world.now))
        assert world.asked == [(other.pid, True)]
        other.kill()


def test_only_running_roles_are_judged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The one that has ended has a heartbeat that stands still for ever."""
    world.beat("rollout", TICKET)
    del world.running["rollout", 0]
    world.until(150.0, lambda: world.beat("trainer", moved=world.now))
    world.running.clear()
    world.until(300.0, lambda: None)
    assert caplog.records == []

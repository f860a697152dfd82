"""Signs of life: a counter in a file, judged by the reader's own clock."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.fs import publish_json
from areal_hpc.liveness import heartbeat as module
from areal_hpc.liveness.heartbeat import Pulse, beating, read_heartbeat, read_heartbeats
from areal_hpc.run_dir import AttemptDir, RunDir


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return RunDir.create(tmp_path / "run").attempt(1).create()


def until(ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30.0
    while not (answer := ready()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.001)
    return answer


def beat_of(attempt: AttemptDir) -> dict[str, Any]:
    beat = read_heartbeat(attempt, "rollout-2")
    assert beat is not None
    return beat


def test_a_process_counts_while_it_runs_and_says_when_it_ends(attempt: AttemptDir) -> None:
    waiting = [["generator-0", 12]]
    assert read_heartbeat(attempt, "rollout-2") is None
    with beating(attempt, "rollout", 2, 3, beat_s=0.001, state=lambda: {"waits": waiting}):
        first = until(lambda: read_heartbeat(attempt, "rollout-2"))
        assert (first["pid"], first["incarnation"], first["ended"]) == (os.getpid(), 3, False)
        assert first["waits"] == waiting
        until(lambda: beat_of(attempt)["counter"] > first["counter"] + 1)
    last = beat_of(attempt)
    assert last["ended"]
    assert beat_of(attempt) == last, "it still counts"


def test_a_sign_of_life_costs_no_disk_a_sync(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server syncs a disk that it has in common, and every process of a run beats."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with beating(attempt, "rollout", 2, 3, beat_s=0.001):
        until(lambda: (read_heartbeat(attempt, "rollout-2") or {"counter": 0})["counter"] > 2)
    assert synced == []


def test_many_signs_of_life_are_listed_once(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name of a directory of hundreds is told at each listing, so that one for each process would be 100,000."""
    for index in range(300):
        publish_json(attempt.heartbeat("rollout", index), beat(index), durable=False)
    listings, listed = list[str](), os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: (listings.append(str(path)), listed(path))[1])
    beats = read_heartbeats(attempt, [f"rollout-{index}" for index in range(301)])
    assert [found and found["counter"] for found in beats.values()] == [*range(300), None]
    assert listings == [str(attempt.heartbeats)]


def test_a_process_that_fails_says_that_it_has_ended(attempt: AttemptDir) -> None:
    with pytest.raises(ZeroDivisionError), beating(attempt, "rollout", 2, 0):
        raise ZeroDivisionError
    assert beat_of(attempt)["ended"]


def test_a_full_disk_silences_the_heartbeat_and_not_the_process(
    attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = []

    def refuse(*_: Any, **__: Any) -> None:
        refused.append(1)
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING), beating(attempt, "rollout", 2, 0, beat_s=0.001):
        until(lambda: read_heartbeat(attempt, "rollout-2"))
        monkeypatch.setattr(module, "publish_json", refuse)
        until(lambda: len(refused) > 3)
        monkeypatch.undo()
        said = len(caplog.records)
        before = beat_of(attempt)["counter"]
        until(lambda: beat_of(attempt)["counter"] > before)
    assert said == 1, "it says so once, not at every beat"
    assert "No space left on device" in caplog.text


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def beat(counter: int, incarnation: int = 0, *, ended: bool = False) -> dict[str, Any]:
    return {"pid": 1, "incarnation": incarnation, "counter": counter, "ended": ended, "waits": []}


def test_C36_who_stops_counting_expires_by_the_readers_clock() -> None:
    clock = Clock()
    pulse = Pulse(clock)
    for second in range(10):
        clock.now = second
        pulse.see(beat(min(second, 4)))
    assert pulse.silent_s() == 5.0
    pulse.see(None)  # a stale name, for an instant, is no sign of life and none of death
    assert pulse.silent_s() == 5.0
    pulse.see(beat(1, incarnation=1))  # replaced: counts from the start again
    assert (pulse.silent_s(), pulse.moved, pulse.ended) == (0.0, True, False)


def test_a_single_look_proves_nothing() -> None:
    clock = Clock()
    pulse = Pulse(clock)
    pulse.see(beat(7))
    assert not pulse.moved
    clock.now = 3.0
    pulse.see(beat(7))
    assert (pulse.moved, pulse.silent_s()) == (False, 3.0)
    pulse.see(beat(8, ended=True))
    assert (pulse.moved, pulse.ended) == (True, True)


def test_C36_G10_a_watch_ends_as_soon_as_all_have_moved_and_names_who_has_not(attempt: AttemptDir) -> None:
    clock = Clock()
    beats = {"trainer-0": 5, "generator-0": 9, "rollout-0": 3}

    def publish(dead: set[str]) -> None:
        for name, counter in beats.items():
            moved = 0 if name in dead else int(clock.now // module.BEAT_S)
            role, _, index = name.rpartition("-")
            publish_json(attempt.heartbeat(role, int(index)), beat(counter + moved, ended=name == "rollout-0"))

    def watch(dead: set[str]) -> dict[str, str]:
        def sleep(seconds: float) -> None:
            clock.now += seconds
            publish(dead)

        publish(dead)
        return module.watch_pulses(attempt, clock=clock, sleep=sleep)

    assert watch(set()) == {"trainer-0": "alive", "generator-0": "alive", "rollout-0": "ended"}
    assert clock.now <= module.BEAT_S + 2 * module.LOOK_S
    began = clock.now
    assert watch({"generator-0"}) == {"trainer-0": "alive", "generator-0": "silent", "rollout-0": "ended"}
    assert module.SILENT_S <= clock.now - began <= 15.0

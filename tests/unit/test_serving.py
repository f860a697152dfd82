"""How fast an engine samples, as its generator records it, and what the run hears of one in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from areal_hpc import waits
from areal_hpc.liveness.picture import Seen, explain, hung_engines
from areal_hpc.roles.wiring.serving import ActivityRelay, Meter
from areal_hpc.waits import LEADER, Wait, achieved, open_waits

QUIET_S = 12.5
ASKS = Seen(
    name="rollout-0", waits=(Wait(what="an answer", parties=("generator-0",), seconds=10 * QUIET_S, limit_s=1800.0),)
)
TRAINS = Seen(name=LEADER, waits=(Wait(what="groups", parties=("rollout-0",), seconds=10 * QUIET_S, limit_s=1800.0),))


def heard(told: ActivityRelay) -> Seen:
    """The engine as others hear of it, once its generator has looked at it."""
    before = {what: one.count for what, one in achieved().items()}
    asyncio.run(told.look())
    lately = {what: one for what, one in achieved().items() if one.count != before.get(what)}
    return Seen(name="generator-0", waits=tuple(open_waits()), achieved=lately)


def test_the_rate_is_that_since_the_last_look() -> None:
    counts, moments = iter([100, 100, 350]), iter([0.0, 10.0, 12.0, 17.0])

    async def look() -> Mapping[str, Any]:
        return {"version": 3, "tokens": next(counts)}

    meter = Meter(look, clock=lambda: next(moments))
    told = [asyncio.run(meter.load()) for _ in range(3)]
    assert [one["tokens_per_s"] for one in told] == pytest.approx([100 / 10, 0.0, 250 / 5])
    assert [(one["version"], one["tokens"]) for one in told] == [(3, 100), (3, 100), (3, 350)]


def test_an_engine_in_another_process_gets_on_as_long_as_it_samples_loads_or_is_held() -> None:
    """Whoever waits long for an answer of one that does none of that waits for one that hangs, and it is killed."""
    idle = {"running": 1, "queued": 0, "held": False}
    looks = [
        (idle | {"tokens": 5}, False),
        (idle | {"tokens": 9}, False),
        (idle | {"tokens": 9}, True),
        (idle | {"tokens": 9, "loading": 1.5}, False),
        (idle | {"tokens": 9, "loading": 1.5}, True),
        (idle | {"tokens": 9, "loading": 1.5, "held": True}, False),
        (idle | {"tokens": 9, "loading": 1.5, "held": True}, False),
        (idle | {"tokens": 9, "loading": 1.5}, True),
        (idle | {"tokens": 9, "loading": 1.5, "running": 0, "queued": 3}, True),
    ]
    seen = iter([one for one, _ in looks])

    async def look() -> Mapping[str, Any]:
        return next(seen)

    told = ActivityRelay(look)
    assert [bool(hung_engines([heard(told), ASKS, TRAINS], QUIET_S)) for _ in looks] == [hangs for _, hangs in looks]
    told._wait.close()


def test_what_the_run_records_of_it_is_its_load_alone() -> None:
    async def look() -> Mapping[str, Any]:
        return {"version": 1, "running": 1, "queued": 0, "tokens": 5, "held": False, "loading": None}

    assert asyncio.run(ActivityRelay(look).look()) == {"version": 1, "running": 1, "queued": 0, "tokens": 5}


def test_a_pause_has_lasted_since_it_began_however_often_it_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    paused, moment = iter([True, True, False, True]), iter([100.0, 107.0, 107.0, 130.0, 131.0])
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: next(moment)))

    async def look() -> Mapping[str, Any]:
        held = next(paused)
        return {"running": int(not held), "queued": 3, "tokens": 0, "held": held}

    told, lasted = ActivityRelay(look), []
    asyncio.run(told.look())
    for _ in range(3):
        asyncio.run(told.look())
        lasted.append([wait.seconds for wait in open_waits()])
    assert lasted == [[7.0], [], [1.0]]
    told._wait.close()


def test_one_that_begins_nothing_of_its_queue_is_named_and_not_who_brings_weights() -> None:
    """It is the end of the chain, and the watchdog ends it; held, it would wait for the trainer without end."""
    stuck = {"running": 0, "queued": 3, "tokens": 0, "held": False}

    async def look() -> Mapping[str, Any]:
        return stuck

    told = ActivityRelay(look)
    engine = heard(told)
    told._wait.close()
    late = replace(engine, waits=tuple(replace(wait, seconds=10 * QUIET_S) for wait in engine.waits))
    explanation = explain([late, ASKS, TRAINS], QUIET_S)
    assert explanation.root == "generator-0"
    last = "generator-0 waits for its server: the first of what is queued there to be begun (125 s)"
    assert explanation.chain[-1].startswith(last)
    (sentence,) = hung_engines([late, ASKS, TRAINS], QUIET_S).values()
    assert sentence.startswith(last)

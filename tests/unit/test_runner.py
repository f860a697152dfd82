"""The rollout loops: tickets, places, what is sealed and dropped, stops and stalls."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import psutil
import pytest
from rollout_fakes import Engine, Records, Ring, config, parity, run, runner_of, sample_of, until

from areal_hpc.errors import Fenced, RewardError
from areal_hpc.types import (
    Drop,
    GenerationRequest,
    Prompt,
)
from areal_hpc.waits import open_waits


def test_groups_are_run_and_sealed_and_the_ring_sets_the_pace() -> None:
    async def test() -> None:
        ring, engine, records = Ring(6, done=6), Engine(), Records()
        await runner_of(ring, engine, records).run(ring.stop)
        assert sorted(ring.sealed) == ring.order == list(range(6))
        assert ring.outstanding == set()
        for position, group in ring.sealed.items():
            assert (group.position, group.prompt_id) == (position, f"prompt-{position}")
            assert [t.episode for t in group.trajectories] == [0, 1, 2, 3]
            assert group.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
        assert records.outcomes() == {("sealed", ""): 6}
        values = records.kept["group"][0]
        assert {k: values[k] for k in ("reward_mean", "reward_std", "trajectories", "tokens", "truncated")} == {
            "reward_mean": 0.5,
            "reward_std": 0.5,
            "trajectories": 4,
            "tokens": 4,
            "truncated": 0.0,
        }
        assert [values[k] for k in ("version_min", "version_max", "ticket_version", "attempts")] == [5, 5, 4, 1]

    run(test())


def test_no_ticket_no_episode() -> None:
    async def test() -> None:
        ring, engine, stop = Ring(2), Engine(), asyncio.Event()
        working = asyncio.create_task(runner_of(ring, engine).run(stop))
        await until(lambda: len(ring.sealed) == 2)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(engine.requests) == 8
        ring.free += 1
        await until(lambda: len(ring.sealed) == 3)
        stop.set()
        await working

    run(test())


def test_at_most_concurrency_groups_are_in_flight() -> None:
    async def test() -> None:
        ring, engine = Ring(30, done=30), Engine()
        await runner_of(ring, engine, config=config(concurrency=3)).run(ring.stop)
        assert engine.most_open == 3 * 4

    run(test())


def test_reissued_positions_come_first_and_once() -> None:
    async def test() -> None:
        ring = Ring(6, reissued=[40, 17], done=6)
        await runner_of(ring, Engine(), config=config(concurrency=1)).run(ring.stop)
        assert ring.order == [40, 17, 0, 1, 2, 3]
        assert ring.sealed[40].prompt_id == "prompt-40"

    run(test())


def test_a_reissue_that_the_ring_still_shows_is_not_run_twice() -> None:
    class Slow(Ring):
        def reissues(self) -> list[int]:
            return [40] if 40 not in self.sealed else []

    async def test() -> None:
        ring = Slow(6, done=6)
        await runner_of(ring, Engine()).run(ring.stop)
        assert ring.order.count(40) == 1

    run(test())


def test_fault_39_what_a_prompt_waits_for_is_named_and_named_anew_once_it_is_something_else() -> None:
    class Bounded(Ring):
        lacking = "a free ticket", ""

        def lacks(self) -> tuple[str, str]:
            return self.lacking

    async def test() -> None:
        ring = Bounded(0, done=1)
        working = asyncio.create_task(runner_of(ring, Engine()).run(ring.stop))
        await until(lambda: [wait.what for wait in open_waits()] == ["a free ticket"])
        ring.lacking = "room in the ring", "7 MiB are held"
        await until(lambda: [wait.what for wait in open_waits()] == ["room in the ring"])
        [wait] = open_waits()
        assert (wait.parties, wait.about) == (("trainer-0",), "for position 0; 7 MiB are held")
        ring.free = 1
        await working
        assert ring.order == [0]

    run(test())


def test_a_filtered_group_gives_its_slot_to_the_next_prompt() -> None:
    async def all_right(text: str, prompt: Prompt) -> float:
        return 1.0 if prompt.position < 5 else await parity(text, prompt)

    async def test() -> None:
        ring, records = Ring(2, done=7), Records()
        await runner_of(ring, Engine(), records, score=all_right).run(ring.stop)
        assert ring.dropped == dict.fromkeys(range(5), Drop.FILTERED)
        assert sorted(ring.sealed) == [5, 6]
        assert records.outcomes() == {("filtered", "zero_variance"): 5, ("sealed", ""): 2}

    run(test())


@pytest.mark.parametrize("method", ["try_reserve", "seal", "reissues"])
def test_D14_a_ring_that_fences_us_ends_the_run(method: str) -> None:
    async def test() -> None:
        ring = Ring(8)

        def fenced(*_: Any) -> Any:
            raise Fenced("attempt 2 owns the run")

        setattr(ring, method, fenced)
        with pytest.raises(Fenced, match="attempt 2"):
            await runner_of(ring, Engine()).run(asyncio.Event())
        assert ring.sealed == {}

    run(test())


def test_C6_a_stop_cancels_what_is_in_flight_and_seals_nothing_half() -> None:
    async def hang_on_the_last(request: GenerationRequest, count: int) -> None:
        if sample_of(request.request_id) == 3:
            await asyncio.Event().wait()

    async def test() -> None:
        ring, engine, stop = Ring(8), Engine(hang_on_the_last), asyncio.Event()
        working = asyncio.create_task(runner_of(ring, engine).run(stop))
        await until(lambda: engine.open == 4 and len(engine.requests) == 16)
        stop.set()
        await working
        assert engine.open == 0
        assert ring.sealed == ring.dropped == {}
        assert len(ring.outstanding) == 4

    run(test())


def test_a_cancelled_runner_leaves_nothing_running() -> None:
    async def test() -> None:
        engine = Engine(lambda *_: asyncio.Event().wait())  # type: ignore[arg-type,return-value]
        working = asyncio.create_task(runner_of(Ring(8), engine).run(asyncio.Event()))
        await until(lambda: engine.open == 16)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert engine.open == 0

    run(test())


def test_failures_without_end_end_the_run_with_the_last_one() -> None:
    async def broken(text: str, prompt: Prompt) -> float:
        raise RewardError("division by zero")

    async def test() -> None:
        ring = Ring(4)
        with pytest.raises(RewardError, match="division by zero") as caught:
            await runner_of(ring, Engine(), score=broken, config=config(concurrency=2)).run(asyncio.Event())
        assert caught.value.__notes__ == ["16 prompts in a row failed for good; this is the last one's failure"]
        assert len(ring.dropped) == 16

    run(test())


def test_a_success_between_failures_lets_the_run_go_on() -> None:
    async def mostly_broken(text: str, prompt: Prompt) -> float:
        if prompt.position % 10:
            raise RewardError("no")
        return await parity(text, prompt)

    async def test() -> None:
        ring = Ring(50, done=100)
        await runner_of(ring, Engine(), score=mostly_broken, config=config(attempts=1)).run(ring.stop)
        assert len(ring.sealed) == 10

    run(test())


def test_D27_a_stall_names_whom_it_waits_for() -> None:
    async def hang_in_reward(text: str, prompt: Prompt) -> float:
        if sample_of(text) == 1:
            await asyncio.Event().wait()
        return 0.0

    async def test() -> None:
        records, stop, release = Records(), asyncio.Event(), asyncio.Event()

        async def hang(request: GenerationRequest, count: int) -> None:
            if sample_of(request.request_id) > 1:
                await release.wait()

        engine = Engine(hang)
        runner = runner_of(Ring(2), engine, records, score=hang_in_reward, stall_s=0.01, engines=lambda: "; engines: e")
        assert "waiting for a prompt" in runner.waiting_for()
        working = asyncio.create_task(runner.run(stop))
        await until(lambda: records.kept["stall"])
        sentence = records.kept["stall"][0]["waiting_for"]
        assert sentence == runner.waiting_for()
        for part in (
            "the trainer to free a slot for the prompt at position 2",
            "2 of 4 groups in flight",
            "prompt 'prompt-0' at position 0, attempt 1 of 3",
            "2 generating, 1 scoring; engines: e",
        ):
            assert part in sentence
        stop.set()
        await working

    run(test())


def test_J8_memory_is_flat_over_thousands_of_groups() -> None:
    async def test() -> None:
        async def groups(count: int) -> None:
            ring = Ring(count, done=count)
            ring.sealed = Forgetful()
            ring.dropped = Forgetful()
            engine = Engine()
            engine.requests = Forgetful()  # type: ignore[assignment]
            await runner_of(ring, engine, record=lambda kind, values: None).run(ring.stop)

        await groups(500)
        grown = []
        for _ in range(2):  # a leak is in both; what the allocator happens to ask for is in one
            gc.collect()
            before, objects = psutil.Process().memory_info().rss, len(gc.get_objects())
            await groups(2000)
            gc.collect()
            assert len(gc.get_objects()) - objects < 200
            grown.append(psutil.Process().memory_info().rss - before)
        assert min(grown) < 8 << 20

    run(test())


class Forgetful(dict[Any, Any]):
    """Takes everything, keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

"""Engines that die, hang, refuse or receive garbage in the middle of a broadcast: real processes, real groups."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from fake_engine import spawned

from areal_hpc.delta import checksum
from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.client import EngineClient, Limits
from areal_hpc.weights.broadcast import BroadcastTransport

LIMIT_S = 60.0  # far more than any test may take: what ends earlier does not end by running into it
WEIGHTS = {f"w{k}": torch.full((1000,), float(k)) for k in range(5)}  # a bucket each
LOAD = "/update_weights_from_distributed"
epochs = iter(range(1000))


@dataclass
class Fleet:
    clients: list[EngineClient]
    processes: list[BaseProcess]
    transport: BroadcastTransport

    async def publish(self, version: int) -> Any:
        return await self.transport.publish(version, WEIGHTS.items())

    async def fault(self, index: int, path: str, *faults: Any) -> None:
        await self.clients[index]._http.call("POST", "/faults", {path: faults}, 10)

    async def state(self, index: int) -> dict[str, Any]:
        _, state = await self.clients[index]._http.call("GET", "/loaded", None, 10)
        assert isinstance(state, dict)
        return state

    async def serves(self, index: int, version: int) -> None:
        state = await self.state(index)
        assert (state["version"], state["frozen"]) == (str(version), False)
        assert state["loaded"] == {name: checksum(value) for name, value in WEIGHTS.items()}


def scenario(body: Any, *, num: int = 2, timeout_s: float = LIMIT_S) -> None:
    async def run(urls: list[str], processes: list[BaseProcess]) -> None:
        limits = Limits(admin_s=min(5, timeout_s), load_s=timeout_s)
        clients = [EngineClient(f"engine-{k}", url, limits=limits) for k, url in enumerate(urls)]
        transport = BroadcastTransport(clients, epoch=next(epochs), bucket_bytes=4000, timeout_s=timeout_s)
        try:
            await body(Fleet(clients, processes, transport))
            await transport.close()
        finally:
            for client in clients:
                await client.close()

    with spawned(num) as engines:
        asyncio.run(run([url for url, _ in engines], [process for _, process in engines]))


@contextmanager
def in_less_than(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


async def loses(fleet: Fleet, culprit: int, version: int = 2, match: str = "") -> None:
    """The next publish ends by naming the culprit; the one after it brings the other engine up to date."""
    with in_less_than(LIMIT_S / 2):
        with pytest.raises(WeightUpdateError, match=f"engine-{culprit}.*{match}") as caught:
            await fleet.publish(version)
        other = 1 - culprit
        assert f"Engines left: engine-{other};" in str(caught.value)
        assert (await fleet.state(other))["frozen"]  # the barrier: nobody samples after half an update
        await fleet.publish(version)
    await fleet.serves(other, version)
    assert list(fleet.transport.membership.lost) == [f"engine-{culprit}"]


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_engine_that_is_dead_before_the_update(culprit: int) -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.publish(1)
        fleet.processes[culprit].kill()
        fleet.processes[culprit].join()
        await loses(fleet, culprit)

    scenario(body)


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_engine_that_dies_before_it_receives_its_third_bucket(culprit: int) -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.publish(1)
        await fleet.fault(culprit, LOAD, None, None, "die")
        await loses(fleet, culprit)

    scenario(body)


def test_an_engine_that_is_killed_while_it_receives() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.publish(1)
        await fleet.fault(1, "receiving", 0.02)
        await loses(fleet, 1)

    scenario(body)


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_engine_that_refuses_a_bucket_wakes_everybody_by_leaving(culprit: int) -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.fault(culprit, LOAD, None, 400)
        await loses(fleet, culprit, match="told to fail with 400")
        assert (await fleet.state(culprit))["frozen"]

    scenario(body)


def test_D3_D20_an_engine_that_received_other_bytes_is_named_with_the_tensor_and_not_resumed() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.publish(1)
        await fleet.fault(1, "received", 17)
        await loses(fleet, 1, match="'w0'")
        assert (await fleet.state(1))["frozen"]

    scenario(body)


def test_an_engine_that_stands_still_is_waited_for_no_longer_than_the_limit() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.publish(1)
        pid = fleet.processes[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await loses(fleet, 1)

    scenario(body, timeout_s=5)


def test_an_engine_that_hangs_in_a_bucket_is_waited_for_no_longer_than_the_limit() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.publish(1)
        await fleet.fault(0, LOAD, None, "hang")
        await loses(fleet, 0)

    scenario(body, timeout_s=5)


def test_D24_an_engine_that_does_not_join_is_named_with_the_addresses_of_both_sides() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.fault(0, "/init_weights_update_group", 400)
        theirs = r"http://127\.0\.0\.1:\d+.*told to fail with 400"
        ours = r"rank 0 waits at 127\.0\.0\.1:\d+: host .*, interfaces .*\blo\b.*, GLOO_SOCKET_IFNAME is not set"
        await loses(fleet, 0, match=f"{theirs}.*{ours}")

    scenario(body, timeout_s=5)


def test_an_engine_that_cannot_be_resumed() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.fault(1, "/end_weight_update", 400)
        with pytest.raises(WeightUpdateError, match=r"engine-1.*end_weight_update"):
            await fleet.publish(1)
        await fleet.serves(0, 1)
        await fleet.publish(2)
        await fleet.serves(0, 2)

    scenario(body)


@pytest.mark.parametrize("when", ["before", "in", "after"])
def test_a_newcomer_that_dies_before_in_or_after_its_catching_up_does_not_stop_the_others(when: str) -> None:
    """The others sample on all the while; the next update knows no more of it than that it is lost."""

    async def body(fleet: Fleet) -> None:
        transport = BroadcastTransport(fleet.clients[:1], epoch=next(epochs), bucket_bytes=4000, timeout_s=LIMIT_S)
        await transport.publish(1, WEIGHTS.items())
        if when == "before":
            fleet.processes[1].kill()
            fleet.processes[1].join()
        elif when == "in":
            await fleet.fault(1, "receiving", 0.02)
        with in_less_than(LIMIT_S / 2):
            if when == "after":
                await transport.catch_up(1, WEIGHTS.items(), fleet.clients[1:])
                await fleet.serves(1, 1)
                fleet.processes[1].kill()
                fleet.processes[1].join()
                with pytest.raises(WeightUpdateError, match=r"engine-1.*Engines left: engine-0"):
                    await transport.publish(2, WEIGHTS.items())
            else:
                with pytest.raises(WeightUpdateError, match="engine-1"):
                    await transport.catch_up(1, WEIGHTS.items(), fleet.clients[1:])
                await fleet.serves(0, 1)
        assert list(transport.membership.lost) == ["engine-1"]
        await transport.publish(2, WEIGHTS.items())
        await fleet.serves(0, 2)
        await transport.close()

    scenario(body)


def test_D21_a_group_for_catching_up_has_a_name_of_its_own() -> None:
    async def body(fleet: Fleet) -> None:
        transport = BroadcastTransport(fleet.clients[:1], epoch=next(epochs), bucket_bytes=4000, timeout_s=LIMIT_S)
        await transport.publish(1, WEIGHTS.items())
        await transport.catch_up(1, WEIGHTS.items(), fleet.clients[1:])
        await transport.publish(2, WEIGHTS.items())
        (first, everyone), (alone, same) = [(await fleet.state(index))["joined"] for index in (0, 1)]
        assert same == everyone
        assert len({first, alone, everyone}) == 3
        for index in (0, 1):
            await fleet.serves(index, 2)
        await transport.close()

    scenario(body)


def test_a_publish_that_is_cancelled_does_not_spoil_the_next() -> None:
    async def body(fleet: Fleet) -> None:
        await fleet.publish(1)
        await fleet.fault(0, LOAD, None, "hang")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fleet.publish(2), 3)
        assert fleet.transport.membership.lost == {}
        await fleet.publish(3)
        await fleet.serves(0, 3)
        await fleet.serves(1, 3)

    scenario(body, timeout_s=5)


def test_D21_every_membership_has_a_group_name_of_its_own_and_keeps_it() -> None:
    async def body(fleet: Fleet) -> None:
        for version in (1, 2):
            await fleet.publish(version)
        fleet.transport.membership.admit(fleet.clients[0])  # restarted, say
        await fleet.publish(3)
        first, second = (await fleet.state(0))["joined"]
        assert first != second
        assert (await fleet.state(1))["joined"] == [first, second]
        for index in (0, 1):
            await fleet.serves(index, 3)

    scenario(body)


def test_D5_updates_with_empty_tensors_and_with_none_are_updates() -> None:
    async def body(fleet: Fleet) -> None:
        told = await fleet.transport.publish(1, [("empty", torch.empty(0, 4))])
        assert told["bytes"] == 0
        assert (await fleet.state(0))["loaded"] == {"empty": 0}
        await fleet.transport.publish(2, [])
        assert (await fleet.state(1))["version"] == "2"

    scenario(body)

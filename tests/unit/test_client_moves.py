"""The client of an engine that is started again elsewhere: what its old process was told does not hold for the new."""

from __future__ import annotations

import asyncio

import pytest
from driven import PROMPT, SPECS, request
from fake_engine import FakeEngine, expected_tokens, running

from areal_hpc.errors import GenerationError, WeightUpdateError
from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.connection import Address, EngineLost, EngineRefused


def test_H17_a_client_follows_its_engine_to_where_it_was_started_again() -> None:
    """What the old process was told does not hold for the new one: it starts with nothing."""

    async def scenario() -> None:
        old, new = FakeEngine(version="0"), FakeEngine(version="0", sessions=False)
        address: list[Address] = []
        async with running(new) as new_url:
            async with running(old) as old_url:
                client = EngineClient("fake-0", old_url, locate=lambda: address[-1] if address else None)
                await client.pause()
                await client.load_bucket("g", SPECS)
                await client.resume(7)
                assert await client.probe() == 7
            with pytest.raises(EngineLost):
                await client.generate(request())
            address.append(Address(url=new_url, incarnation=1))
            assert client.moved() == address[-1]
            assert await client.probe() == 0
            assert client.moved() is None
            assert (await client.generate(request())).token_ids.tolist() == expected_tokens(PROMPT, 8)
            await client.pause()
            await client.load_bucket("g", SPECS)
            await client.resume(8)
            assert await client.probe() == 8
            await client.close()

    asyncio.run(scenario())


def test_H17_an_update_that_its_old_process_missed_is_not_held_against_the_new_one() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with running(engine) as url:
            address = Address(url=url, incarnation=1)
            client = EngineClient("fake-0", url, locate=lambda: address)
            await client.reach()
            engine.faults["/update_weights_from_disk"] = [400]
            with pytest.raises(WeightUpdateError):
                await client.load_directory("/w", 1)
            with pytest.raises(GenerationError, match="serves nothing"):
                await client.generate(request())
            await client.reach()
            with pytest.raises(GenerationError, match="serves nothing"):
                await client.generate(request())
            address = Address(url=url, incarnation=2)
            await client.reach()
            await client.generate(request())
            await client.close()

    asyncio.run(scenario())


def test_who_is_cancelled_on_the_way_to_a_new_process_holds_nothing_of_the_old_one_against_it() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with running(engine) as url:
            address = Address(url=url)
            client = EngineClient("fake-0", url, locate=lambda: address)
            engine.faults["/update_weights_from_disk"] = [400]
            with pytest.raises(WeightUpdateError):
                await client.load_directory("/w", 1)
            address = Address(url=url, incarnation=1)
            reaching = asyncio.create_task(client.reach())
            await asyncio.sleep(0)  # it waits for the connections to the old process to close
            reaching.cancel()
            await asyncio.gather(reaching, return_exceptions=True)
            assert client.moved() is None
            assert (await client.generate(request())).token_ids.tolist() == expected_tokens(PROMPT, 8)
            await client.close()

    asyncio.run(scenario())


def test_H17_a_process_that_got_the_port_of_a_dead_engine_is_not_taken_for_it() -> None:
    """It asks for another token, so it never reads the request; the router may give it to another engine."""

    async def scenario() -> None:
        engine = FakeEngine(faults={"/server_info": [401]})
        async with running(engine) as url:
            client = EngineClient("fake-0", url)
            with pytest.raises(EngineRefused, match="another process may have its port"):
                await client.generate(request())
            assert "/generate" not in engine.paths()
            await client.close()

    asyncio.run(scenario())

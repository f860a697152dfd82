"""The same cases for every Generator: the scripted fake, clients of the embedded engine and of SGLang, and a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedded_process import embedded
from tiny_models import make_model

from areal_hpc.errors import GenerationError
from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.router import Router
from areal_hpc.generation.scripted import ScriptedGenerator
from areal_hpc.types import GenerationRequest, Sampling, StopReason

PROMPT = (72, 101, 108, 108, 111)


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("model")
    make_model(directory, "llama", seed=5)
    with embedded(directory) as [url]:
        yield url


@pytest.fixture(params=["scripted", "client", "router", pytest.param("sglang", marks=pytest.mark.sglang)])
def generator(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Opens the generator under test inside the running loop."""
    kind: str = request.param
    url = "" if kind == "scripted" else request.getfixturevalue("sglang_url" if kind == "sglang" else "engine_url")

    @asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        made: Any
        if kind == "scripted":
            made = ScriptedGenerator(
                lambda asked: [(7 * k + len(asked.token_ids)) % 200 for k in range(2000)], token_s=0.001
            )
        else:
            made = EngineClient("engine-0", url, token="secret")
            made = Router([made]) if kind == "router" else made
        try:
            yield made
        finally:
            await made.close()

    return opened


def asked(num: int, request_id: str = "r", **sampling: Any) -> GenerationRequest:
    options = {"temperature": 0.0, "ignore_eos": True} | sampling
    return GenerationRequest(request_id=request_id, token_ids=PROMPT, sampling=Sampling(max_new_tokens=num, **options))


def run(generator: Callable[[], Any], scenario: Callable[[Any], Awaitable[Any]]) -> Any:
    async def body() -> Any:
        async with generator() as made:
            return await scenario(made)

    return asyncio.run(body())


def test_every_token_has_a_log_prob_and_a_version(generator: Callable[[], Any]) -> None:
    completion = run(generator, lambda made: made.generate(asked(12)))
    assert completion.token_ids.shape == completion.logprobs.shape == completion.versions.shape == (12,)
    assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
    assert np.isfinite(completion.logprobs).all()
    assert (completion.logprobs <= 0).all()
    assert completion.versions.tolist() == [0] * 12
    assert completion.stop is StopReason.LENGTH


def test_a_stop_token_ends_the_answer_and_is_part_of_it(generator: Callable[[], Any]) -> None:
    async def scenario(made: Any) -> None:
        whole = (await made.generate(asked(8))).token_ids.tolist()
        stopped = await made.generate(asked(8, "r2", stop_token_ids=(whole[3],), ignore_eos=False))
        assert stopped.token_ids.tolist() == whole[: whole.index(whole[3]) + 1]
        assert stopped.stop is StopReason.STOP

    run(generator, scenario)


def test_many_at_once_do_not_mix(generator: Callable[[], Any]) -> None:
    async def scenario(made: Any) -> None:
        alone = [await made.generate(asked(num, f"alone{num}")) for num in (1, 5, 9)]
        together = await asyncio.gather(*(made.generate(asked(num, f"together{num}")) for num in (1, 5, 9)))
        assert [c.token_ids.tolist() for c in together] == [c.token_ids.tolist() for c in alone]

    run(generator, scenario)


def test_an_aborted_answer_is_a_beginning_and_says_so(generator: Callable[[], Any]) -> None:
    async def scenario(made: Any) -> None:
        whole = (await made.generate(asked(900, "whole"))).token_ids.tolist()
        asking = asyncio.create_task(made.generate(asked(900, "cut")))
        await asyncio.sleep(0.05)
        await made.abort("cut")
        cut = await asking
        assert cut.stop is StopReason.ABORT
        assert len(cut.token_ids) < 900
        assert cut.token_ids.tolist() == whole[: len(cut.token_ids)]

    run(generator, scenario)


@pytest.mark.parametrize("url", ["engine_url", pytest.param("sglang_url", marks=pytest.mark.sglang)])
def test_a_request_that_the_engine_refuses_is_a_generation_error(url: str, request: pytest.FixtureRequest) -> None:
    engine_url: str = request.getfixturevalue(url)

    async def scenario() -> None:
        client = EngineClient("engine-0", engine_url, token="secret")
        with pytest.raises(GenerationError, match=r"engine-0.*status 400"):
            await client.generate(asked(100_000))
        await client.close()
        stranger = EngineClient("engine-0", engine_url, token="wrong")
        with pytest.raises(GenerationError, match="status 401"):
            await stranger.generate(asked(4))
        await stranger.close()

    asyncio.run(scenario())


def test_tokens_are_told_as_they_come_and_are_the_answers(generator: Callable[[], Any]) -> None:
    async def scenario(made: Any) -> None:
        told: list[int] = []
        before_the_end: list[int] = []
        asking = asyncio.create_task(made.generate(replace(asked(300), on_tokens=told.extend)))
        while not asking.done():
            before_the_end.append(len(told))
            await asyncio.sleep(0.001)
        completion = asking.result()
        assert told == completion.token_ids.tolist()
        assert completion.token_ids.tolist() == (await made.generate(asked(300, "again"))).token_ids.tolist()
        assert completion.logprobs.shape == completion.versions.shape == (300,)
        assert len({count for count in before_the_end if 0 < count < 300}) > 1  # not all at once

    run(generator, scenario)

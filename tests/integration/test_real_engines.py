"""What training needs of real SGLang and vLLM servers besides answers: weights that arrive whole, an orderly end.

The judge of log-probs is transformers, in float32 and in one pass over the whole sequence.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
import torch
from real_engines import REAL, SGLANG, VLLM, RealEngine, served
from tiny_models import make_model

from areal_hpc.errors import GenerationError, WeightUpdateError
from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.connection import Connection
from areal_hpc.generation.external.process import ServerProcess
from areal_hpc.telemetry import add_secret
from areal_hpc.types import Completion, GenerationRequest, Sampling, StopReason
from areal_hpc.weights.baseline import DeltaBaseline
from areal_hpc.weights.broadcast import BroadcastTransport
from areal_hpc.weights.disk import DiskTransport

PROMPT = tuple(range(40, 90))
NAMES = itertools.count()
TOLERANCE = 1e-4
"""Nats, in float32."""


def tied_model(directory: Path, seed: int) -> Any:
    """SGLang tells the parameters of Llama models alone; with a tied head, which an update must reach as well."""
    return make_model(directory, "llama", seed, tie_word_embeddings=True, num_attention_heads=2, num_key_value_heads=1)


class World:
    """One server, and the transformers model of every version that it was ever brought to."""

    def __init__(self, engine: RealEngine, directory: Path) -> None:
        self.engine, self.directory = engine, directory
        self.models = {0: tied_model(directory / "model", 0)}
        self.version = 0
        self.server: ServerProcess

    def new_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Those of the next version, in Hugging Face names; the head is tied to the embedding."""
        self.version += 1
        model = tied_model(self.directory / f"model-{self.version}", self.version)
        self.models[self.version] = model
        return [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]

    def slightly_other_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Those of the next version, of which one element in ten is another."""
        model = copy.deepcopy(self.models[self.version])
        self.version += 1
        self.models[self.version] = model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[self.version % 10 :: 10] *= 1.5
        return [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]

    def logprobs(self, completion: Completion) -> Any:
        """What each token's own version of the model gives it: log-probs [T]."""
        token_ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
        rows = {}
        for version in set(completion.versions.tolist()):
            with torch.no_grad():
                rows[version] = torch.log_softmax(self.models[version](token_ids).logits[0].float(), -1)
        start = len(PROMPT)
        return np.array(
            [rows[v][start - 1 + k, completion.token_ids[k]] for k, v in enumerate(completion.versions.tolist())]
        )


@pytest.fixture(
    scope="module",
    params=[pytest.param(engine, marks=getattr(pytest.mark, engine.name), id=engine.name) for engine in REAL],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(request.param, tmp_path_factory.mktemp("world"))
    add_secret("secret")
    directory = made.directory
    with served(made.engine, directory / "model", directory / "engine.log", keeps_weights=True) as made.server:
        yield made


def drive(world: World, scenario: Callable[[EngineClient], Awaitable[Any]]) -> Any:
    async def within() -> Any:
        client = EngineClient("engine-0", world.server.url, token="secret")
        try:
            return await scenario(client)
        finally:
            await client.close()

    return asyncio.run(within())


def asked(num: int) -> GenerationRequest:
    sampling = Sampling(max_new_tokens=num, ignore_eos=True)
    return GenerationRequest(request_id=f"r{next(NAMES)}", token_ids=PROMPT, sampling=sampling)


async def load(world: World) -> Mapping[str, Any]:
    """As the engine's generator sees it."""
    http = Connection("engine-0", world.server.url, token="secret", connect_s=10.0)

    async def get(path: str) -> Any:
        return http.accepted(path, *await http.call("GET", path, None, 30.0))

    server: Any = SimpleNamespace(get=get)
    try:
        return await world.engine.load(server)
    finally:
        await http.close()


async def until_running(world: World) -> None:
    async with asyncio.timeout(60):
        while not (await load(world))["running"]:
            await asyncio.sleep(0.02)


async def parameters(world: World, names: list[str]) -> dict[str, torch.Tensor]:
    """All that the server holds, as it tells them."""
    found = {}
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
        for name in names:
            body = {"name": name, "truncate_size": 100_000}
            async with session.post(world.server.url + "/get_weights_by_name", json=body) as answer:
                found[name] = torch.tensor(await answer.json())
    return found


@pytest.mark.parametrize("kind", ["broadcast", "disk"])
def test_D20_weights_arrive_whole_in_the_middle_of_an_answer(world: World, kind: str, tmp_path: Path) -> None:
    """D18: also for whoever asks with a prompt that the old weights have seen."""
    weights = world.new_weights()
    version = world.version

    async def scenario(client: EngineClient) -> None:
        transport: Any = (
            BroadcastTransport([client], epoch=version, bucket_bytes=20_000, timeout_s=100)
            if kind == "broadcast"
            else DiskTransport(tmp_path / "weights", [client], epoch=version, file_bytes=50_000, timeout_s=100)
        )
        assert (await client.prepare()).stages, "it need not pause before the first bucket"
        asking = asyncio.create_task(client.generate(asked(900)))
        await until_running(world)
        await transport.publish(version, iter(weights))
        across, after = await asyncio.gather(asking, client.generate(asked(40)))
        assert set(across.versions.tolist()) == {version - 1, version}
        assert across.versions.tolist() == sorted(across.versions.tolist())
        assert len(across.token_ids) == 900
        assert after.versions.tolist() == [version] * 40
        np.testing.assert_allclose(after.logprobs, world.logprobs(after), atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(across.logprobs, world.logprobs(across), atol=TOLERANCE, rtol=0)
        if world.engine is SGLANG:  # vLLM keeps its parameters in other forms, and tells none
            held = await parameters(world, [name for name, _ in weights])
            for name, tensor in weights:
                rows = held[name][: len(tensor)]  # behind those of the vocabulary it keeps some for padding
                assert torch.equal(rows.view(tensor.shape), tensor), name
        await transport.close()

    drive(world, scenario)


@pytest.mark.parametrize("kind", ["broadcast", "disk"])
def test_changes_alone_make_the_weights_that_the_trainer_has(world: World, kind: str, tmp_path: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        transport: Any = (
            BroadcastTransport(
                [client], epoch=100 + world.version, timeout_s=100, baseline=DeltaBaseline(whole_every=8)
            )
            if kind == "broadcast"
            else DiskTransport(
                tmp_path / "weights", [client], epoch=1, timeout_s=100, baseline=DeltaBaseline(whole_every=8)
            )
        )
        for whole in (True, False, False):
            weights = world.new_weights() if whole else world.slightly_other_weights()
            told = await transport.publish(world.version, iter(weights))
            assert (told["bytes_saved"] == 0) == whole
            after = await client.generate(asked(30))
            assert after.versions.tolist() == [world.version] * 30
            np.testing.assert_allclose(after.logprobs, world.logprobs(after), atol=TOLERANCE, rtol=0)
        await transport.close()

    drive(world, scenario)


def test_an_update_that_breaks_off_and_one_that_lacks_a_parameter_are_mended_by_a_whole_one(world: World) -> None:
    weights = world.new_weights()
    version = world.version

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights[:5]
        raise RuntimeError("the trainer could not gather the rest")

    async def scenario(client: EngineClient) -> None:
        transport = BroadcastTransport([client], epoch=1000 + version, bucket_bytes=20_000, timeout_s=100)
        with pytest.raises(RuntimeError, match="could not gather"):
            await transport.publish(version, breaks_off())
        if world.engine is VLLM:  # SGLang takes what it gets
            with pytest.raises(WeightUpdateError, match=r"engine-0.*1 parameters did not come"):
                await transport.publish(version, iter(weights[:-1]))
            with pytest.raises(GenerationError, match="quarantined"):
                await client.probe()
            transport.membership.admit(client)
        await transport.publish(version, iter(weights))
        after = await client.generate(asked(30))
        assert after.versions.tolist() == [version] * 30
        np.testing.assert_allclose(after.logprobs, world.logprobs(after), atol=TOLERANCE, rtol=0)
        await transport.close()

    drive(world, scenario)


def test_F2_answers_that_were_asked_for_during_a_pause_have_exactly_the_tokens_that_were_asked_for(
    world: World,
) -> None:
    """The generator says of it that it waits for weights, and of an engine that is not paused that it does not."""

    async def scenario(client: EngineClient) -> None:
        asking = [asyncio.create_task(client.generate(asked(300)))]
        await until_running(world)
        assert not (await load(world))["held"]
        await client.pause()
        asking += [asyncio.create_task(client.generate(asked(num))) for num in (1, 50)]
        done, _ = await asyncio.wait(asking, timeout=0.5)
        assert not done
        told = await load(world)
        assert told["held"]
        assert told["running"] + told["queued"] >= 1
        await client.resume(world.version)
        assert not (await load(world))["held"]
        for num, answer in zip((300, 1, 50), await asyncio.gather(*asking), strict=True):
            assert (answer.stop, len(answer.token_ids)) == (StopReason.LENGTH, num)
            np.testing.assert_allclose(answer.logprobs, world.logprobs(answer), atol=TOLERANCE, rtol=0)

    drive(world, scenario)


def test_nobody_else_can_read_the_key_or_reach_the_server(world: World) -> None:
    server = psutil.Process(world.server.pid)
    for process in (server, *server.children(recursive=True)):
        assert "secret" not in " ".join(process.cmdline())
    assert "secret" not in (world.directory / "engine.log").read_text()
    port = int(world.server.url.rpartition(":")[2])
    heard = [c for c in server.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
    assert [connection.laddr.ip for connection in heard] == ["127.0.0.1"]


def test_an_engine_process_that_is_killed_takes_the_server_down(world: World) -> None:
    """The last one on this server: the generator sees it, ends, and is started again."""
    server = psutil.Process(world.server.pid)
    [engine] = [child for child in server.children() if computes(child)]
    engine.kill()
    deadline = time.monotonic() + 60
    while world.server.alive():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def computes(process: psutil.Process) -> bool:
    """Whether it is the one in which the model is, by how engines call theirs."""
    title = process.name() + " ".join(process.cmdline())
    return "schedul" in title or "EngineCore" in title

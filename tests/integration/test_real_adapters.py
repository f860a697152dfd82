"""Adapters that travel alone to real SGLang and vLLM servers.

The judge is the package ``peft`` upon transformers, which reads them as ``export`` writes them: float32, one pass over
the whole sequence. What SGLang holds is held against the trainer's own merge, bit for bit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import fork_server
from real_engines import REAL, SGLANG, RealEngine, served
from safetensors.torch import load_file
from test_real_engines import PROMPT, TOLERANCE, asked, parameters, until_running
from tiny_models import make_model

from areal_hpc.buckets import fingerprint_of
from areal_hpc.collective import host_store
from areal_hpc.config.lora import LoraConfig
from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.external.process import ServerProcess
from areal_hpc.pretrained.lora import BASE, merged, travelling_shapes
from areal_hpc.telemetry import add_secret
from areal_hpc.training.export import write_adapters
from areal_hpc.transfer import GroupAddress
from areal_hpc.types import Completion
from areal_hpc.weights.baseline import DeltaBaseline
from areal_hpc.weights.broadcast import BroadcastTransport
from areal_hpc.weights.disk import DiskTransport

LORA = LoraConfig(rank=3, alpha=12.0)
LIMIT_S = 20.0
"""Of one step of an update."""
LONGEST_S = 120.0
"""For the judge, which imports much the first time."""
Adapters = dict[str, torch.Tensor]


class World:
    """One server of a frozen model, and the adapters of every version that it was ever brought to."""

    def __init__(self, engine: RealEngine, directory: Path, judge: Executor, num_kv_heads: int = 1) -> None:
        self.engine, self.directory, self.judge = engine, directory, judge
        self.model = directory / "model"
        heads = {"num_attention_heads": 2 * num_kv_heads, "num_key_value_heads": num_kv_heads}
        make_model(self.model, "llama", 0, tie_word_embeddings=True, **heads)
        stored = load_file(self.model / "model.safetensors")
        self.frozen = {name: tensor for name, tensor in stored.items() if name != "lm_head.weight"}
        self.versions = dict[int, Adapters]()
        self.server: ServerProcess

    def next_version(self) -> tuple[int, Adapters]:
        """Adapters as a trainer sends them, none of them 0; from the second on half of each is as before."""
        version = len(self.versions) + 1
        generator = torch.Generator().manual_seed(version)
        shapes = travelling_shapes({name: tuple(one.shape) for name, one in self.frozen.items()}, LORA)
        made = {n: torch.randn(s, generator=generator) * 0.1 for n, s in shapes.items() if n != BASE}
        for name, tensor in self.versions.get(version - 1, {}).items():
            if name != BASE:
                made[name].view(-1)[::2] = tensor.view(-1)[::2]
        self.versions[version] = {BASE: torch.tensor([fingerprint_of(self.frozen.items())]), **made}
        return version, self.versions[version]

    def logprobs(self, completion: Completion) -> Any:
        """What each token's own version gives it, by ``peft``: log-probs [T]."""
        token_ids = [*PROMPT, *completion.token_ids.tolist()]
        rows = {version: self.rows(version, token_ids) for version in set(completion.versions.tolist())}
        start = len(PROMPT)
        return np.array(
            [rows[v][start - 1 + k, completion.token_ids[k]] for k, v in enumerate(completion.versions.tolist())]
        )

    def rows(self, version: int, token_ids: Sequence[int]) -> Any:
        """Log-probs of every token at every place [T, V]."""
        written = self.directory / f"adapters-{version}" if version else None
        if written is not None and not written.exists():
            write_adapters(self.versions[version].items(), self.model, written, LORA)
        return self.judge.submit(rows_of, self.model, written, token_ids).result(LONGEST_S)

    def transport(self, kind: str, client: EngineClient, place: Path, *, delta: bool) -> Any:
        told: dict[str, Any] = {"epoch": len(self.versions), "timeout_s": 100}
        told |= {"baseline": DeltaBaseline(whole_every=8) if delta else None, "stands_for": self.whole_bytes}
        if kind == "broadcast":
            return BroadcastTransport([client], bucket_bytes=4_000, **told)
        return DiskTransport(place / "weights", [client], **told)

    @property
    def whole_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.frozen.values())


def rows_of(model: Path, adapters: Path | None, token_ids: Sequence[int]) -> Any:
    """In a process of its own: importing ``peft`` takes seconds and changes transformers."""
    import peft
    import transformers

    judged = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapters is not None:
        judged = peft.PeftModel.from_pretrained(judged, adapters).eval()
    with torch.no_grad():
        return torch.log_softmax(judged(torch.tensor([token_ids])).logits[0].float(), -1).numpy()


@pytest.fixture(scope="module")
def judge() -> Iterator[Executor]:
    with ProcessPoolExecutor(1, mp_context=fork_server()) as pool:
        yield pool


@pytest.fixture(
    scope="module",
    params=[pytest.param(engine, marks=getattr(pytest.mark, engine.name), id=engine.name) for engine in REAL],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, judge: Executor) -> Iterator[World]:
    add_secret("secret")
    fields: dict[str, Any] = {"keeps_weights": True, "lora": LORA, "update_timeout_s": LIMIT_S}
    made = World(request.param, tmp_path_factory.mktemp("world"), judge)
    with served(made.engine, made.model, made.directory / "engine.log", **fields) as made.server:
        yield made


@pytest.mark.parametrize(
    ("kind", "delta"), [("broadcast", False), ("disk", False), ("broadcast", True), ("disk", True)]
)
def test_adapters_arrive_alone_in_the_middle_of_an_answer_and_are_merged_as_the_trainer_merges(
    world: World, tmp_path: Path, kind: str, delta: bool
) -> None:
    async def scenario() -> None:
        client = EngineClient("engine-0", world.server.url, token="secret")
        transport = world.transport(kind, client, tmp_path, delta=delta)
        if delta:  # what the first one changes
            version, adapters = world.next_version()
            await transport.publish(version, iter(adapters.items()))
        before = max(world.versions, default=0)
        asking = asyncio.create_task(client.generate(asked(900)))
        await until_running(world)  # type: ignore[arg-type]  # it has an engine and a server, too
        version, adapters = world.next_version()
        told = await transport.publish(version, iter(adapters.items()))
        across, after = await asyncio.gather(asking, client.generate(asked(40)))

        size = sum(tensor.nbytes for tensor in adapters.values())
        assert told["bytes"] + told["bytes_saved"] == world.whole_bytes
        assert told["bytes"] < size * 0.9 if delta else told["bytes"] == size < world.whole_bytes / 4
        assert set(across.versions.tolist()) == {before, version}
        assert after.versions.tolist() == [version] * 40
        for answer in (across, after):
            np.testing.assert_allclose(answer.logprobs, world.logprobs(answer), atol=TOLERANCE, rtol=0)
        assert np.abs(world.rows(before, PROMPT) - world.rows(version, PROMPT)).max() > 0.1
        if world.engine is SGLANG:  # vLLM keeps its parameters in other forms, and tells none
            held = await parameters(world, list(world.frozen))  # type: ignore[arg-type]
            for name, tensor in merged(world.frozen.items(), adapters, LORA.scale):
                assert torch.equal(held[name][: len(tensor)].view(tensor.shape), tensor), name
        await transport.close()
        await client.close()

    asyncio.run(scenario())


async def publish_and_judge(world: World, client: EngineClient, transport: Any, version: int) -> None:
    """Adapters of ``version`` arrive and are sampled with; the last that is wanted of both ends."""
    await transport.publish(version, iter(world.versions[version].items()))
    after = await client.generate(asked(30))
    np.testing.assert_allclose(after.logprobs, world.logprobs(after), atol=TOLERANCE, rtol=0)
    await transport.close()
    await client.close()


@pytest.mark.parametrize("kind", ["broadcast", "disk"])
def test_adapters_of_other_weights_are_refused_and_the_right_ones_mend_it(
    world: World, tmp_path: Path, kind: str
) -> None:
    async def scenario() -> None:
        client = EngineClient("engine-0", world.server.url, token="secret")
        version, adapters = world.next_version()
        transport = world.transport(kind, client, tmp_path, delta=False)
        with pytest.raises(WeightUpdateError, match=r"engine-0.*of other weights than those in .*see that model\.path"):
            await transport.publish(version, iter((adapters | {BASE: torch.tensor([3])}).items()))
        transport.membership.admit(client)
        await publish_and_judge(world, client, transport, version)

    asyncio.run(scenario())


def test_D24_an_engine_that_is_cut_off_from_its_group_samples_on_and_is_done_with_it_in_time(world: World) -> None:
    """Both engines enter a group in a thread. Where nobody answers at the address, SGLang itself would wait for half an
    hour, and compute nothing meanwhile."""

    async def scenario() -> None:
        client = EngineClient("engine-0", world.server.url, token="secret")
        store = host_store(timeout_s=LIMIT_S)
        nobody = GroupAddress(host="127.0.0.1", port=store.port, name="w-0-0", world_size=2, backend="gloo")
        began = time.monotonic()
        joining = asyncio.create_task(client.join(nobody, 1))
        answer = await client.generate(asked(30))
        assert not joining.done() and len(answer.token_ids) == 30
        with pytest.raises(WeightUpdateError):
            await joining
        assert time.monotonic() - began < 3 * LIMIT_S
        await client.prepare()
        version, _ = world.next_version()
        transport = world.transport("broadcast", client, world.directory, delta=False)
        await publish_and_judge(world, client, transport, version)

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.sglang
def test_each_rank_of_an_engine_merges_and_takes_its_share(tmp_path: Path, judge: Executor) -> None:
    world = World(SGLANG, tmp_path, judge, num_kv_heads=2)
    add_secret("secret")

    async def scenario() -> None:
        client = EngineClient("engine-0", world.server.url, num_ranks=2, token="secret")
        for kind in ("broadcast", "disk"):
            transport = world.transport(kind, client, tmp_path, delta=False)
            version, adapters = world.next_version()
            await transport.publish(version, iter(adapters.items()))
            after = await client.generate(asked(40))
            assert after.versions.tolist() == [version] * 40
            np.testing.assert_allclose(after.logprobs, world.logprobs(after), atol=TOLERANCE, rtol=0)
            with pytest.raises(WeightUpdateError, match="of other weights than those in"):
                await transport.publish(3, iter((adapters | {BASE: torch.tensor([3])}).items()))
            await transport.close()
        await client.close()

    with served(SGLANG, world.model, tmp_path / "engine.log", tensor_parallel=2, lora=LORA) as world.server:
        asyncio.run(scenario())

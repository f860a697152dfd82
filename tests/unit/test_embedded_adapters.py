"""Adapters on the embedded engine: what it computes with them, how they come in, whose tokens are whose."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from embedded_engines import (
    FREE,
    LIMIT_S,
    PROMPT,
    assert_logprobs,
    at_token,
    complete,
    engines,
    expected_logprobs,
    one,
    submit,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.lora import ATTENTION, FEED_FORWARD, LoraConfig
from areal_hpc.config.schema import Dtype, OptimizerConfig, TrainerConfig
from areal_hpc.delta import checksum
from areal_hpc.errors import ConfigError, WeightUpdateError
from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.embedded.adapters import Adapters
from areal_hpc.generation.embedded.cache import KVCache
from areal_hpc.generation.embedded.engine import EmbeddedEngine
from areal_hpc.generation.embedded.model import Model, load_model
from areal_hpc.generation.embedded.scheduler import PAUSE, QUARANTINE
from areal_hpc.generation.embedded.server import start_server
from areal_hpc.pretrained.lora import BASE, merged
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.types import Batch
from areal_hpc.weights.baseline import DeltaBaseline
from areal_hpc.weights.disk import DiskTransport

LORA = LoraConfig(rank=3, alpha=6.0)
ALL = (*ATTENTION, *FEED_FORWARD)
SHAPES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    make_model(path, "qwen2", 0, **SHAPES)
    return path


def random_adapters(model: Model, seed: int) -> dict[str, torch.Tensor]:
    """As a trainer sends them, none of them 0."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: shape for name, shape in model.spare.shapes.items() if name != BASE}
    adapters = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    return {BASE: torch.tensor([model.serving.matrices.fingerprint])} | adapters


def merged_model(path: Path, adapters: dict[str, torch.Tensor], lora: LoraConfig = LORA) -> Any:
    """What transformers computes with the weights that the adapters make."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    stored = load_file(path / "model.safetensors")
    model.load_state_dict(dict(merged(stored.items(), adapters, lora.scale)), strict=False)
    return model


def logits(model: Model, token_ids: torch.Tensor) -> torch.Tensor:
    cache = KVCache(model.architecture, model.dtype, 1, 64)
    return model.logits(model.prefill(token_ids, torch.tensor([0]), cache))


TOKENS = torch.arange(24)[None] * 7 % 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_zero_change_no_logit(base: Path, dtype: torch.dtype) -> None:
    assert torch.equal(logits(load_model(base, dtype, 64, LORA), TOKENS), logits(load_model(base, dtype, 64), TOKENS))


@settings(max_examples=12, deadline=None)
@given(targets=st.sets(st.sampled_from(ALL), min_size=1), rank=st.integers(1, 6), seed=st.integers(0, 99))
def test_any_set_of_targets_computes_what_the_merged_weights_do(
    base: Path, targets: set[str], rank: int, seed: int
) -> None:
    lora = LoraConfig(rank=rank, alpha=4.0, target_modules=tuple(sorted(targets)))
    model = load_model(base, torch.float32, 64, lora)
    adapters = random_adapters(model, seed)
    assert model.spare.missing(model.spare.load(adapters.items())) == []
    unchanged = logits(model, TOKENS)
    model.swap()
    with torch.no_grad():
        expected = merged_model(base, adapters, lora)(TOKENS).logits
    torch.testing.assert_close(logits(model, TOKENS), expected, atol=2e-4, rtol=1e-4)
    assert (expected - unchanged).abs().max() > 1e-3


def test_adapters_of_other_weights_are_refused(base: Path) -> None:
    model = load_model(base, torch.float32, 64, LORA)
    adapters = random_adapters(model, 1) | {BASE: torch.tensor([17])}
    with pytest.raises(WeightUpdateError, match="the adapters are of other weights than this engine has"):
        model.spare.load(adapters.items())
    with pytest.raises(WeightUpdateError, match=r"no parameter 'model\.norm\.weight'"):
        model.spare.load([("model.norm.weight", torch.ones(32))])
    with pytest.raises(ConfigError, match="no layer fc1"):
        Adapters(model.serving.matrices, replace(LORA, target_modules=("fc1",)))


@pytest.fixture
def engine(base: Path) -> Iterator[EmbeddedEngine]:
    with engines({"old": (base, None)}) as make:
        yield make(lora=LORA)


def update(engine: EmbeddedEngine, directory: Path, adapters: dict[str, torch.Tensor], version: str) -> None:
    directory.mkdir(exist_ok=True)
    save_file(adapters, directory / "model.safetensors")
    engine.updates.load_directory(directory, version, flush_cache=True, abort_all=False)


def test_in_the_middle_of_an_answer_each_token_is_of_the_adapters_it_names(
    engine: EmbeddedEngine, base: Path, tmp_path: Path
) -> None:
    """Log-probs of the first half by the base alone, of the second by the adapters: transformers says the same."""
    adapters = random_adapters(engine.model, 5)
    sequence = one(engine, PROMPT, FREE)
    paused = at_token(sequence, 8, lambda: engine.scheduler.pause("in_place"))
    submit(engine, sequence)
    assert paused.wait(LIMIT_S)
    update(engine, tmp_path / "v2", adapters, "2")
    engine.scheduler.call(lambda: engine.scheduler.holds.discard(PAUSE)).result(LIMIT_S)
    sequence.done.result(LIMIT_S)
    first = expected_logprobs(merged_model(base, {}), sequence)[:8]
    second = expected_logprobs(merged_model(base, adapters), sequence)[8:]
    assert_logprobs(sequence, torch.cat([first, second]))
    assert sequence.spans(20) == [{"version": "1", "start": 0, "end": 8}, {"version": "2", "start": 8, "end": 20}]


def test_an_update_that_lacks_something_or_is_of_another_base_leaves_the_engine_quarantined(
    engine: EmbeddedEngine, tmp_path: Path
) -> None:
    adapters = random_adapters(engine.model, 5)
    before = engine.updates.checksums()
    with pytest.raises(WeightUpdateError, match="other weights"):
        update(engine, tmp_path / "other", adapters | {BASE: torch.tensor([3])}, "2")
    assert QUARANTINE in engine.scheduler.holds
    assert engine.updates.checksums() == before
    update(engine, tmp_path / "right", adapters, "3")
    assert QUARANTINE not in engine.scheduler.holds
    assert engine.updates.checksums() == {name: checksum(value) for name, value in adapters.items()}


@pytest.mark.parametrize(
    ("delta", "dtype", "largest_gap"),
    [(False, Dtype.FLOAT32, 1e-5), (True, Dtype.FLOAT32, 1e-5), (False, Dtype.BFLOAT16, 0.1)],
)
def test_the_trainer_s_adapters_reach_an_engine_and_nothing_else_does(
    base: Path, tmp_path: Path, delta: bool, dtype: Dtype, largest_gap: float
) -> None:
    """Four updates over HTTP; then the engine's log-probs are the trainer's, but for rounding."""
    backend = ReferenceBackend(
        model_path=str(base),
        algorithm=AlgorithmConfig(),
        trainer=TrainerConfig(total_steps=9, optimizer=OptimizerConfig(lr=3e-2)),
        temperature=1.0,
        dtype=dtype,
        lora=LORA,
    )
    engine = EmbeddedEngine(base, dtype=dtype, max_running=4, max_tokens=64, seed=0, version="0", lora=LORA)
    engine.start()

    async def updates() -> list[float]:
        url, server = await start_server(engine, token="secret")
        client = EngineClient("engine-0", url, token="secret")
        transport = DiskTransport(
            tmp_path / "weights", [client], epoch=1, timeout_s=30, baseline=DeltaBaseline(8) if delta else None
        )
        sizes = []
        for version in range(1, 4):
            told = await transport.publish(version, backend.weights())
            sizes.append(told["bytes"])
            backend.train_step([batch().with_proximal(backend.logprobs(batch()))])
        await transport.publish(4, backend.weights())
        await client.close()
        await server.cleanup()
        return sizes

    sizes = asyncio.run(updates())
    adapters = sum(value.nbytes for _, value in backend.weights())
    model = sum(value.numel() for value in load_file(base / "model.safetensors").values())
    assert sizes[0] == adapters < model * getattr(torch, dtype).itemsize / 4
    assert all(size <= adapters for size in sizes)
    [sequence] = complete(engine, one(engine, PROMPT, FREE))
    engine.close()
    assert sequence.version == "4"
    sampled = sequence_batch(PROMPT, sequence.token_ids)
    found = backend.logprobs(sampled)[len(PROMPT) :]
    np.testing.assert_allclose(sequence.logprobs, found, atol=largest_gap)
    with torch.no_grad():
        untrained = expected_logprobs(merged_model(base, {}), sequence).numpy()
    assert np.abs(untrained - found).max() > 0.2


def batch() -> Batch:
    found = sequence_batch(PROMPT, list(range(30, 50)))
    return replace(found, behaviour=np.where(found.loss_mask, -5.0, 0.0).astype(np.float32))


def sequence_batch(prompt: tuple[int, ...], answer: list[int]) -> Batch:
    token_ids = np.array([*prompt, *answer], dtype=np.int32)
    mask = np.arange(token_ids.size) >= len(prompt)
    return Batch(
        token_ids=token_ids,
        loss_mask=mask,
        behaviour=np.zeros(token_ids.size, dtype=np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=mask.astype(np.float32),
        boundaries=np.array([0, token_ids.size], dtype=np.int32),
    )

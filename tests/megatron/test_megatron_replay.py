"""Records of experts, replayed: against transformers with its routers' choice replaced, and on every kind of layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from layouts import Run
from numpy.typing import NDArray
from steps import ALGORITHM, MIXTURE, SIZES, TEMPERATURE, make, train, trainer, whole_batch
from torch import Tensor

from areal_hpc.config.lora import LoraConfig
from areal_hpc.config.schema import ParallelConfig, Recompute
from areal_hpc.routing import Routing
from areal_hpc.training.megatron.backend import MegatronBackend
from areal_hpc.training.megatron.replay import RecordedChoice
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Batch, Float32Array

pytestmark = [pytest.mark.megatron, pytest.mark.long]

LAYOUTS = ["tp2 etp2", "pp2 vpp2", "cp2", "dp2 ep2", "tp2 ep2 pp2"]
LAYERS, EXPERTS, CHOSEN = SIZES["num_hidden_layers"], int(MIXTURE["num_experts"]), int(MIXTURE["num_experts_per_tok"])
ROUTING = Routing(LAYERS, CHOSEN, EXPERTS)  # type: ignore[arg-type]

Choose = Callable[[int, Tensor], Tensor]
"""Layer and probabilities of experts [T, E] -> the experts of each token [T, K]."""


class Engine(NamedTuple):
    """What transformers makes of the batch."""

    logprobs: Float32Array  # [T], 0.0 where nothing is trained
    experts: NDArray[np.uint8]  # [T, L, K], those that computed it
    gradients: list[Tensor]  # of each layer's router [E, H], of the sum of the log-probs


def of_transformers(path: Path, choose: Callable[[slice], Choose]) -> Engine:
    """One sequence after the other; ``choose`` is told which tokens of the batch it has."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = whole_batch()
    logprobs, experts = np.zeros(batch.token_ids.size, np.float32), ROUTING.unrecorded(batch.token_ids.size)
    gates = [layer.mlp.gate for layer in model.model.layers]
    for start, end in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True):
        here = slice(int(start), int(end))
        for number, gate in enumerate(gates):
            gate.forward = _routed(gate, number, choose(here), experts[here])
        ids = torch.from_numpy(batch.token_ids[here]).long()
        of_tokens = (model(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        found = of_tokens.gather(1, ids[1:, None])[:, 0] * torch.from_numpy(batch.loss_mask[here][1:])
        found.sum().backward()
        logprobs[start + 1 : end] = found.detach().numpy()
    return Engine(logprobs, experts, [gate.weight.grad for gate in gates])  # type: ignore[arg-type]


def _routed(gate: Any, number: int, choose: Choose, experts: NDArray[np.uint8]) -> Callable[[Tensor], Any]:
    """The router's forward with another choice: the probabilities of the chosen, made to add up to 1."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, gate.hidden_dim) @ gate.weight.T
        probabilities = logits.softmax(-1)
        chosen = choose(number, probabilities)
        experts[:, number] = chosen.numpy()
        weights = probabilities.gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    return forward


def likeliest(_: slice) -> Choose:
    return lambda number, probabilities: probabilities.topk(CHOSEN).indices


def forced(experts: NDArray[np.uint8]) -> Callable[[slice], Choose]:
    """Those of the record, and the likeliest where it has none."""

    def of_tokens(here: slice) -> Choose:
        def choose(number: int, probabilities: Tensor) -> Tensor:
            told = torch.from_numpy(experts[here, number].astype(np.int64))
            return torch.where(told == 255, probabilities.topk(CHOSEN).indices, told)

        return choose

    return of_tokens


def any_experts(seed: int = 3) -> NDArray[np.uint8]:
    """A record of two tokens in three, as no router would choose it."""
    generator = np.random.default_rng(seed)
    num_tokens = whole_batch().token_ids.size
    every = np.tile(np.arange(EXPERTS, dtype=np.uint8), (num_tokens, LAYERS, 1))
    experts = generator.permuted(every, axis=-1)[..., :CHOSEN]
    experts[generator.random(num_tokens) < 1 / 3] = 255
    return experts


def with_record(experts: NDArray[np.uint8]) -> Batch:
    return replace(whole_batch(), experts=experts)


class Watched(RecordedChoice):
    """Remembers what was chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[Tensor] = []

    def get_replay_topk(self, *args: Any) -> tuple[Tensor, Tensor]:
        scores, chosen = super().get_replay_topk(*args)
        self.chosen.append(chosen)
        return scores, chosen


def own_choice(ranks: Ranks, parallel: ParallelConfig, path: Path) -> tuple[Float32Array, Float32Array, Any]:
    """Log-probs as ever, log-probs when the routing behind them is replayed, and that routing [T, L, K]."""
    backend, batch = make(ranks, parallel, path), whole_batch()
    routers = [layer.mlp.router for layer in backend._model.chunks[0].decoder.layers]
    for router in routers:
        router.router_replay = Watched()
    free = backend.logprobs(batch)
    where = np.concatenate([tokens for _, tokens in backend._passes.split(batch)])
    experts = ROUTING.unrecorded(batch.token_ids.size)
    for number, router in enumerate(routers):
        experts[where, number] = torch.cat(router.router_replay.chosen).numpy()
    return free, backend.logprobs(replace(batch, experts=experts)), experts


def gradients(ranks: Ranks, parallel: ParallelConfig, path: Path, experts: NDArray[np.uint8]) -> list[Tensor]:
    """Of each layer's router, of the sum of the log-probs."""
    backend = make(ranks, parallel, path)
    optimizer = backend._model.optimizer
    parts = [part for part, _ in backend._passes.split(with_record(experts))]
    optimizer.zero_grad()
    backend._passes.run(optimizer.chunks, parts, backend._head, lambda _, logprobs, __: logprobs.sum(), train=True)
    return [layer.mlp.router.weight.main_grad.clone() for layer in backend._model.chunks[0].decoder.layers]


def logprobs(ranks: Ranks, parallel: ParallelConfig, path: Path, experts: NDArray[np.uint8]) -> Float32Array:
    return make(ranks, parallel, path).logprobs(with_record(experts))


def story(ranks: Ranks, parallel: ParallelConfig, path: Path, recompute: Recompute) -> dict[str, Any]:
    """Log-probs and two steps with a record."""
    backend = make(ranks, parallel, path, trainer=replace(trainer(parallel), recompute=recompute))
    batch = with_record(any_experts())
    return {"logprobs": backend.logprobs(batch), "told": train(backend, backend.data_ranks, 1, 2, batch=batch)}


def test_the_own_choice_replayed_changes_no_bit(run: Run, models: dict[str, Path]) -> None:
    ((free, replayed, experts),) = run("tp1", own_choice, models["qwen3_moe"])
    np.testing.assert_array_equal(replayed, free)
    told = (experts != 255).all((1, 2))
    theirs = of_transformers(models["qwen3_moe"], likeliest)
    np.testing.assert_array_equal(np.sort(experts[told]), np.sort(theirs.experts[told]))
    assert told[whole_batch().loss_mask].all()


def test_tokens_go_where_the_record_says_and_others_where_the_router_says(run: Run, models: dict[str, Path]) -> None:
    """One token's experts are others, then those of two tokens in three; the routers learn of those that were taken."""
    path, batch = models["qwen3_moe"], whole_batch()
    free = of_transformers(path, likeliest)
    one = ROUTING.unrecorded(batch.token_ids.size)
    one[20] = [[e for e in range(EXPERTS) if e not in row][:CHOSEN] for row in free.experts[20]]
    for experts in (one, any_experts()):
        right = of_transformers(path, forced(experts))
        (found,) = run("tp1", logprobs, path, experts)
        np.testing.assert_allclose(found, right.logprobs, atol=1e-5)
        moved = np.abs(right.logprobs - free.logprobs) > 1e-3
        assert moved[21] and not moved[: 20 if experts is one else 0].any()
        (learned,) = run("tp1", gradients, path, experts)
        for ours, theirs in zip(learned, right.gradients, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=2e-4)
            assert float(theirs.abs().max()) > 0.01


@pytest.fixture(scope="module")
def alone(run: Run, models: dict[str, Path]) -> dict[str, Any]:
    return run("tp1", story, models["qwen3_moe"], Recompute.NONE)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_replays_the_same(run: Run, models: dict[str, Path], alone: dict[str, Any], layout: str) -> None:
    """Also where each layer is computed twice, for which a router must find the record of the same pass again."""
    for found in run(layout, story, models["qwen3_moe"], Recompute.LAYERS):
        np.testing.assert_allclose(found["logprobs"], alone["logprobs"], atol=1e-5)
        for step, right in zip(found["told"], alone["told"], strict=True):
            assert step == pytest.approx(right, rel=2e-4, abs=2e-6)


def gaps(ranks: Ranks, parallel: ParallelConfig, path: Path, engine: Engine) -> list[dict[str, float]]:
    """Statistics of a step on what an engine sampled, without its record and with it."""
    told = []
    for experts in (None, engine.experts):
        backend = make(ranks, parallel, path)
        batch = replace(whole_batch(), behaviour=engine.logprobs, experts=experts)
        told += train(backend, backend.data_ranks, 1, 1, batch=batch)
    return told


def test_an_engine_that_chooses_others_now_and_then_is_no_further_away(run: Run, models: dict[str, Path]) -> None:
    """Noise on what its routers compare moves a few tokens to other experts, as another kernel's rounding does."""
    generator = torch.Generator().manual_seed(0)

    def noisy(_: slice) -> Choose:
        def choose(number: int, probabilities: Tensor) -> Tensor:
            noise = 1 + 0.02 * torch.randn(probabilities.shape, generator=generator)
            return (probabilities * noise).topk(CHOSEN).indices

        return choose

    path = models["qwen3_moe"]
    engine, exact = of_transformers(path, noisy), of_transformers(path, likeliest)
    others = (np.sort(engine.experts) != np.sort(exact.experts)).any((1, 2))
    assert 0 < others.mean() < 0.5
    ((free, replayed),) = run("tp1", gaps, path, engine)
    assert free["logprob_gap_fresh_max"] > 1e-3
    assert replayed["logprob_gap_fresh_max"] < 1e-5


def with_adapters(ranks: Ranks, parallel: ParallelConfig, path: Path, experts: NDArray[np.uint8]) -> Any:
    backend = MegatronBackend(
        model_path=str(path),
        algorithm=ALGORITHM,
        trainer=trainer(parallel),
        temperature=TEMPERATURE,
        ranks=ranks,
        lora=LoraConfig(rank=2, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")),
    )
    batch = with_record(experts)
    return backend.logprobs(batch), backend.reference_logprobs(batch)


def test_a_reference_routes_by_itself(run: Run, models: dict[str, Path]) -> None:
    """Also where it is the policy without its adapters: it is another model, and sampled nothing."""
    path = models["qwen3_moe"]
    ((policy, reference),) = run("tp1", with_adapters, path, any_experts())
    np.testing.assert_allclose(policy, of_transformers(path, forced(any_experts())).logprobs, atol=1e-5)
    np.testing.assert_allclose(reference, of_transformers(path, likeliest).logprobs, atol=1e-5)

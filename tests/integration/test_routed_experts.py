"""Which experts computed an answer, as a real SGLang server tells it. The judge is transformers, in float32."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from real_engines import SGLANG, served
from tiny_models import make_model

from areal_hpc.generation.client import EngineClient
from areal_hpc.routing import Routing
from areal_hpc.types import Completion, GenerationRequest, Sampling

pytestmark = pytest.mark.sglang

PROMPT = tuple(range(40, 60))
MIXTURE = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
ROUTING = Routing(3, 2, 6)


def test_the_experts_that_it_tells_are_those_that_the_routers_choose(tmp_path: Path) -> None:
    """Of the whole sequence, and from a token on whose prefix the server has computed before and kept."""
    model = make_model(tmp_path / "model", "qwen3_moe", 0, **MIXTURE)

    async def ask(url: str) -> list[Completion]:
        client = EngineClient("engine-0", url, token="secret", routing=ROUTING)
        sampling = Sampling(max_new_tokens=8, ignore_eos=True)
        try:
            return [
                await client.generate(
                    GenerationRequest(request_id=f"r{first}", token_ids=PROMPT, sampling=sampling, experts_from=first)
                )
                for first in (0, 12)
            ]
        finally:
            await client.close()

    with served(SGLANG, tmp_path / "model", tmp_path / "engine.log", tells_experts=True) as server:
        whole, rest = asyncio.run(ask(server.url))
    for completion, first in ((whole, 0), (rest, 12)):
        assert completion.experts is not None and completion.experts.shape == (len(PROMPT) + 8 - first, 3, 2)
        token_ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
        with torch.no_grad():
            scores = model(input_ids=token_ids, output_router_logits=True).router_logits
        right = torch.stack([layer.topk(2).indices for layer in scores], 1).numpy()
        np.testing.assert_array_equal(np.sort(completion.experts[:-1]), np.sort(right[first:-1]))
        assert (completion.experts[-1] == 255).all()

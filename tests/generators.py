"""Generators under contract, what they are asked, and what the judge says of their answers.

The judge is the model as transformers have it: in float32, in one pass over the whole sequence.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.router import Router
from areal_hpc.generation.scripted import ScriptedGenerator
from areal_hpc.types import Completion, GenerationRequest, Sampling

PROMPT = (72, 101, 108, 108, 111)
TOLERANCE = 1e-4
"""Nats, in float32."""
Opens = Callable[[], Any]
"""Opens a generator inside the running loop."""


@asynccontextmanager
async def opened(kind: str, url: str) -> AsyncIterator[Any]:
    """A generator inside the running loop: "scripted", a "router" over the engine at ``url``, or else its client."""
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


def asked(num: int, request_id: str = "r", prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> GenerationRequest:
    options = {"temperature": 0.0, "ignore_eos": True} | sampling
    return GenerationRequest(request_id=request_id, token_ids=prompt, sampling=Sampling(max_new_tokens=num, **options))


def run(generator: Opens, scenario: Callable[[Any], Awaitable[Any]]) -> Any:
    async def body() -> Any:
        async with generator() as made:
            return await scenario(made)

    return asyncio.run(body())


def tagged(schema: Any, *, at_least_one: bool = False) -> str:
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    found = {"type": "triggered_tags", "triggers": ["<a>"], "tags": [tag], "at_least_one": at_least_one}
    return json.dumps({"type": "structural_tag", "format": found})


def logits(judge: tuple[Path, Any], prompt: tuple[int, ...], completion: Completion) -> torch.Tensor:
    """What the judge says before each sampled token: logits [T, V]."""
    with torch.no_grad():
        whole = judge[1](torch.tensor([[*prompt, *completion.token_ids.tolist()]])).logits[0].double()
    return whole[len(prompt) - 1 : -1]


def assert_logprobs(completion: Completion, told: torch.Tensor, temperature: float = 1.0) -> None:
    """``told``: the judge's logits."""
    sampled = torch.tensor(completion.token_ids.astype(np.int64))[:, None]
    expected = torch.log_softmax(told / temperature, -1).gather(1, sampled)[:, 0]
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=TOLERANCE, rtol=0)


def kept(
    probabilities: torch.Tensor, *, top_k: int = 10_000, top_p: float = 1.0, min_p: float = 0.0, in_turn: bool
) -> torch.Tensor:
    """Which tokens [T, V] may be sampled, by the definitions of top-k, nucleus and min-p sampling.

    Args:
        in_turn: the nucleus is that of what the other two leave, and not of the whole.
    """
    ordered, order = probabilities.sort(dim=-1, descending=True)
    inside = (torch.arange(ordered.shape[1]) < top_k) & (ordered >= min_p * ordered[:, :1])
    left = ordered * inside if in_turn else ordered
    left = left / left.sum(-1, keepdim=True)
    inside &= left.cumsum(-1) - left < top_p
    return torch.zeros_like(inside).scatter(1, order, inside)

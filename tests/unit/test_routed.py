"""What an engine tells of the experts that computed an answer: SGLang's encoding, and what is refused of it."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch

from areal_hpc.generation.answers import BadAnswer
from areal_hpc.generation.routed import asking_for_experts, told_experts
from areal_hpc.routing import Routing

LAYERS, CHOSEN = 3, 2
ROUTING = Routing(LAYERS, CHOSEN, 8)
BODY = {"rid": "r", "input_ids": [5, 6, 7, 8]}


def as_sglang_tells_it(experts: torch.Tensor) -> str:
    """Of SGLang 0.5.21: ``BaseHostCache.buffer`` in srt/state_capturer/base.py is int32 [tokens, layers, top k], of
    which ``get_topk`` takes the rows [start, number of tokens - 1); ``_b64_encode_per_request`` in
    srt/managers/detokenizer_manager.py encodes them so, and meta_info["routed_experts"] is the text.
    """
    assert experts.dtype == torch.int32
    return base64.b64encode(experts.numpy().tobytes()).decode("utf-8")


def some_experts(num_places: int, seed: int = 0) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    every = np.tile(np.arange(8, dtype=np.int32), (num_places, LAYERS, 1))
    return torch.from_numpy(generator.permuted(every, axis=-1)[..., :CHOSEN].copy())


def told(experts: Any, *, num_sampled: int = 3, first: int = 0, reason: str = "stop") -> Any:
    meta = {"finish_reason": {"type": reason}} | ({} if experts is None else {"routed_experts": experts})
    return told_experts({"meta_info": meta}, asking_for_experts(BODY, first), num_sampled, ROUTING)


@pytest.mark.parametrize("first", [0, 2, 4])
def test_all_places_but_the_last_have_their_experts(first: int) -> None:
    experts = some_experts(4 + 3 - 1 - first)
    found = told(as_sglang_tells_it(experts), first=first)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, experts.numpy())


def test_a_request_says_from_which_token_on() -> None:
    assert asking_for_experts(BODY, 2) == {**BODY, "return_routed_experts": True, "routed_experts_start_len": 2}


def test_more_than_255_experts_need_two_bytes() -> None:
    experts = torch.tensor([[[0, 299]]], dtype=torch.int32)
    answer = {"meta_info": {"routed_experts": as_sglang_tells_it(experts), "finish_reason": {"type": "stop"}}}
    found = told_experts(answer, asking_for_experts({"input_ids": [1]}, 0), 1, Routing(1, 2, 300))
    assert (found.dtype, found.tolist()) == (np.uint16, [[[0, 299]]])


def test_an_answer_that_was_ended_early_may_have_none() -> None:
    assert told(None, num_sampled=0, reason="abort").shape == (0, LAYERS, CHOSEN)
    with pytest.raises(BadAnswer, match="does not say which experts computed the tokens"):
        told(None)


def test_what_no_router_of_the_model_chose_is_refused() -> None:
    twice, beyond, below = some_experts(6), some_experts(6), some_experts(6)
    twice[2, 1] = torch.tensor([4, 4])
    beyond[5, 2, 1], below[0, 0, 0] = 8, -1
    with pytest.raises(BadAnswer, match="name one twice for a token"):
        told(as_sglang_tells_it(twice))
    with pytest.raises(BadAnswer, match="routed experts 0 to 8 are not of 8"):
        told(as_sglang_tells_it(beyond))
    with pytest.raises(BadAnswer, match="routed experts -1 to 7 are not of 8"):
        told(as_sglang_tells_it(below))


@pytest.mark.parametrize("text", ["###", "AAAA", as_sglang_tells_it(some_experts(5)), 7], ids=str)
def test_what_is_not_of_these_tokens_is_refused(text: Any) -> None:
    with pytest.raises(BadAnswer, match="its routed experts are not those of 6 tokens"):
        told(text)

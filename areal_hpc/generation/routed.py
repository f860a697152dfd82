"""Which experts computed the tokens of an answer, as SGLang tells it: asked for, and checked.

SGLang, started with ``--enable-return-routed-experts``, keeps the choice of every layer beside its keys and values, and
tells it of the places ``[routed_experts_start_len, number of tokens - 1)`` of request and answer: the last token was no
input. It comes as base64 of int32 [places, layers, experts of a token]. Of a prefix that another request has computed
it is that one's choice; and of a request that an update of the weights interrupted, whose tokens SGLang then computes
anew, the new weights'.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from areal_hpc.generation.answers import BadAnswer
from areal_hpc.routing import ExpertRecord, Routing
from areal_hpc.types import StopReason


def asking_for_experts(body: Mapping[str, Any], first: int) -> dict[str, Any]:
    """``body``, that also asks which experts computed the tokens from ``first`` on."""
    return {**body, "return_routed_experts": True, "routed_experts_start_len": first}


def told_experts(
    answer: Mapping[str, Any], body: Mapping[str, Any], num_sampled: int, routing: Routing
) -> ExpertRecord:
    """The record [R, L, K] in an answer of so many tokens to ``body``: of all places asked for but the last token's.

    An answer that was ended early may have none.

    Raises:
        BadAnswer: there is none, or not one of this model and these tokens.
    """
    meta = answer["meta_info"]
    told = meta.get("routed_experts")
    if told is None:
        if meta["finish_reason"]["type"] == StopReason.ABORT:
            return routing.unrecorded(0)
        raise BadAnswer("it does not say which experts computed the tokens; its model may have none")
    num_places = len(body["input_ids"]) + num_sampled - 1 - body["routed_experts_start_len"]
    shape = (num_places, routing.num_layers, routing.num_per_token)
    try:
        experts = np.frombuffer(base64.b64decode(told, validate=True), dtype="<i4").reshape(shape)
    except (TypeError, ValueError, binascii.Error) as error:
        raise BadAnswer(f"its routed experts are not those of {num_places} tokens: {error}") from error
    _check(experts, routing)
    return cast(ExpertRecord, experts.astype(routing.unrecorded(0).dtype))


def _check(experts: np.ndarray[Any, np.dtype[np.int32]], routing: Routing) -> None:
    """Refuse what no router chooses: an expert that is not there, or one twice for a token."""
    if not experts.size:
        return
    if experts.min() < 0 or experts.max() >= routing.num_experts:
        raise BadAnswer(f"its routed experts {experts.min()} to {experts.max()} are not of {routing.num_experts}")
    if (np.diff(np.sort(experts, axis=-1), axis=-1) == 0).any():
        raise BadAnswer("its routed experts name one twice for a token; this engine does not record them")

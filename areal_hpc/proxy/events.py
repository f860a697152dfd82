"""What the APIs share in shaping answers: server-sent events, usage, and what is new since the last reading."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areal_hpc.dialogue.parts import Parts
from areal_hpc.proxy.calls import Call, Told
from areal_hpc.proxy.requests import Ask, Refused

KEEP_ALIVE = b": keep-alive\n\n"


class Stream(Protocol):
    """One streamed answer: ``begin`` once, ``delta`` while it is sampled, then ``end``, or ``broken``."""

    def begin(self) -> list[bytes]: ...

    def delta(self, choice: int, parts: Parts) -> list[bytes]: ...

    def end(self, told: Sequence[Told]) -> list[bytes]:
        """The rest of the answer, and that it is over."""

    def broken(self, refused: Refused) -> list[bytes]:
        """Not the end of an answer, and nothing that could be taken for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One dialect: a request's body to ``Ask``, answers and refusals to what the client expects."""

    parse: Callable[[Mapping[str, Any]], Ask]
    whole: Callable[[Call, Sequence[Told]], dict[str, Any]]
    stream: Callable[[Call], Stream]
    refusal: Callable[[Refused], dict[str, Any]]


class News:
    """What each reading adds to the one before."""

    def __init__(self) -> None:
        self._told: dict[int, Parts] = defaultdict(Parts)

    def of(self, choice: int, parts: Parts) -> tuple[str, str]:
        """New reasoning and new content."""
        before, self._told[choice] = self._told[choice], parts
        assert parts.reasoning.startswith(before.reasoning) and parts.content.startswith(before.content)
        return parts.reasoning[len(before.reasoning) :], parts.content[len(before.content) :]


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event; its JSON is ASCII, so that no line break of Unicode can split it."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def generated(told: Sequence[Told]) -> int:
    """Tokens sampled for all choices."""
    return sum(int(one.completion.token_ids.size) for one in told)


def reasoned(told: Sequence[Told]) -> int:
    """Those of them that are reasoning."""
    return sum(one.num_reasoning for one in told)


def logprob_rows(told: Told) -> list[dict[str, Any]]:
    """Each sampled token with its log-prob, and the likeliest ones in its place, as OpenAI tells them; none unasked."""
    if not told.pieces:
        return []

    def row(piece: str, logprob: float) -> dict[str, Any]:
        return {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}

    tops = told.tops or ((),) * len(told.pieces)
    return [
        {**row(piece, logprob), "top_logprobs": [row(*entry) for entry in place]}
        for piece, logprob, place in zip(told.pieces, told.completion.logprobs.tolist(), tops, strict=True)
    ]


def openai_error(refused: Refused) -> dict[str, Any]:
    """A refusal in OpenAI's shape."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    error = {"message": str(refused), "type": kind, "code": refused.code or None, "param": refused.param or None}
    return {"error": error}

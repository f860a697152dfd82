"""An engine that says what a script tells it: for tests of workflows, ours and yours, without a model.

    generator = ScriptedGenerator(["The answer is 4.", "I do not know."])       one answer a request, in order
    generator = ScriptedGenerator(lambda request: "4" if request.session else [1, 2, 3])
    episode = Episode(id="e0", generator=generator, renderer=Utf8Renderer(), ...)
    trajectories = await my_workflow.run(prompt, episode)
    assert [r.token_ids for r in generator.requests] == [...]                    what the workflow asked

The function may also raise ``GenerationError`` (a failed engine), or return a whole ``Completion`` (odd versions, an
abort). Log-probs are a fixed function of token and position, so that a test can tell whose they are. Of the sampling
parameters it obeys ``max_new_tokens`` and ``stop_token_ids``; everything else is the script's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from areal_hpc.errors import GenerationError
from areal_hpc.types import Completion, GenerationRequest, Message, StopReason

Scripted = str | Sequence[int] | Completion
"""A text, which is encoded; token ids; or a completion that is returned as it is."""


def scripted_logprob(token_id: int, position: int) -> float:
    """The log-prob of a scripted token: in (-2.1, -0.1], different for neighbours."""
    return -(1 + (token_id * 7 + position * 3) % 20) / 10


def utf8_bytes(text: str) -> Sequence[int]:
    """The default tokenizer: one token for each byte."""
    return tuple(text.encode())


def from_utf8_bytes(token_ids: Sequence[int]) -> str:
    """Text of byte tokens; other ids are left out."""
    return bytes(token for token in token_ids if token < 256).decode(errors="replace")


class Utf8Renderer:
    """A ``Renderer`` without a model: one line for each message, then the header of the assistant's turn, as bytes."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return tuple(utf8_bytes("".join([*lines, "assistant: "])))

    def decode(self, token_ids: Sequence[int]) -> str:
        return from_utf8_bytes(token_ids)


class ScriptedGenerator:
    """A ``Generator`` in this process.

    Args:
        script: what each request gets, or the answers in order; a request after the last one raises GenerationError.
        version: weights that tokens are labelled with; set ``.version`` to change it, also in the middle of an answer.
        token_s: seconds that one token takes. At 0 other tasks still run between two tokens.
        encode, decode: a tokenizer; by default one token for each UTF-8 byte.

    Attributes:
        requests: what was asked so far, oldest first.
    """

    def __init__(
        self,
        script: Callable[[GenerationRequest], Scripted] | Sequence[Scripted],
        *,
        name: str = "scripted",
        version: int = 0,
        token_s: float = 0.0,
        encode: Callable[[str], Sequence[int]] = utf8_bytes,
        decode: Callable[[Sequence[int]], str] = from_utf8_bytes,
    ) -> None:
        self.name = name
        self.version = version
        self.token_s = token_s
        self.requests: list[GenerationRequest] = []
        self._script = script if callable(script) else _in_order(script)
        self._encode = encode
        self._decode = decode
        self._aborted: dict[str, bool] = {}

    async def generate(self, request: GenerationRequest) -> Completion:
        """The scripted answer, cut at the request's budget and stop tokens."""
        self.requests.append(request)
        answer = self._script(request)
        if isinstance(answer, Completion):
            return answer
        script = self._encode(answer) if isinstance(answer, str) else answer
        self._aborted[request.request_id] = False
        try:
            return await self._sample(request, script)
        finally:
            del self._aborted[request.request_id]

    async def _sample(self, request: GenerationRequest, script: Sequence[int]) -> Completion:
        token_ids: list[int] = []
        versions: list[int] = []
        stop = StopReason.STOP
        for token in script:
            if len(token_ids) == request.sampling.max_new_tokens:
                stop = StopReason.LENGTH
                break
            await asyncio.sleep(self.token_s)
            if self._aborted[request.request_id]:
                stop = StopReason.ABORT
                break
            token_ids.append(token)
            versions.append(self.version)
            if request.on_tokens is not None:
                request.on_tokens((token,))
            if token in request.sampling.stop_token_ids:
                break
        return Completion(
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.array([scripted_logprob(token, t) for t, token in enumerate(token_ids)], dtype=np.float32),
            versions=np.array(versions, dtype=np.int32),
            stop=stop,
            text=self._decode(token_ids),
            top_logprobs=tuple(((scripted_logprob(token, t), token),) for t, token in enumerate(token_ids))
            if request.num_top
            else (),
        )

    async def abort(self, request_id: str) -> None:
        """End a running request after the token it is at."""
        if request_id in self._aborted:
            self._aborted[request_id] = True

    async def probe(self) -> int:
        """The version it serves; it is always healthy."""
        return self.version

    async def close(self) -> None:
        """Nothing is open."""


def _in_order(answers: Sequence[Scripted]) -> Callable[[GenerationRequest], Scripted]:
    remaining = iter(answers)

    def answer(request: GenerationRequest) -> Scripted:
        for scripted in remaining:
            return scripted
        raise GenerationError(f"the script has {len(answers)} answers; request {request.request_id} asks for one more")

    return answer

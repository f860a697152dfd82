"""One model call of an agent: from the request to a turn in the session's transcript.

    place in the transcript -> generate, told token by token -> read -> commit -> (only now) the answer's end goes out

A turn is committed before the client can know that it is over: many a client hangs up on the last event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from areal_hpc.dialogue.grammar import trouble_with
from areal_hpc.dialogue.messages import message
from areal_hpc.dialogue.parts import THINK, THOUGHT, Parts, Reading
from areal_hpc.dialogue.text import IncrementalText, first_stop, without_partial_stop
from areal_hpc.dialogue.tool_formats import ToolFormat, kinds_of
from areal_hpc.dialogue.transcript import Place, Template
from areal_hpc.errors import DataError, GenerationError
from areal_hpc.proxy.requests import Ask, Refused
from areal_hpc.proxy.sessions import Session
from areal_hpc.types import Completion, GenerationRequest, Message, Sampling, StopReason

MAX_SEED = 1 << 31
"""Seeds of turns stay below this, as the seeds of episodes do."""
Tell = Callable[[int, Parts], None]
"""Told, for a choice by its number, all that is certain of it so far."""


class Dialogue(Template, Protocol):
    """What calls need of a renderer: ``ChatRenderer``."""

    def encode(self, text: str) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How the served model is spoken with."""

    dialogue: Dialogue
    written: ToolFormat
    """How it writes calls of tools."""
    trouble: str = ""
    """Why tools cannot be used with it; empty if they can."""
    schema_trouble: Callable[[str], str] = trouble_with
    """Why answers cannot be held to a JSON schema; empty if they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One choice of an answer, as the client gets it."""

    parts: Parts
    completion: Completion
    answer: Message
    pieces: tuple[str, ...]
    """The text of each sampled token by itself; only where log-probs were asked for."""
    stopped_by: str = ""
    """The stop string that ended it."""


class Call:
    """``call = Call(...)`` checks and places the request; ``await call.run(tell)`` answers it.

    Raises:
        Refused: the session has ended, the messages cannot be rendered, or leave no room for an answer.
    """

    def __init__(self, session: Session, ask: Ask, dialect: Dialect) -> None:
        self.session, self.ask, self._dialogue = session, ask, dialect.dialogue
        self._schema = _forced_schema(ask, dialect)
        self.place = placed(session, ask, dialect)
        self._reading = self._read_as(dialect.written)
        if self._reading.prefix:
            context = self.place.context + self._dialogue.encode(self._reading.prefix)
            self.place = replace(self.place, context=context)
        context = self.place.context
        self._room = session.max_tokens - len(context)
        if self._room < 1:
            raise Refused(
                400,
                f"the request has {len(context)} tokens, and the model's context holds {session.max_tokens}; "
                "send less, or raise `model.max_tokens`",
                code="context_length_exceeded",
                param="messages",
            )
        self.id = session.begin_call(ask.num_choices)
        left = session.room()
        self._share = self._room if left is None else max(1, left // ask.num_choices)

    def _read_as(self, written: ToolFormat) -> Reading:
        ask = self.ask
        tail = self._dialogue.spelled(self.place.context[-16:]).rstrip()
        if self._schema and tail.endswith(THINK):  # reasoning is no JSON: the template's beginning of it is closed
            return Reading(thinking=True, prefix=f"{THOUGHT}\n\n")
        if not ask.tools or ask.choice.mode == "none":
            return Reading(thinking=tail.endswith(THINK))
        forced = ask.choice.mode in ("required", "tool")
        return Reading(
            format=written,
            thinking=tail.endswith(THINK) and not forced,
            kinds=kinds_of(ask.tools),
            prefix=written.opening(ask.choice.name) if forced else "",
        )

    async def run(self, tell: Tell | None = None) -> list[Told]:
        """The choices, committed.

        Raises:
            Refused: the engine failed; nothing is committed.
        """
        numbers = range(self.ask.num_choices)
        asking = [asyncio.ensure_future(self._generate(number, tell)) for number in numbers]
        try:
            with self.session.answering():
                completions = await asyncio.gather(*asking)
        except GenerationError as error:
            raise Refused(503, f"the engine failed: {error}", code="engine_failed", retry_after_s=1.0) from error
        finally:
            for one in asking:
                one.cancel()
        return [self._committed(number, completion) for number, completion in zip(numbers, completions, strict=True)]

    async def _generate(self, number: int, tell: Tell | None) -> Completion:
        request = GenerationRequest(
            request_id=f"{self.id}.{number}",
            token_ids=self.place.context,
            sampling=self._sampling(number),
            session=self.session.id,
            on_tokens=None if tell is None else self._listener(number, tell),
        )
        completion = await self.session.generator.generate(request)
        if completion.stop is StopReason.ABORT or completion.token_ids.size > request.sampling.max_new_tokens:
            raise GenerationError(f"request {request.request_id} was ended early, or got more than it asked for")
        return completion

    def _sampling(self, number: int) -> Sampling:
        """The run's, but for the budget and the stop strings; each choice of each call has a seed of its own."""
        sampling = self.session.sampling
        return replace(
            sampling,
            max_new_tokens=min(self._room, self._share, sampling.max_new_tokens, self.ask.max_tokens or self._room),
            stop=self._stops,
            json_schema=self._schema,
            seed=None if sampling.seed is None else (sampling.seed + self._turn(number)) % MAX_SEED,
        )

    def _turn(self, number: int) -> int:
        """A number of its own for each choice of each request in the session; the same in every attempt."""
        return int(self.id.rpartition("-")[2]) + number

    @property
    def _stops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.session.sampling.stop, *self.ask.stop)))

    def _listener(self, number: int, tell: Tell) -> Callable[[Sequence[int]], None]:
        text = IncrementalText(self._dialogue.spelled)

        def on_tokens(token_ids: Sequence[int]) -> None:
            certain = text.extend([token for token in token_ids if token not in self._dialogue.eos_token_ids])
            hit = first_stop(certain, self._stops, 0)
            shown = without_partial_stop(certain, self._stops) if hit is None else certain[: hit[0]]
            tell(number, self._reading.read(shown, final=False))

        return on_tokens

    def _committed(self, number: int, completion: Completion) -> Told:
        ids = completion.token_ids.tolist()
        ended = bool(ids) and ids[-1] in self._dialogue.eos_token_ids
        text = self._dialogue.spelled(ids[:-1] if ended else ids)
        hit = first_stop(text, self._stops, 0)
        parts = self._reading.read(text if hit is None else text[: hit[0]], final=True)
        calls = parts.calls if self.ask.parallel else parts.calls[:1]
        turn = self._turn(number)
        named = [
            {"id": c.id or f"call_{turn}_{place}", "name": c.name, "arguments": c.arguments}
            for place, c in enumerate(calls)
        ]
        answer = message("assistant", parts.content, reasoning=parts.reasoning, calls=named)
        self.session.transcript.commit(self.place, completion, answer, self.id)
        return Told(
            parts=parts,
            completion=completion,
            answer=answer,
            pieces=tuple(self._dialogue.spelled([token]) for token in ids) if self.ask.logprobs else (),
            stopped_by="" if hit is None else hit[1],
        )


def _forced_schema(ask: Ask, dialect: Dialect) -> str:
    """The schema that the engine holds the answer to; beside tools the model is only asked, since it may call one.

    Raises:
        Refused: it is strict, and cannot be forced.
    """
    if not ask.schema or (ask.tools and ask.choice.mode != "none"):
        return ""
    trouble = dialect.schema_trouble(ask.schema)
    if trouble and ask.strict:
        raise Refused(400, trouble, param="response_format")
    return "" if trouble else ask.schema


def placed(session: Session, ask: Ask, dialect: Dialect) -> Place:
    """Where a request belongs in its session. Raises Refused if it cannot be rendered."""
    tools = () if ask.choice.mode == "none" else ask.tools
    if tools and dialect.trouble:
        raise Refused(400, dialect.trouble, param="tools")
    try:
        if ask.text is not None:
            return session.transcript.plain(dialect.dialogue.encode(ask.text), ask.text)
        return session.transcript.place(ask.messages, tools, ask.options)
    except DataError as error:
        raise Refused(400, f"the request cannot be rendered: {error}", param="messages") from error

"""One model call of an agent: from the request to a turn in the session's transcript.

    place in the transcript -> generate, told token by token -> read -> commit -> (only now) the answer's end goes out

A turn is committed before the client can know that it is over: many a client hangs up on the last event.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_hpc.dialogue.grammar import as_schema, trouble_with
from areal_hpc.dialogue.messages import message
from areal_hpc.dialogue.parts import THINK, THOUGHT, Parts, Reading
from areal_hpc.dialogue.structural_tag import calls_or_json_tag, calls_tag, is_strict, schema_of
from areal_hpc.dialogue.text import IncrementalText, first_stop, whole_text, without_partial_stop
from areal_hpc.dialogue.tool_calls import kinds_of
from areal_hpc.dialogue.tool_formats import ToolFormat
from areal_hpc.dialogue.transcript import Place, Template
from areal_hpc.errors import DataError, GenerationError, RequestRefused
from areal_hpc.proxy.requests import Ask, Refused, with_schema
from areal_hpc.proxy.sessions import Session
from areal_hpc.proxy.stored import Stored
from areal_hpc.types import MAX_SEED, Completion, GenerationRequest, Message, Sampling, StopReason

Tell = Callable[[int, Parts], None]
"""Told, for a choice by its number, all that is certain of it so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How the served model is spoken with."""

    dialogue: Template
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
    tops: tuple[tuple[tuple[str, float], ...], ...] = ()
    """The likeliest tokens at each place with their log-probs; only where they were asked for."""
    stopped_by: str = ""
    """The stop string that ended it."""
    num_reasoning: int = 0
    """Sampled tokens that are reasoning, with the end of it."""


class Call:
    """``call = Call(...)`` checks and places the request; ``await call.run(tell)`` answers it, or ``call.end()``.

    Raises:
        Refused: the session has ended, the messages cannot be rendered, or leave no room for an answer.
    """

    def __init__(self, session: Session, ask: Ask, dialect: Dialect) -> None:
        self._before = _previous(session, ask)
        if self._before is not None:
            messages = (*ask.messages[: ask.lead], *self._before.conversation(), *ask.messages[ask.lead :])
            ask = replace(ask, messages=messages)
        self.session, self.ask, self._dialogue = session, ask, dialect.dialogue
        self.forced = forced_by(ask, dialect)
        self.place = placed(session, ask, dialect)
        self._reading = self._read_as(dialect.written)
        if self._reading.prefix:
            context = self.place.context + self._dialogue.encode(self._reading.prefix)
            self.place = replace(self.place, context=context)
        context = self.place.context
        room = session.max_tokens - len(context)
        if room < 1:
            raise Refused(
                400,
                f"the request has {len(context)} tokens, and the model's context holds {session.max_tokens}; "
                "send less, or raise `model.max_tokens`",
                code="context_length_exceeded",
                param="messages",
            )
        wanted = min(room, session.sampling.max_new_tokens, ask.max_tokens or room)
        self._permit = session.begin_call(ask.num_choices, wanted)
        self.id = self._permit.id

    def end(self) -> None:
        """It is not answered any more; nothing happens if it was."""
        self.session.end_call(self._permit)

    def _read_as(self, written: ToolFormat) -> Reading:
        ask = self.ask
        thinking = self._dialogue.spelled(self.place.context[-16:]).rstrip().endswith(THINK)
        closing = f"{THOUGHT}\n\n" if thinking and self.forced.speechless else ""
        if not ask.tools or ask.choice.mode == "none":
            return Reading(thinking=thinking, prefix=closing)
        opening = written.opening(ask.choice.name) if ask.choice.is_forced and not self.forced.tag else ""
        return Reading(format=written, thinking=thinking, kinds=kinds_of(ask.tools), prefix=closing + opening)

    async def run(self, tell: Tell | None = None) -> list[Told]:
        """The choices, committed.

        Raises:
            Refused: the engine failed, refuses the request, or the session's time is up; nothing is committed.
        """
        try:
            completions = await self._completions(tell)
            return [self._committed(number, completion) for number, completion in enumerate(completions)]
        finally:
            self.end()

    async def _completions(self, tell: Tell | None) -> Sequence[Completion]:
        deadline = self._permit.deadline
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return await self._generated(tell)
        except TimeoutError as error:
            raise self.session.out_of_time() from error
        except RequestRefused as error:
            raise Refused(400, str(error), param=self._forced_by) from error
        except GenerationError as error:
            raise Refused(503, f"the engine failed: {error}", code="engine_failed", retry_after_s=1.0) from error

    async def _generated(self, tell: Tell | None) -> Sequence[Completion]:
        if self.ask.num_choices == 1:
            return [await self._generate(0, tell)]
        asking = [asyncio.ensure_future(self._generate(number, tell)) for number in range(self.ask.num_choices)]
        try:
            return await asyncio.gather(*asking)
        finally:
            for one in asking:
                one.cancel()

    @property
    def _forced_by(self) -> str:
        """The field that an engine has trouble with, most likely."""
        return "response_format" if self.forced.schema else "tools" if self.forced.tag else ""

    async def _generate(self, number: int, tell: Tell | None) -> Completion:
        request = GenerationRequest(
            request_id=f"{self.id}.{number}",
            token_ids=self.place.context,
            sampling=self._sampling(number),
            session=self.session.id,
            num_top=self.ask.num_top if self.ask.logprobs else 0,
            on_tokens=None if tell is None else self._listener(number, tell),
            experts_from=self.session.transcript.num_recorded(self.place),
        )
        completion = await self.session.generator.generate(request)
        if completion.stop is StopReason.ABORT or completion.token_ids.size > request.sampling.max_new_tokens:
            raise GenerationError(f"request {request.request_id} was ended early, or got more than it asked for")
        return completion

    def _sampling(self, number: int) -> Sampling:
        """The run's, but for the budget, the stop strings and the grammar; each choice has a seed of its own."""
        sampling = self.session.sampling
        return replace(
            sampling,
            max_new_tokens=self._permit.budget,
            stop=self._stops,
            json_schema=self.forced.schema,
            structural_tag=self.forced.tag,
            seed=None if sampling.seed is None else (sampling.seed + self._own(number)) % MAX_SEED,
        )

    def _own(self, number: int) -> int:
        """The number that is added to the session's seed for a choice.

        Where the request brings a seed, the number is drawn from that and the context: the same request is answered
        alike, and samples of different contexts stay independent of each other, which the trainer relies on.
        """
        if self.ask.seed is None:
            return self._turn(number)
        drawn = hashlib.sha256(repr((self.ask.seed, number, self.place.context)).encode()).digest()
        return int.from_bytes(drawn[:8])

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
        text = whole_text(ids[:-1] if ended else ids, self._dialogue.spelled)
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
            tops=tuple(
                tuple((self._dialogue.spelled([token]), logprob) for logprob, token in place)
                for place in completion.top_logprobs
            ),
            stopped_by="" if hit is None else hit[1],
            num_reasoning=self._end_of_reasoning(ids) if parts.reasoning else 0,
        )

    def keep(self, told: Told, response: Mapping[str, Any]) -> None:
        """Store an answer, as its client is about to get it, for requests that name it; if the client wants that."""
        if not self.ask.store:
            return
        before = self._before or self._repeated()
        num_known = self.ask.lead + (0 if before is None else len(before.conversation()))
        stored = Stored(
            before=before,
            messages=self.ask.messages[num_known:],
            answer=told.answer,
            lead=self.ask.lead,
            schema=self.ask.schema,
            response=response,
        )
        self.session.answers.keep(self.id, stored)

    def _repeated(self) -> Stored | None:
        """The stored answer whose conversation the client has sent again, instead of its id."""
        if self.place.parent is None:
            return None
        before = self.session.answers.find(self.session.transcript.turns[self.place.parent].call)
        if before is None or (before.lead, before.schema) != (self.ask.lead, self.ask.schema):
            return None
        return before

    def _end_of_reasoning(self, ids: Sequence[int]) -> int:
        """How many tokens there are up to the end of the reasoning; all where it has none."""
        return bisect.bisect_left(range(len(ids)), True, key=lambda num: THOUGHT in self._dialogue.spelled(ids[:num]))


def _previous(session: Session, ask: Ask) -> Stored | None:
    """The answer that it goes on from, if it names one. Raises Refused where that is not known."""
    if not ask.previous:
        return None
    previous = session.answers.find(session.call_of(ask.previous))
    if previous is None:
        raise Refused(
            400,  # as OpenAI does, whose clients look at the code and send everything again
            f"Previous response with id '{ask.previous}' not found: this session has answered none of that id, or was "
            "told not to store it; send the whole conversation",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return previous


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """What the engine holds an answer to; at most one of the first two is not empty."""

    schema: str = ""
    tag: str = ""
    speechless: bool = False
    """Whether it leaves no room for reasoning."""
    not_held: str = ""
    """The field of the request that the model is only asked to follow; empty where it is held to all."""
    why: str = ""


def forced_by(ask: Ask, dialect: Dialect) -> Forced:
    """What of a request the engine enforces.

    Beside tools the model is only asked to follow a schema that is not strict, since it may want to call one.

    Raises:
        Refused: a strict schema, of the answer or of a tool, cannot be forced.
    """
    trouble = dialect.schema_trouble(ask.schema) if ask.schema else ""
    if trouble and ask.strict:
        raise Refused(400, trouble, param="response_format")
    if ask.tools and ask.choice.mode != "none":
        return _forced_calls(ask, dialect)
    if trouble:
        return Forced(not_held="response_format", why=trouble)
    return Forced(schema=ask.schema, speechless=bool(ask.schema))


def _forced_calls(ask: Ask, dialect: Dialect) -> Forced:
    tools = [tool for tool in ask.tools if ask.choice.mode != "tool" or tool["function"]["name"] == ask.choice.name]
    must = ask.choice.is_forced
    for tool in filter(is_strict, tools):
        if trouble := dialect.schema_trouble(as_schema(schema_of(tool))):
            raise Refused(400, f"tool {tool['function']['name']} is strict, and {trouble}", param="tools")
    try:
        if ask.schema and ask.strict and not must:
            return Forced(tag=calls_or_json_tag(dialect.written, tools, ask.schema), speechless=True)
        tag = calls_tag(dialect.written, tools, forced=must)
    except DataError as error:
        raise Refused(400, str(error), param="tools") from error
    if any(map(is_strict, tools)) and not tag:
        why = "calls of this model begin as other answers do, so only those that are required can be held to a schema"
        return Forced(not_held="tools", why=why, speechless=must)
    if ask.schema and not must:
        return Forced(tag=tag, not_held="response_format", why="it is not strict, and the model may call tools instead")
    return Forced(tag=tag, speechless=must)


def placed(session: Session, ask: Ask, dialect: Dialect) -> Place:
    """Where a request belongs in its session. Raises Refused if it cannot be rendered."""
    tools = () if ask.choice.mode == "none" else ask.tools
    if tools and dialect.trouble:
        raise Refused(400, dialect.trouble, param="tools")
    try:
        if ask.text is not None:
            return session.transcript.plain(dialect.dialogue.encode(ask.text), ask.text)
        messages = with_schema(ask.messages, ask.schema) if ask.schema else ask.messages
        return session.transcript.place(messages, tools, ask.options)
    except DataError as error:
        raise Refused(400, f"the request cannot be rendered: {error}", param="messages") from error

"""Answers that a session keeps for requests that name them: to go on from one, to look at it again, or to forget it.

    first ── its messages, its answer
      └── second ── what it added, its answer            a conversation is the way to it, so each message is kept once
            └── third ...

An answer that is forgotten is none any more by its id; what went on from it stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.types import Message


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """One answer."""

    before: Stored | None = field(repr=False)
    """The answer that its conversation goes on from."""
    messages: tuple[Message, ...]
    """What the request added to that."""
    answer: Message
    lead: int
    """Messages that held for this answer alone, before all others; they are not kept."""
    schema: str
    """The schema that the answer was to follow."""
    response: Mapping[str, Any]
    """The response as the client got it."""

    def way(self) -> list[Stored]:
        """The answers from the first to this one."""
        way, one = [self], self.before
        while one is not None:
            way.append(one)
            one = one.before
        return way[::-1]

    def asked(self) -> tuple[Message, ...]:
        """The conversation that it answered."""
        return self.conversation()[:-1]

    def conversation(self) -> tuple[Message, ...]:
        """All messages, and the answer at their end."""
        return tuple(message for one in self.way() for message in (*one.messages, one.answer))


class Answers:
    """The stored answers of one session, by the ids of the requests that they answered."""

    def __init__(self) -> None:
        self._by_call: dict[str, Stored] = {}

    def keep(self, call: str, stored: Stored) -> None:
        self._by_call[call] = stored

    def find(self, call: str) -> Stored | None:
        return self._by_call.get(call)

    def forget(self, call: str) -> None:
        self._by_call.pop(call, None)

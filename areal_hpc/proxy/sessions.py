"""Sessions: one key is one attempt at one episode, with an engine, a transcript and rewards.

    open ──(requests with its key)──> ended ──(late rewards)──> closed: its key is no key any more

A key whose session nobody has used for ``idle_s`` opens nothing any more; the session itself goes when the next one is
opened. While a request is answered, a session is in use.

What a session may ask for holds also where it asks for several things at once: a request counts from its beginning to
its end, with all the tokens that it may sample.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic

from areal_hpc.config.schema import AgentConfig
from areal_hpc.dialogue.transcript import Template, Transcript
from areal_hpc.protocols import Generator
from areal_hpc.proxy.requests import Refused
from areal_hpc.proxy.stored import Answers
from areal_hpc.types import Sampling, Trajectory
from areal_hpc.waits import AGENT, waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one session may ask for; None is as much as it likes."""

    max_turns: int
    max_tokens: int | None = None
    """Tokens sampled in all its turns together."""
    max_s: float | None = None
    """Seconds from its first request on; what is being answered then is broken off."""
    max_open: int | None = None
    """Requests at once."""

    @classmethod
    def of(cls, agent: AgentConfig) -> Limits:
        """The limits of the configuration, where 0 is no limit."""
        return cls(
            max_turns=agent.max_turns,
            max_tokens=agent.max_tokens or None,
            max_s=agent.max_s or None,
            max_open=agent.max_open or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """Leave to answer one request, with its limits."""

    id: str
    """Id of the request."""
    budget: int
    """Tokens that each of its choices may sample."""
    deadline: float | None
    """When it must have ended, on the monotonic clock."""


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One attempt. Whoever has ``key`` may speak for it."""

    id: str
    key: str
    generator: Generator
    sampling: Sampling
    max_tokens: int
    """Longest sequence, prompt and answer together."""
    limits: Limits
    transcript: Transcript
    began: float = field(default_factory=time.time)
    """Seconds since 1970."""
    used: float = field(default_factory=monotonic)
    num_calls: int = 0
    answers: Answers = field(default_factory=Answers)
    """Stored answers, which later requests may name."""
    rewards: dict[int, float] = field(default_factory=dict)
    final: float | None = None
    ended: float | None = None
    """When it did, on the monotonic clock."""
    broken: str = ""
    """Why nothing of it may be trained on: an answer broke off after its beginning had been given out."""
    agent_s: float | None = None
    """Limit of the whole attempt, where somebody waits for its agent: told while the agent asks nothing."""
    _open: dict[str, int] = field(default_factory=dict)
    """Requests that are being answered, by id, and the tokens that each may sample."""
    _asked: float | None = None
    _silence: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._await_agent()

    def _await_agent(self) -> None:
        if self.agent_s is not None and self.ended is None:
            self._silence.enter_context(waiting("its next request", AGENT, limit_s=self.agent_s, about=self.id))

    def close(self) -> None:
        """Nobody may ask any more, and nobody waits for it."""
        self.ended = monotonic() if self.ended is None else self.ended
        self._silence.close()

    @property
    def num_sampled(self) -> int:
        """Tokens of all its turns."""
        return sum(int(turn.completion.token_ids.size) for turn in self.transcript.turns)

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return len(self._open)

    def begin_call(self, num_choices: int, wanted: int) -> Permit:
        """Leave for one more request, which is open until ``end_call``; meanwhile nobody waits for the agent.

        Args:
            wanted: most tokens that each of its choices needs.

        Raises:
            Refused: the session has ended, used up one of its limits, or will have done so with what is open.
        """
        if self.ended is not None:
            raise Refused(400, "this session has ended; start another one", code="session_ended")
        now, limits = monotonic(), self.limits
        self._asked = now if self._asked is None else self._asked
        if self.num_calls + num_choices > limits.max_turns:
            raise _used_up(f"{limits.max_turns} turns", "max_turns")
        deadline = None if limits.max_s is None else self._asked + limits.max_s
        if deadline is not None and now >= deadline:
            raise self.out_of_time()
        if limits.max_open is not None and self.num_open >= limits.max_open:
            raise self._busy("", "max_open")
        budget = self._budget(num_choices, wanted)
        number, self.num_calls = self.num_calls, self.num_calls + num_choices
        permit = Permit(id=f"{self.id}-{number}", budget=budget, deadline=deadline)
        self._open[permit.id] = num_choices * budget
        self._silence.close()
        return permit

    def _budget(self, num_choices: int, wanted: int) -> int:
        """Tokens for each choice: what is wanted, as far as there are any that nobody else was promised."""
        limit = self.limits.max_tokens
        if limit is None:
            return wanted
        left, promised = limit - self.num_sampled, sum(self._open.values())
        if left < num_choices:
            raise _used_up(f"{limit} tokens", "max_tokens")
        if left - promised < num_choices:
            raise self._busy(", to which its last tokens are promised", "max_tokens")
        return min(wanted, (left - promised) // num_choices)

    def _busy(self, why: str, limit: str) -> Refused:
        message = f"this session has {self.num_open} open requests{why}; wait for one, or raise `agent.{limit}`"
        return Refused(429, message, code=limit, retry_after_s=1.0)

    def out_of_time(self) -> Refused:
        """What is said when its time is up."""
        return _used_up(f"{self.limits.max_s:g} seconds", "max_s")

    def end_call(self, permit: Permit) -> None:
        """A request is open no more; nothing happens if it was not."""
        if self._open.pop(permit.id, None) is None:
            return
        self.used = monotonic()
        if not self._open:
            self._await_agent()

    def reward(self, value: float, call: str = "") -> None:
        """Reward the answers to one request, or the whole episode; the last word counts.

        Raises:
            Refused: no such request, or no finite number.
        """
        if not math.isfinite(value):
            raise Refused(400, "a reward must be a finite number", param="reward")
        if not call:
            self.final = value
            return
        numbers = self.transcript.numbers_of(self.call_of(call))
        if not numbers:
            raise Refused(404, f"there is no interaction {call!r} in this session", param="interaction_id")
        self.rewards |= dict.fromkeys(numbers, value)

    def call_of(self, answer_id: str) -> str:
        """The id of a request, from that of its answer, which has the API's own prefix."""
        return answer_id[max(0, answer_id.find(self.id)) :]

    def trajectories(self, discount: float) -> Sequence[Trajectory]:
        """What there is to train on; empty where nothing was answered or rewarded."""
        return self.transcript.trajectories(final=self.final, rewards=self.rewards, discount=discount)


def _used_up(what: str, limit: str) -> Refused:
    return Refused(
        400,
        f"this session has used its {what} up; raise `agent.{limit}`, or ask for less",
        code=f"{limit}_exceeded",
    )


class Sessions:
    """The sessions of one server. Keys are looked up by their hashes, so that the time it takes tells nothing."""

    def __init__(self, template: Template, *, idle_s: float, max_sessions: int = 65536) -> None:
        self._template, self._idle_s, self._max = template, idle_s, max_sessions
        self._next_look = 0.0  # until then none can have become idle
        self._by_key: dict[bytes, Session] = {}
        self._by_id: dict[str, Session] = {}
        self.num_opened = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def open(
        self,
        *,
        generator: Generator,
        sampling: Sampling,
        max_tokens: int,
        limits: Limits,
        agent_s: float | None = None,
        key: str = "",
    ) -> Session:
        """A new session with a key that nobody can guess.

        Args:
            key: speaks for this session from now on, and for none that it did before; a new one if it is empty.

        Raises:
            Refused: too many are open.
        """
        self._close_idle()
        if len(self._by_id) >= self._max:
            raise Refused(429, f"{self._max} sessions are open; end some", retry_after_s=1.0)
        self.num_opened += 1
        session = Session(
            id=f"s{self.num_opened}{secrets.token_hex(8)}",
            key=key or f"sk-{secrets.token_urlsafe(32)}",
            generator=generator,
            sampling=sampling,
            max_tokens=max_tokens,
            limits=limits,
            agent_s=agent_s,
            transcript=Transcript(self._template),
        )
        self._by_key[_hash(session.key)] = session
        self._by_id[session.id] = session
        return session

    def of_key(self, key: str) -> Session:
        """Raises Refused for a key that opens nothing."""
        session = self.find(key)
        if session is None or self._idle_at(session) < monotonic():
            raise Refused(401, "the API key is missing or opens no session", code="invalid_api_key")
        session.used = monotonic()
        return session

    def find(self, key: str) -> Session | None:
        """The session that a key speaks for, if there is one; that is no use of it."""
        return self._by_key.get(_hash(key))

    def of_id(self, session_id: str) -> Session:
        """Raises Refused for an id that is none."""
        session = self._by_id.get(session_id)
        if session is None:
            raise Refused(404, f"there is no session {session_id!r}", param="session_id")
        return session

    def close(self, session: Session) -> None:
        """Forget it; from now on its key opens nothing, unless it speaks for another by now."""
        session.close()
        self._by_id.pop(session.id, None)
        if self._by_key.get(hashed := _hash(session.key)) is session:
            del self._by_key[hashed]

    def __iter__(self) -> Iterator[Session]:
        """All that are not closed, oldest first."""
        return iter(list(self._by_id.values()))

    def _idle_at(self, session: Session) -> float:
        """When it will have been unused for too long, if nothing happens until then."""
        return (monotonic() if session.num_open else session.used) + self._idle_s

    def _close_idle(self) -> None:
        now = monotonic()
        if now < self._next_look:
            return
        for session in self:
            if self._idle_at(session) < now:
                self.close(session)
        self._next_look = min(map(self._idle_at, self), default=now + self._idle_s)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()

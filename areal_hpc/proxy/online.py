"""Agents in daily use: what they ask becomes episodes as it comes, and what it was worth makes them data.

    a key ── its first request ──> an episode ── refreshed, ended, or idle_s without a request ──> it has ended
                                                                                                       │
    ring <── ticket <── take() <── complete: rewarded, or reward_wait_s have passed  <─────────────────┘

A key speaks for one episode at a time; starting a session with it ends the one before. The standing key, which a person
writes into an agent's settings once, needs no starting: the first request after an end begins the next episode. The
sessions of a group are attempts at one task, and complete together. Nothing of an episode outlives this process before
the ring has it: whoever was killed has lost what was open, as with any other episode.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from areal_hpc.config.schema import AgentConfig
from areal_hpc.errors import RewardError
from areal_hpc.proxy.access import same
from areal_hpc.proxy.chronicle import Note
from areal_hpc.proxy.requests import Refused
from areal_hpc.proxy.sessions import Session, Sessions
from areal_hpc.types import Prompt, Trajectory

MAX_GROUP = 1024
Score = Callable[[str, Prompt], Awaitable[float]]
"""``await score(last answer, prompt)``; the prompt's messages are the conversation that the answer ends."""


class Open(Protocol):
    """Opens a session on the run's engines; with ``key`` one that this key speaks for."""

    def __call__(self, *, key: str = "") -> Session: ...


@dataclass(slots=True, kw_only=True, eq=False)
class SessionGroup:
    """Sessions that are learned from together: one alone, or several attempts at one task.

    Once they are complete, they are the ``CompleteEpisodes`` of ``rollout.online``.
    """

    id: str
    sessions: Sequence[Session]
    alone: bool
    about: Mapping[str, Any]
    """What whoever started the group said of it; the rule sees it as the prompt's metadata."""
    _score: Score | None
    _discount: float
    _note: Note
    left_out: Counter[str] = field(default_factory=Counter)
    """Why sessions gave nothing, once ``trajectories`` has been asked."""
    is_settled: bool = False

    async def trajectories(self) -> list[Trajectory]:
        """What there is to train on: of each session that was answered and rewarded, its number as the episode's."""
        made: list[Trajectory] = []
        for number, session in enumerate(self.sessions):
            if (why := await self._lacks(session)) is not None:
                self.left_out[why] += 1
                continue
            made += [replace(one, episode=number) for one in session.trajectories(self._discount)]
        return made

    async def _lacks(self, session: Session) -> str | None:
        """Why nothing can be learned from it, None if something can; the rule has scored it by then."""
        if session.broken:
            return "an answer broke off"
        if not session.transcript.turns:
            return "nothing was asked"
        if session.final is None and not session.rewards:
            if self._score is None:
                return "no reward came"
            last = session.transcript.turns[-1]
            prompt = Prompt(position=0, id=self.id, messages=last.messages, metadata=self.about)
            try:
                session.reward(await self._score(last.answer["content"], prompt))
            except RewardError:
                return "the rule failed"
        return None

    def settled(self, outcome: str, reason: str = "") -> None:
        """Write down what became of its sessions."""
        self.is_settled = True
        for session in self.sessions:
            self._note(session, {"group": "" if self.alone else self.id, "outcome": outcome, "reason": reason})


class Online:
    """The episodes of agents in daily use.

    Args:
        open_session: opens one on the run's engines.
        standing_key: begins an episode by itself; kept in a file of its owner.
        score: the rule for episodes that nobody rewarded; None leaves them out.
        note: is told of each session that has ended what became of it.
    """

    def __init__(
        self,
        sessions: Sessions,
        open_session: Open,
        config: AgentConfig,
        *,
        standing_key: str,
        score: Score | None,
        note: Note,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions, self._open_session, self._config = sessions, open_session, config
        self._standing_key, self._score, self._note, self._clock = standing_key, score, note, clock
        self._under_way: list[SessionGroup] = []
        self._taken: list[SessionGroup] = []

    def of_key(self, key: str) -> Session:
        """The session that a key speaks for now; with the standing key a new one where there is none, or it has ended.

        Raises:
            Refused: the key opens nothing.
        """
        if not self.is_standing(key):
            return self._sessions.of_key(key)
        session = self._sessions.find(key)
        return self.begin(key) if session is None or session.ended is not None else self._sessions.of_key(key)

    def is_standing(self, key: str) -> bool:
        return same(key, self._standing_key)

    def begin(self, key: str | None = None) -> Session:
        """A new episode alone, with a new key; with ``key`` the one that this key spoke for has ended.

        Raises:
            Refused: the key is unknown, or one of a group's, which has one episode.
        """
        before = None if key is None else self._sessions.find(key)
        if key is not None and before is None and not self.is_standing(key):
            raise Refused(401, "the API key is missing or opens no session", code="invalid_api_key")
        if before is not None:
            if any(before in one.sessions and not one.alone for one in self._under_way):
                raise Refused(400, "this key is of a group's session, which has one episode; start another group")
            before.close()
        session = self._open_session(key=key or "")
        self._add(session.id, [session], alone=True, about={})
        return session

    def begin_group(self, size: int, about: Mapping[str, Any]) -> tuple[str, Sequence[Session]]:
        """A new group: its id, and a session with a key of its own for each attempt at one task.

        Raises:
            Refused: the size is none, or too many sessions are open.
        """
        if not 1 <= size <= MAX_GROUP:
            raise Refused(400, f"size must be in [1, {MAX_GROUP}]", param="size")
        group_id, sessions = f"g{secrets.token_hex(8)}", list[Session]()
        try:
            for _ in range(size):
                sessions.append(self._open_session())
        except Refused:
            for session in sessions:  # nobody is told their keys, so nobody would end them
                self._sessions.close(session)
            raise
        self._add(group_id, sessions, alone=False, about=about)
        return group_id, sessions

    def _add(self, name: str, sessions: Sequence[Session], *, alone: bool, about: Mapping[str, Any]) -> None:
        self._under_way.append(
            SessionGroup(
                id=name,
                sessions=sessions,
                alone=alone,
                about=about,
                _score=self._score,
                _discount=self._config.discount,
                _note=self._note,
            )
        )

    def shown(self) -> list[Session]:
        """The sessions of which nothing is written down yet."""
        return [session for one in (*self._taken, *self._under_way) if not one.is_settled for session in one.sessions]

    def take(self) -> list[SessionGroup]:
        """The groups that are complete by now, each once; their sessions are closed, and take no reward any more."""
        now = self._clock()
        for one in self._under_way:
            for session in one.sessions:
                if session.ended is None and not session.num_open and now - session.used > self._config.online.idle_s:
                    session.close()
        complete = [one for one in self._under_way if all(self._is_complete(s, now) for s in one.sessions)]
        self._under_way = [one for one in self._under_way if one not in complete]
        self._taken = [one for one in [*self._taken, *complete] if not one.is_settled]
        for one in complete:
            for session in one.sessions:
                self._sessions.close(session)
        return complete

    def _is_complete(self, session: Session, now: float) -> bool:
        if session.ended is None or session.num_open:
            return False
        hopeless = not session.transcript.turns or bool(session.broken)
        return hopeless or session.final is not None or now - session.ended >= self._config.online.reward_wait_s

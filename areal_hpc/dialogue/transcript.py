"""The token-exact record of one episode: a tree of turns, and the trajectories that it makes.

    place = transcript.place(messages, tools)     which turn the request follows, and the ids to send to the engine
    ... the engine samples a completion for place.context ...
    number = transcript.commit(place, completion, answer)
    trajectories = transcript.trajectories(final=1.0)

A request that repeats a known conversation and adds to it continues that conversation's *real* ids: what was sampled
is never written down as text and tokenised again. Only what is new is rendered, as the end of the whole behind the
last end of turn. How each request fits to what was before has a name:

    START      no earlier answer in it: the first request, a sub-agent, the first one again
    CLEAN      an earlier turn, verbatim, and something new
    REALIGN    the same but for whitespace or the way JSON is written: the real ids are kept
    FORK       an earlier answer that cannot be continued: history was rewritten, the turn was cut, or the template
               renders old turns differently (drops their reasoning); rendered anew, as a branch

        START ── CLEAN ── CLEAN            one trajectory, three turns trained
                   └───── CLEAN            a second one; the tokens that they share are trained once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from areal_hpc.dialogue.messages import History, for_template, verbatim
from areal_hpc.routing import ExpertRecord, overlaid
from areal_hpc.types import NOT_SAMPLED, Completion, Message, Trajectory

Tool = Mapping[str, Any]


class Template(Protocol):
    """What renders: ``ChatRenderer``."""

    eos_token_ids: tuple[int, ...]

    def conversation(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        header: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]: ...

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        header: bool,
        options: Mapping[str, Any] | None = None,
    ) -> str: ...

    def encode(self, text: str) -> tuple[int, ...]: ...

    def spelled(self, token_ids: Sequence[int]) -> str: ...


class Drift(StrEnum):
    """How a request fits to the turns before it; see above."""

    START = "start"
    CLEAN = "clean"
    REALIGN = "realign"
    FORK = "fork"

    def continues(self) -> bool:
        """Whether the turn's tokens begin with its parent's."""
        return self in (Drift.CLEAN, Drift.REALIGN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request belongs: ``context`` [P] is what the engine must continue."""

    parent: int | None
    """The turn whose conversation it follows, and whose tokens it continues if the drift says so."""
    drift: Drift
    num_known: int
    """Turns that had been committed when the request came."""
    context: tuple[int, ...]
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    options: Mapping[str, Any]
    history: History = field(repr=False, compare=False)
    """The fingerprints of ``messages`` so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer of the model. ``call`` is the request's id; the choices of one request share it."""

    place: Place
    completion: Completion
    answer: Message
    call: str

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Context and sampled tokens [P + T]."""
        return self.place.context + tuple(self.completion.token_ids.tolist())

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.place.messages, self.answer)


class Transcript:
    """The turns of one episode, in the order of their commits; a turn's number is its place in it."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._by_history: dict[str, int] = {}  # the newest turn that ends with it
        self.turns: list[Turn] = []
        self.drifts: Counter[Drift] = Counter()

    def place(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Mapping[str, Any] | None = None
    ) -> Place:
        """Where a request with these messages belongs; the longest known history wins.

        Raises:
            DataError: the template refuses the messages.
        """
        options = options or {}
        history = History([list(tools), options])
        parent = self._longest_history([history.add(one) for one in messages])
        context: tuple[int, ...] | None = None
        drift = Drift.FORK if any(m["role"] == "assistant" for m in messages) and self.turns else Drift.START
        if parent is not None:
            known = self.turns[parent].messages
            context = self._continued(self.turns[parent], messages[len(known) :])
            if context is not None:
                same = verbatim(messages[: len(known)]) == verbatim(known)
                drift = Drift.CLEAN if same else Drift.REALIGN
        if context is None:
            context = self._template.conversation(for_template(messages), tools=tools, options=options)
        else:
            assert parent is not None
            messages = (*self.turns[parent].messages, *messages[len(self.turns[parent].messages) :])
        return Place(
            parent=parent,
            drift=drift,
            num_known=len(self.turns),
            context=context,
            messages=tuple(messages),
            tools=tuple(tools),
            options=options,
            history=history,
        )

    def _longest_history(self, histories: Sequence[str]) -> int | None:
        return next((self._by_history[h] for h in reversed(histories) if h in self._by_history), None)

    def _continued(self, turn: Turn, new: Sequence[Message]) -> tuple[int, ...] | None:
        """The turn's real ids and what the template writes between them and the next answer.

        None where it cannot be told: the turn did not end as the template ends turns, or the template renders the
        turns before differently now that others follow.
        """
        if not turn.completion.token_ids.size or turn.completion.token_ids[-1] not in self._template.eos_token_ids:
            return None
        how: dict[str, Any] = {"tools": turn.place.tools, "options": turn.place.options}
        before = self._template.text(for_template(turn.messages), header=False, **how)
        whole = self._template.text(for_template([*turn.messages, *new]), header=True, **how)
        eos = int(turn.completion.token_ids[-1])
        end = self._end_of_turn(before, whole, eos)
        if end is None:
            return None
        ids = self._template.encode(whole[end:])  # behind the end of a turn, as they are in the middle of a text
        return turn.token_ids + ids[ids.index(eos) + 1 :] if eos in ids else None

    def _end_of_turn(self, before: str, whole: str, eos: int) -> int | None:
        """Where in ``whole`` the token lies that ends the last turn of ``before``."""
        written = self._template.spelled([eos])
        if not written:
            return None
        if whole.startswith(before + written):
            return len(before)  # families whose next header is what ends a turn
        ends = (self._template.spelled([token]) for token in self._template.eos_token_ids)
        at, last = max((before.rfind(end), end) for end in ends if end)
        if last != written or before[at + len(written) :].strip():
            return None
        return at if at >= 0 and whole.startswith(before[: at + len(written)]) else None

    def plain(self, context: tuple[int, ...], text: str) -> Place:
        """A request to continue a plain text: no conversation, and nothing continues it."""
        message, history = {"role": "text", "content": text}, History([[], {}])
        history.add(message)
        return Place(
            parent=None,
            drift=Drift.START,
            num_known=len(self.turns),
            context=context,
            messages=(message,),
            tools=(),
            options={},
            history=history,
        )

    def num_recorded(self, place: Place) -> int:
        """How many of the context's tokens have a record of their experts, in the turns that it continues."""
        if place.parent is None or not place.drift.continues():
            return 0
        turn = self.turns[place.parent]
        return 0 if turn.completion.experts is None else len(turn.token_ids) - 1  # not of the last, which was no input

    def commit(self, place: Place, completion: Completion, answer: Message, call: str = "") -> int:
        """Write a turn down; its number."""
        number = len(self.turns)
        turn = Turn(place=place, completion=completion, answer=answer, call=call or f"turn-{number}")
        self.turns.append(turn)
        self.drifts[place.drift] += 1
        self._by_history[place.history.copy().add(answer)] = number
        return number

    def credits(
        self, *, final: float | None = None, rewards: Mapping[int, float] | None = None, discount: float = 1.0
    ) -> dict[int, float]:
        """What each turn is worth: its own reward and the discounted mean of what followed from it.

        A turn that nothing followed from has the episode's ``final`` reward, unless it has one of its own, or the same
        context was sent again after it (a retry: what it said was not used). Turns without any credit are missing.
        """
        rewards, turns = rewards or {}, tuple(self.turns)  # whoever looks on from another thread sees no more of them
        children = _children(turns)
        num_known: dict[tuple[int, ...], int] = {}  # turns that the last request with a context had before it
        for turn in turns:
            num_known[turn.place.context] = max(turn.place.num_known, num_known.get(turn.place.context, 0))
        worth: dict[int, float] = {}
        for number in reversed(range(len(turns))):
            turn, own = turns[number], rewards.get(number)
            later = [worth[child] for child in children[number] if child in worth]
            if own is None and not children[number] and num_known[turn.place.context] <= number:
                own = final
            if own is not None or later:
                worth[number] = (own or 0.0) + (discount * (sum(later) / len(later)) if later else 0.0)
        return worth

    def trajectories(
        self, *, final: float | None = None, rewards: Mapping[int, float] | None = None, discount: float = 1.0
    ) -> list[Trajectory]:
        """Training data in which each credited turn's sampled tokens are trainable exactly once.

        Turns of equal worth that continue one another are one trajectory; elsewhere a new one begins, with the tokens
        before it as context.
        """
        worth = self.credits(final=final, rewards=rewards, discount=discount)
        heirs: dict[int, int] = {}  # the turn that goes on in the same trajectory
        for number in sorted(worth):
            place = self.turns[number].place
            if place.parent in worth and place.drift.continues() and worth[place.parent] == worth[number]:
                heirs.setdefault(place.parent, number)
        made = []
        for number in sorted(worth):
            if number not in heirs:
                members = [number]
                while (parent := self.turns[members[-1]].place.parent) is not None and heirs.get(parent) == members[-1]:
                    members.append(parent)
                made.append(self._trajectory([self.turns[member] for member in reversed(members)], worth[number]))
        return made

    def _trajectory(self, turns: Sequence[Turn], reward: float) -> Trajectory:
        token_ids = np.array(turns[-1].token_ids, dtype=np.int32)
        loss_mask = np.zeros(token_ids.size, dtype=np.bool_)
        logprobs = np.zeros(token_ids.size, dtype=np.float32)
        versions = np.full(token_ids.size, NOT_SAMPLED, dtype=np.int32)
        for turn in turns:
            span = slice(len(turn.place.context), len(turn.place.context) + turn.completion.token_ids.size)
            assert np.array_equal(token_ids[span], turn.completion.token_ids), "a turn does not continue its parent"
            loss_mask[span] = True
            logprobs[span], versions[span] = turn.completion.logprobs, turn.completion.versions
        return Trajectory(
            token_ids=token_ids,
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            reward=reward,
            stop=turns[-1].completion.stop,
            experts=self._experts(turns[-1]),
        )

    def _experts(self, turn: Turn) -> ExpertRecord | None:
        """The record of a turn's tokens: what engines told for it, and for the turns it continues. None if nothing."""
        lineage = [turn]
        while (place := lineage[-1].place).parent is not None and place.drift.continues():
            lineage.append(self.turns[place.parent])
        told = [(len(one.token_ids), one.completion.experts) for one in reversed(lineage)]
        return overlaid([(end, experts) for end, experts in told if experts is not None], len(turn.token_ids))

    def numbers_of(self, call: str) -> Iterable[int]:
        """The turns that answered the request ``call``."""
        return [number for number, turn in enumerate(self.turns) if turn.call == call]


def _children(turns: Sequence[Turn]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in turns]
    for number, turn in enumerate(turns):
        if turn.place.parent is not None:
            children[turn.place.parent].append(number)
    return children

"""Whether every prompt was consumed exactly once: a pure function of what a run's files say.

The trainer keeps a consumed set for itself and puts it into its checkpoints. Here nothing of that is believed. It is
compared with three other accounts: the step journals (what each step was trained on, written step by step), the ring's
logs (what workers reserved and sealed), and arithmetic (a data epoch k of R prompts is positions k R to k R + R - 1).

    each surviving step is there once          steps 1, 2, 3, ... to the newest checkpoint, whichever attempts made them
    each position is consumed at most once     trained, or dropped for good; a prompt at most once in a data epoch
    consumed = trained + dropped for good      in every checkpoint: more would be lost, less would be trained again
    nothing is passed over                     a position that workers left behind is consumed, or still in the ring
    nothing is too old                         a ticket is at most max_staleness versions behind the step that used it
    the ring's records say the same            as the journal, for the groups that are still stored
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from areal_hpc.journal import Entry, Kind, Trained, up_to_checkpoint
from areal_hpc.types import Drop, WeightVersion
from areal_hpc.watermark import Watermark

TicketName = tuple[str, int]
"""Chain and number."""


class Breach(StrEnum):
    """In what way the proof fails."""

    LOST = "lost"
    """A prompt that counts as consumed was never trained, or one was passed over."""
    TWICE = "twice"
    """A prompt was consumed more than once, or would be."""
    STALE = "stale"
    """A group was trained that was too old."""
    HISTORY = "history"
    """The accounts themselves do not fit together."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is not as it must be; ``text`` names steps, positions and prompts."""

    breach: Breach
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt of the surviving history."""

    epoch: int
    last_step: int | None  # the checkpoint that the next one went on from; None for the newest attempt
    journal: Sequence[Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingState:
    """What the ring's logs say."""

    sealed: Mapping[TicketName, tuple[int, str]] = field(default_factory=dict)  # position and prompt id
    dropped: frozenset[int] = frozenset()  # positions that workers dropped for good
    reserved: frozenset[int] = frozenset()  # positions that workers of the newest attempt began
    reissues: frozenset[int] = frozenset()  # positions that the newest trainer has asked to be run again
    num_writers: int = 1  # of the newest attempt; writer w walks over positions w, w + n, w + 2 n, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a run's files say."""

    attempts: Sequence[Attempt]  # the surviving history, oldest first, without gaps
    others: Mapping[int, Sequence[Entry]]  # journals of attempts that nothing went on from
    checkpoints: Mapping[WeightVersion, Watermark]  # of the surviving history: what each counts as consumed
    unreadable: Sequence[str]  # what is wrong with each checkpoint that is there and cannot be read
    num_rows: int | None  # prompts in a data epoch; None before the first checkpoint
    max_staleness: int
    ring: RingState


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was found. Steps, positions and drops are those that the newest checkpoint covers, unless said otherwise."""

    violations: tuple[Violation, ...]
    attempts: int
    checkpoint: WeightVersion | None
    unreadable: tuple[str, ...]  # checkpoints that are there and cannot be read
    steps: int
    trained: int
    consumed_by_drop: Mapping[Drop, int]
    issued_again: Mapping[Drop, int]
    dropped_again: int  # by a second episode of a prompt that was consumed already
    num_rows: int | None
    finished_epochs: int  # data epochs of which every prompt is consumed
    steps_taken_back: int
    steps_since: int  # of the newest attempt, in no checkpoint yet
    open_sealed: int  # positions that wait in the ring
    open_begun: int
    open_reissued: int
    max_staleness: int
    confirmed: int  # trained groups that the ring still holds and that are what the journal says

    @property
    def proven(self) -> bool:
        return not self.violations

    def facts(self) -> dict[str, Any]:
        """Plain data that JSON keeps."""
        return {"proven": self.proven, **asdict(self)}


def prove(evidence: Evidence) -> Proof:
    """Compare all accounts."""
    newest = max(evidence.checkpoints, default=None)
    history = list(surviving(evidence.attempts, newest))
    since = _since(evidence.attempts, newest)
    covered = _consumed(entry for _, entry in history)
    consumed = covered | _consumed(since)
    violations = [
        *_missing_checkpoints(evidence),
        *_marks(evidence.attempts, newest),
        *_steps(history, newest),
        *_positions(history),
        *_prompts(history, evidence.num_rows),
        *_checkpoints(evidence),
        *_passed_over(evidence.ring, consumed),
        *_ages(history, evidence.max_staleness),
        *_records(history, evidence.ring),
    ]
    trained = [one for _, entry in history for one in entry.trained]
    dropped = [one for _, entry in history for one in entry.dropped]
    gone = {(one.chain, one.ticket) for entry in (*(entry for _, entry in history), *since) for one in entry.dropped}
    waiting = {position for name, (position, _) in evidence.ring.sealed.items() if name not in gone} - consumed
    begun = evidence.ring.reserved - consumed - waiting - evidence.ring.dropped
    return Proof(
        violations=tuple(violations),
        attempts=len(evidence.attempts),
        checkpoint=newest,
        unreadable=tuple(evidence.unreadable),
        steps=sum(entry.kind is Kind.STEP for _, entry in history),
        trained=len(trained),
        consumed_by_drop=dict(Counter(one.reason for one in dropped if one.consumed)),
        issued_again=dict(Counter(one.reason for one in dropped if one.reason.reissues())),
        dropped_again=sum(not one.consumed and not one.reason.reissues() for one in dropped),
        num_rows=evidence.num_rows,
        finished_epochs=_finished_epochs(covered, evidence.num_rows),
        steps_taken_back=_taken_back(evidence, newest),
        steps_since=sum(entry.kind is Kind.STEP for entry in since),
        open_sealed=len(waiting),
        open_begun=len(begun),
        open_reissued=len(evidence.ring.reissues - consumed),
        max_staleness=max((_lag(entry, one) for _, entry in history for one in entry.trained), default=0),
        confirmed=sum(evidence.ring.sealed.get((t.chain, t.ticket)) == (t.position, t.prompt_id) for t in trained),
    )


def _consumed(entries: Iterable[Entry]) -> frozenset[int]:
    return frozenset(position for entry in entries for position, _ in _consumed_by(entry))


def _consumed_by(entry: Entry) -> Iterator[tuple[int, str]]:
    """Positions with what consumed each, in words."""
    for one in entry.trained:
        yield one.position, f"prompt {one.prompt_id!r} trained at step {entry.step}"
    for drop in entry.dropped:
        if drop.consumed:
            yield drop.position, f"dropped as {drop.reason} by step {entry.step}"


def surviving(attempts: Sequence[Attempt], newest: WeightVersion | None) -> Iterator[tuple[int, Entry]]:
    """Every journal entry that checkpoint ``newest`` covers, in order, with its attempt."""
    for attempt, last in _stretches(attempts, newest):
        for entry in up_to_checkpoint(attempt.journal, last) or ():
            yield attempt.epoch, entry


def _stretches(attempts: Sequence[Attempt], newest: WeightVersion | None) -> Iterator[tuple[Attempt, int]]:
    """Attempts with the step up to which each counts."""
    for attempt in attempts:
        if newest is not None and attempt.epoch <= newest.epoch:
            last = newest.step if attempt.epoch == newest.epoch else attempt.last_step
            assert last is not None, attempt
            yield attempt, last


def _since(attempts: Sequence[Attempt], newest: WeightVersion | None) -> Sequence[Entry]:
    """What the newest attempt did after the newest checkpoint."""
    if not attempts:
        return ()
    last = attempts[-1]
    if newest is None or newest.epoch != last.epoch:
        return last.journal
    return last.journal[len(up_to_checkpoint(last.journal, newest.step) or ()) :]


# What must hold; each yields what does not


def _missing_checkpoints(evidence: Evidence) -> Iterator[Violation]:
    """Without any checkpoint nothing is proven, unless there never was one."""
    if not evidence.checkpoints:
        for text in evidence.unreadable:
            yield Violation(Breach.HISTORY, text)
        for attempt in evidence.attempts[:-1]:
            where = f"step {attempt.last_step} of attempt {attempt.epoch}"
            text = f"the run went on from the checkpoint of {where}, and no checkpoint is there that can be read"
            yield Violation(Breach.HISTORY, text)


def _marks(attempts: Sequence[Attempt], newest: WeightVersion | None) -> Iterator[Violation]:
    for attempt, last in _stretches(attempts, newest):
        if up_to_checkpoint(attempt.journal, last) is None:
            text = f"the journal of attempt {attempt.epoch} has no mark of the checkpoint of step {last}, or is damaged"
            yield Violation(Breach.HISTORY, text)


def _steps(history: Sequence[tuple[int, Entry]], newest: WeightVersion | None) -> Iterator[Violation]:
    made: dict[int, list[int]] = {step: [] for step in range(1, (newest.step if newest else 0) + 1)}
    for epoch, entry in history:
        if entry.kind is Kind.STEP:
            made.setdefault(entry.step, []).append(epoch)
    for step, epochs in sorted(made.items()):
        if not epochs:
            yield Violation(Breach.HISTORY, f"step {step} is in no journal of the surviving history")
        elif len(epochs) > 1:
            text = f"step {step} was made {len(epochs)} times, by attempts {', '.join(map(str, epochs))}"
            yield Violation(Breach.HISTORY, text)


def _positions(history: Sequence[tuple[int, Entry]]) -> Iterator[Violation]:
    how: dict[int, list[str]] = {}
    for epoch, entry in history:
        for position, text in _consumed_by(entry):
            how.setdefault(position, []).append(f"{text} of attempt {epoch}")
    for position, texts in sorted(how.items()):
        if len(texts) > 1:
            yield Violation(Breach.TWICE, f"position {position} was consumed {len(texts)} times: {'; '.join(texts)}")


def _prompts(history: Sequence[tuple[int, Entry]], num_rows: int | None) -> Iterator[Violation]:
    """Two positions of one data epoch that workers took for the same prompt: they drew from different streams."""
    trained: dict[tuple[int, str], set[int]] = {}
    for _, entry in history:
        for one in entry.trained:
            trained.setdefault((one.position // (num_rows or 1), one.prompt_id), set()).add(one.position)
    for (epoch, prompt_id), positions in sorted(trained.items()):
        if len(positions) > 1:
            text = (
                f"prompt {prompt_id!r} was trained more than once in data epoch {epoch}: positions {sorted(positions)}"
            )
            yield Violation(Breach.TWICE, text)


def _checkpoints(evidence: Evidence) -> Iterator[Violation]:
    for version, counted in sorted(evidence.checkpoints.items()):
        ours = _consumed(entry for _, entry in surviving(evidence.attempts, version))
        theirs = frozenset(counted)
        name = f"the checkpoint of step {version.step} of attempt {version.epoch}"
        for position in sorted(theirs - ours):
            text = (
                f"{name} counts position {position} as consumed, but no step was trained on it and nothing dropped it"
            )
            yield Violation(Breach.LOST, text)
        for position in sorted(ours - theirs):
            text = f"{name} does not count position {position} as consumed, so it would be trained again"
            yield Violation(Breach.TWICE, text)


def _passed_over(ring: RingState, consumed: frozenset[int]) -> Iterator[Violation]:
    """Positions that are behind their writer and nowhere else.

    A writer's stream ascends, and what it begins is on disk in that order; so of what lies before the last that it
    began, each has been consumed, or left a record in the ring, or is asked for again.
    """
    sealed = {position for position, _ in ring.sealed.values()}
    accounted = consumed | sealed | ring.dropped | ring.reserved | ring.reissues
    furthest: dict[int, int] = {}
    for position in ring.reserved:
        writer = position % ring.num_writers
        furthest[writer] = max(furthest.get(writer, -1), position)
    for writer, end in sorted(furthest.items()):
        for position in range(writer, end, ring.num_writers):
            if position not in accounted:
                text = f"position {position} was passed over: it is not consumed, and not in the ring any more"
                yield Violation(Breach.LOST, text)


def _lag(entry: Entry, one: Trained) -> int:
    """How many versions behind the ticket was when its step began."""
    return entry.step - 1 - one.version.step


def _ages(history: Sequence[tuple[int, Entry]], max_staleness: int) -> Iterator[Violation]:
    for epoch, entry in history:
        for one in entry.trained:
            if not 0 <= (lag := _lag(entry, one)) <= max_staleness:
                text = (
                    f"position {one.position} was trained at step {entry.step} of attempt {epoch} with a ticket of "
                    f"version {one.version.step}: {lag} versions behind, at most {max_staleness} are allowed"
                )
                yield Violation(Breach.STALE, text)


def _records(history: Sequence[tuple[int, Entry]], ring: RingState) -> Iterator[Violation]:
    for epoch, entry in history:
        for one in entry.trained:
            told, stored = (one.position, one.prompt_id), ring.sealed.get((one.chain, one.ticket))
            if stored not in (None, told):
                text = (
                    f"step {entry.step} of attempt {epoch} was trained on (position, prompt) {told}, but ticket "
                    f"{one.ticket} of chain {one.chain} holds {stored}"
                )
                yield Violation(Breach.HISTORY, text)


# What is told besides


def _finished_epochs(positions: frozenset[int], num_rows: int | None) -> int:
    if num_rows is None:
        return 0
    filled = Counter(position // num_rows for position in positions)
    return sum(count == num_rows for count in filled.values())


def _taken_back(evidence: Evidence, newest: WeightVersion | None) -> int:
    """Steps that restarts took back: those of other attempts, and those after the checkpoint that was gone on from."""
    taken = sum(entry.kind is Kind.STEP for journal in evidence.others.values() for entry in journal)
    for attempt in evidence.attempts[:-1]:
        last = attempt.last_step
        if newest is not None and attempt.epoch == newest.epoch:
            last = newest.step
        covered = up_to_checkpoint(attempt.journal, last) if last is not None else None
        taken += sum(entry.kind is Kind.STEP for entry in attempt.journal[len(covered or ()) :])
    return taken

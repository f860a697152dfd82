"""Who waits for whom, from what each process last said: a pure function from that to sentences.

    Seen, one a process            its open waits, what it has achieved and when, whether it is still heard of
    explain(seen, quiet_s)         a chain of sentences, its end (the root), and who is stuck
    hung_engines(seen, quiet_s)    the engines that keep others waiting by themselves
    hung_workers(seen, quiet_s)    the rollout workers that are silent or hang, though no trainer does

A process *gets on* if it is heard of and has achieved something lately, or is within the time limit of a wait that is
not for another process (a reward, loading a model). So does whoever waits for one that gets on, since any party of a
wait may bring what is waited for. All others are *stuck*: no wait of theirs leads to anybody who gets on. So is who
*hangs*: a file call without an end keeps its thread from all else, whatever its other waits lead to and however long
they may last. The root is where the waits of the stuck lead to: a process that is silent or has ended, that has nothing
to wait for and achieves nothing, that waits for the file system, or a circle of processes that wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from areal_hpc.waits import ANYBODY, FILE_SYSTEM, LEADER, Achieved, Wait

NEEDED = ("trainer-", "evaluator-")
"""Whom a run needs to come to its end; the others serve them, and may be idle."""
ENGINE, WORKER, TRAINER = "generator-", "rollout-", "trainer-"
BRIEF_S = 1.0
"""What a file or a reward may take before it is worth a word."""
NUM_NAMED = 4
"""Parties that a sentence names before it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One process as another sees it; seconds are counted up to now, also while nothing is heard of it."""

    name: str
    waits: tuple[Wait, ...] = ()
    achieved: Mapping[str, Achieved] = field(default_factory=dict)
    ended: bool = False
    """Whether it ended by itself; it said so."""
    absent: str = ""
    """Why nothing is to be expected of it though it should be there: "has given no sign of life for 31 s"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why things stand as they stand."""

    chain: tuple[str, ...]
    """Sentences: each one's party is the next one's subject."""
    root: str
    """The name of the last, or of all in the circle that the chain ends in."""
    trouble: tuple[str, ...]
    """Who stands still though the run needs it: all that are absent or hang, and trainers and evaluators that are
    stuck."""

    def text(self) -> str:
        return "\n<- ".join(self.chain)


def explain(seen: Sequence[Seen], quiet_s: float) -> Explanation:
    """The chain from the trainer that leads, or, where that gets on, from the first process that is stuck.

    Args:
        seen: at least one process.
        quiet_s: for how long nobody needs to be heard of or achieve anything.
    """
    picture = _Picture(seen, quiet_s)
    trouble = tuple(sorted(name for name in picture.stuck if picture.is_needed(name)))
    start = next((name for name in (LEADER, *trouble) if name in (trouble or picture.processes)), seen[0].name)
    path, end = picture.way_to_root(start) if trouble else picture.walk(start)
    links = tuple(sentence(name, wait) for name, wait in path)
    names = [name for name, _ in path]
    if end in names:
        circle = ", ".join(names[names.index(end) :])
        return Explanation(chain=(*links, f"{end}: each of {circle} waits for the next"), root=circle, trouble=trouble)
    return Explanation(chain=(*links, picture.describe(end)), root=end, trouble=trouble)


def hung_engines(seen: Sequence[Seen], quiet_s: float) -> dict[str, str]:
    """Engines that do not get on, wait for no process, and are silent, hang or are waited for; each with a sentence.

    An idle one is not hung, and neither is one that waits for weights, whoever should bring them.
    """
    picture = _Picture(seen, quiet_s)
    return {
        name: picture.describe(name)
        for name in sorted(picture.stuck)
        if name.startswith(ENGINE) and not picture.processes[name].ended and picture.keeps_waiting(name)
    }


def hung_workers(seen: Sequence[Seen], quiet_s: float) -> dict[str, str]:
    """Rollout workers without a sign of life, or in a file call without an end; each with a sentence.

    None where that is so of a trainer, too: then it is the file system that does not answer, and who takes their place
    would hang as they do.
    """
    picture = _Picture(seen, quiet_s)
    lost = {name: picture.describe(name) for name in sorted(picture.stuck) if picture.is_lost(name)}
    if any(name.startswith(TRAINER) for name in lost):
        return {}
    return {name: how for name, how in lost.items() if name.startswith(WORKER)}


class _Picture:
    """Answers about all processes at one moment."""

    def __init__(self, seen: Sequence[Seen], quiet_s: float) -> None:
        self.processes = {one.name: one for one in seen}
        self._quiet_s = quiet_s
        moving = {name for name in self.processes if self._gets_on(name)}
        free = {name for name in self.processes if self._hang_of(name) is None}
        while more := {name for name in free - moving if moving & {p for _, p in self.edges(name)}}:
            moving |= more
        self.stuck = frozenset(self.processes.keys() - moving)

    def _gets_on(self, name: str) -> bool:
        """Whether a process gets on by itself, whoever else does."""
        within = (wait.limit_s is not None and not wait.is_overdue() for wait in self._outside(name))
        can = not self._is_away(name) and self._hang_of(name) is None
        return can and (self._has_achieved_lately(name) or any(within))

    def _has_achieved_lately(self, name: str) -> bool:
        return any(thing.seconds < self._quiet_s for thing in self.processes[name].achieved.values())

    def _hang_of(self, name: str) -> Wait | None:
        """The file call that a process hangs in; None where it still achieves something, by another thread."""
        waits = () if self._has_achieved_lately(name) else self.processes[name].waits
        calls = (wait for wait in waits if FILE_SYSTEM in wait.parties and wait.limit_s is None)
        return next((call for call in calls if call.seconds >= self._quiet_s), None)

    def _is_away(self, name: str) -> bool:
        return self.processes[name].ended or bool(self.processes[name].absent)

    def is_needed(self, name: str) -> bool:
        return self.is_lost(name) or (not self.processes[name].ended and name.startswith(NEEDED))

    def _outside(self, name: str) -> Iterator[Wait]:
        """The waits of a process for something that is no process of the run."""
        waits = self.processes[name].waits
        return (wait for wait in waits if not self.processes.keys() & wait.parties and wait.parties != (ANYBODY,))

    def edges(self, name: str) -> Iterator[tuple[Wait, str]]:
        """The waits of a process for others, longest first; one that is away waits for nobody."""
        if not self._is_away(name):
            for wait in self.processes[name].waits:
                yield from ((wait, party) for party in wait.parties if party in self.processes)

    def is_lost(self, name: str) -> bool:
        """Whether a process is absent or hangs."""
        one = self.processes[name]
        return not one.ended and (bool(one.absent) or self._hang_of(name) is not None)

    def keeps_waiting(self, name: str) -> bool:
        """Whether a process is absent or hangs; or waits for no other, while others have long waited for it and nobody
        else."""
        if self.is_lost(name):
            return True
        waits = (wait for other in self.processes for wait, _ in self.edges(other))
        is_waited_for = any(wait.parties == (name,) and wait.seconds >= self._quiet_s for wait in waits)
        return is_waited_for and not any(self.edges(name))

    def walk(self, name: str) -> tuple[list[tuple[str, Wait]], str]:
        """Along the longest waits for others that are not stuck, to one that waits for something else or for nobody."""
        path: list[tuple[str, Wait]] = []
        seen = {*self.stuck, name}
        while not self._stands_outside(name, BRIEF_S):
            step = next((edge for edge in self.edges(name) if edge[1] not in seen), None)
            if step is None:
                break
            path.append((name, step[0]))
            name = step[1]
            seen.add(name)
        return path, name

    def way_to_root(self, start: str) -> tuple[list[tuple[str, Wait]], str]:
        """The shortest way along waits to where they end; if they do not end, along the longest ones into a circle."""
        ways: dict[str, list[tuple[str, Wait]]] = {start: []}
        queue = deque([start])
        while queue:
            name = queue.popleft()
            edges = list(self.edges(name))
            if not edges or self._stands_outside(name, self._quiet_s):
                return ways[name], name
            for wait, party in edges:
                if party not in ways:
                    ways[party] = [*ways[name], (name, wait)]
                    queue.append(party)
        return self._circle(start)

    def _stands_outside(self, name: str, for_s: float) -> bool:
        return any(wait.seconds >= for_s for wait in self._outside(name))

    def _circle(self, name: str) -> tuple[list[tuple[str, Wait]], str]:
        path: dict[str, Wait] = {}
        while name not in path:
            path[name], name = next(self.edges(name))
        return list(path.items()), name

    def describe(self, name: str) -> str:
        """A process by itself, in a sentence."""
        one = self.processes[name]
        if one.ended or one.absent:
            return f"{name} {one.absent or 'has ended'}"
        lately = [f"{what} {thing.count:,} ({thing.seconds:.0f} s ago)" for what, thing in one.achieved.items()]
        wait = self._hang_of(name) or next(self._outside(name), next(iter(one.waits), None))
        doing = f"{name} waits for nobody" if wait is None else sentence(name, wait)
        return f"{doing}; achieved: {', '.join(lately) or 'nothing yet'}"


def sentence(name: str, wait: Wait) -> str:
    """One wait of one process."""
    limit = "" if wait.limit_s is None else f" of {wait.limit_s:.7g} s"
    about = f": {wait.about}" if wait.about else ""
    if wait.count > 1:
        times = f"{wait.count} of them, the oldest for {wait.seconds:.0f} s{limit}{about}"
    else:
        times = f"{wait.seconds:.0f} s{limit}{about}"
    return f"{name} {_whom(wait)}{wait.what} ({times})"


def _whom(wait: Wait) -> str:
    if not wait.parties:
        return "is at work: "
    more = len(wait.parties) - NUM_NAMED
    names = ", ".join(wait.parties[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"waits for {names}: "

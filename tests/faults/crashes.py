"""Every instant of a run at which it may crash, what the crash may leave, and whether the run goes on from there.

points = record()                       one undisturbed run; an image of the volume before each call that matters
for state in states(points, cuts=2):    killed there; killed within a write; without power there, in several ways
    recover(state)                      the next attempts bring the run to its end, or a Violation says what is wrong
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from faults.images import Image, killed, power_cut, tree
from faults.mounted import mounted
from faults.scenario import Promises, Trial, without_threads
from faults.volume import MUTATING, Call, Volume

ROOT = Path("/volume")


class Point(NamedTuple):
    """The instant before ``call``; ``within`` is the state in the middle of it, where it is a write."""

    number: int
    call: Call
    before: Image
    within: Image | None
    num_sealed: int  # promises made by then
    num_saved: int
    num_evaluated: int


class State(NamedTuple):
    """What one crash left."""

    point: Point
    kind: str
    image: Image
    promises: Promises


def record(seed: int = 0, *, hard_links: bool = True) -> tuple[list[Point], Promises]:
    """A run of three attempts, the first two of which vanish; a writer is replaced in the first."""
    volume, trial, points = Volume(ROOT), Trial(ROOT, seed=seed), list[Point]()
    volume.hard_links = hard_links
    rng = Random(seed)

    def intercept(call: Call, do: Callable[..., Any]) -> Any:
        if call.name in MUTATING:
            before, within = volume.image, None
            if len(call.data) > 1:
                do(call.data[: rng.randrange(1, len(call.data))])
                within = volume.image
                volume.inodes = dict(before)
            promises = trial.promises
            made = (len(promises.sealed), len(promises.saved), len(promises.evaluated))
            points.append(Point(len(points), call, before, within, *made))
        return do()

    volume.intercept = intercept
    with mounted(volume), without_threads():
        trial.attempt(until=3, replace_at=1)
        trial.attempt(until=5)
        trial.attempt()
    return points, trial.promises


def states(points: Iterable[Point], promises: Promises, cuts: int, seed: int = 0) -> Iterator[State]:
    """Different states only: what was left with the same promises before is not told again."""
    known: set[tuple[int, int, int, int]] = set()
    for point in points:
        made = Promises(
            promises.sealed[: point.num_sealed],
            promises.saved[: point.num_saved],
            promises.evaluated[: point.num_evaluated],
        )
        for kind, image in _left_by_crash(point, cuts, seed):
            key = (hash(tuple(tree(image).items())), point.num_sealed, point.num_saved, point.num_evaluated)
            if key not in known:
                known.add(key)
                yield State(point, kind, image, deepcopy(made))


def _left_by_crash(point: Point, cuts: int, seed: int) -> Iterator[tuple[str, Image]]:
    yield "killed before", killed(point.before)
    if point.within is not None:
        yield "killed within", killed(point.within)
    for number in range(cuts):
        rng = Random(f"{seed} {point.number} {number}")
        yield "no power before", power_cut(point.before, rng)
        if point.within is not None:
            yield "no power within", power_cut(point.within, rng)


def recover(state: State, seed: int = 1, *, hard_links: bool = True) -> None:
    """
    Raises:
        Violation, or any error of the product: the run did not go on as it should.
    """
    volume = Volume(ROOT, state.image)
    volume.hard_links = hard_links
    with mounted(volume), without_threads():
        Trial(ROOT, state.promises, seed=seed).attempt()

"""The engines as rank 0 keeps them up to date: who takes part in weight updates, who came back, how long none may be
there.

    an engine's process dies        a publish names it, and goes on with those that are left
    its launcher starts another     the endpoint names a new incarnation: the engine is behind
    the trainer waits for groups    what is behind is caught up, alone, and takes part again
    a publish comes first           what was replaced takes part in it
    a satellite has joined          the same as if it had been replaced
    a satellite has left            it takes no part any more, and nobody asks it whether it lives
    nobody is left                  publish waits for the first that comes, within limits.start_s; or where satellites
                                    are to come, until for limits.join_s none was in Slurm's queue either

An engine that failed an update and lives is tried again in growing pauses; what is wrong with it may pass. After
``TRIES`` in a row its process is given up, which ends and is started anew, and after ``LIVES`` of those it is left out
while others serve: each try holds the trainer up. One that has failed is caught up alone, so that it spoils no other's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from areal_hpc.config.derived import QUEUE_S
from areal_hpc.errors import GenerationError, WaitTimeout, WeightUpdateError
from areal_hpc.mount import MIB
from areal_hpc.protocols import WeightTarget, WeightTransport
from areal_hpc.waits import waiting

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

SLOW_S = 5.0
"""An update shorter than this holds nobody up, however few bytes it moved."""
LOOK_S = 1.0
"""How often the engines' endpoints are read at most."""
TRIES = 4
"""Updates in a row that may fail on one process of an engine before it is given up. A vLLM whose loads are always late
ends by itself after three, with advice; giving it up sooner would hide that."""
LIVES = 2
"""Processes of one engine, one after the other, that may be given up before the engine is left out."""
FIRST_PAUSE_S, LAST_PAUSE_S = 2.0, 60.0
"""Pauses until an engine that failed is tried again: doubled each time that it fails."""


RunCoroutine = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end."""


class Engine(WeightTarget, Protocol):
    """A weight target that may be started again elsewhere; ``EngineClient`` is one."""

    incarnation: int

    def moved(self) -> object | None: ...

    async def reach(self) -> None: ...

    async def close(self) -> None: ...


Look = Callable[[], tuple[Sequence[Engine], Collection[str]]]
"""Engines that have joined, or come back, since it was last called, and the names of all that have left and not come
back."""


def nobody_comes_or_goes() -> tuple[Sequence[Engine], Collection[str]]:
    """The ``Look`` of a run whose engines are all its own."""
    return (), ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Satellites:
    """What brings engines to a run and takes them away again; by default nothing does."""

    look: Look = nobody_comes_or_goes
    desert_s: float | None = None
    """Longest time without any engine, where satellites are to bring them; None where the run has engines of its own,
    whose launcher watches them: ``Fleet``'s ``wait_s`` is enough for those."""
    in_the_queue: Callable[[], bool] = lambda: False
    """Whether satellites may be in Slurm's queue; while they are, ``desert_s`` does not run."""


class Fleet:
    """The engines behind one transport.

    Args:
        satellites: what brings more of them.
        wait_s: longest time in which nobody takes new weights.
        min_mb_per_s: an update slower than this, in MiB/s to each engine, is warned of, once; 0 is never.
        stopping: whether the run is to stop, so that nobody needs engines any more.
        record: takes ``("engine", values)`` whenever one is lost, given up, left out or back.
        give_up: takes an engine's name, the incarnation of its process, and why that is to end.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        transport: WeightTransport,
        *,
        run: RunCoroutine,
        satellites: Satellites,
        wait_s: float,
        min_mb_per_s: float,
        stopping: Callable[[], bool],
        record: Callable[[str, Mapping[str, Any]], None],
        give_up: Callable[[str, int, str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._engines, self._transport, self._run = list(engines), transport, run
        self._look, self._desert_s, self._in_the_queue = satellites.look, satellites.desert_s, satellites.in_the_queue
        self._new: set[str] = set()  # who has joined, and never had the newest weights
        self._deserted_since: float | None = None
        self._deserted_s = 0.0
        self._wait_s, self._stopping = wait_s, stopping
        self._record, self._give_up = record, give_up
        self._counted_from = 0.0  # of a time without engines: since when none was in the queue
        self._clock, self._sleep = clock, sleep
        self._min_mb_per_s = min_mb_per_s
        self._called_slow = False
        self._next_look = 0.0
        self._behind: list[Engine] = []
        self._out: set[str] = set()  # who is known to be lost
        self._pauses: dict[str, float] = {}  # of those that failed: until the next try
        self._next_try: dict[str, float] = {}
        self._failures: dict[str, int] = {}  # updates in a row that an engine failed, whichever process it was
        self._given_up: dict[str, int] = {}  # the incarnation of an engine that is to end
        self._since: float | None = None  # when a publish failed first, none having gone well since

    def publish(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> Mapping[str, float] | None:
        """Bring every engine that is there to ``version``; None if some were lost over it: publish again.

        ``weights`` is read to its end.

        Raises:
            WaitTimeout: no engine came back in time; says what became of each.
            WeightUpdateError: no try has gone well for so long.
        """
        self._since = self._clock() if self._since is None else self._since
        members = []
        try:
            if not self._someone_is_there(version):
                return {}
            members = [target.name for target in self._transport.membership.members]
            moved: Mapping[str, float] = self._run(self._transport.publish(version, weights))
        except WeightUpdateError as error:
            self._tell(version, up_to_date=False)
            self._count_failures(version, members)
            if self._clock() > self._since + self._wait_s:
                raise
            log.warning("version %d: %s", version, error)
            return None
        finally:
            deque(weights, maxlen=0)
        self._since = None
        self._tell(version, up_to_date=True)
        self._judge_speed(version, moved)
        return moved

    def behind(self) -> bool:
        """Whether an engine can be reached that lacks the newest weights; ``catch_up`` is for it.

        Raises:
            WaitTimeout: there has been none for too long; says what became of each.
        """
        if self._clock() < self._next_look:
            return False
        self._next_look = self._clock() + LOOK_S
        wanted = [e for e in self._come() + self._due() if self._failures.get(e.name, 0) < TRIES * LIVES]
        found = self._find(wanted)
        self._behind = [engine for engine in found if engine.name not in self._failures] or found[:1]
        self._count_desertion()
        return bool(self._behind)

    def deserted_s(self) -> float:
        """For how long in all, while the trainer waited for groups, no engine was known to be there."""
        since = self._deserted_since
        return self._deserted_s + (0.0 if since is None else self._clock() - since)

    def _count_desertion(self) -> None:
        if self._desert_s is None:
            return
        if self._transport.membership.members or self._behind:
            self._deserted_s, self._deserted_since = self.deserted_s(), None
        elif self._deserted_since is None:
            self._deserted_since = self._counted_from = self._clock()
        else:
            self._judge_patience(self._desert_s)

    def _judge_patience(self, limit_s: float) -> None:
        """Raises WaitTimeout: for so long nobody was there, nor in Slurm's queue."""
        if self._desert_s is not None and self._in_the_queue():
            self._counted_from = self._clock()
        if self._clock() - self._counted_from > limit_s:
            raise self._nobody_came(limit_s)

    def catch_up(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Bring those engines to ``version``, which the others serve; who fails is tried again later.

        ``weights`` is read to its end.
        """
        self._tell(version, up_to_date=False)
        try:
            self._run(self._transport.catch_up(version, weights, self._behind))
        except WeightUpdateError as error:
            log.warning("version %d: %s", version, error)
            for engine in self._behind:
                self._postpone(engine.name)
            self._count_failures(version, [engine.name for engine in self._behind])
        else:
            self._tell(version, up_to_date=True)
        finally:
            deque(weights, maxlen=0)

    def close(self) -> None:
        """End all connections, those of the transport first."""
        self._run(self._transport.close())
        for engine in self._engines:
            self._run(engine.close())

    def _judge_speed(self, version: int, moved: Mapping[str, float]) -> None:
        """Say it once when weights crawl: over a management network everything works, and takes for ever."""
        mib, seconds = (moved["bytes"] + moved.get("bytes_saved", 0.0)) / MIB, moved["seconds"]
        if self._called_slow or seconds < SLOW_S or mib >= self._min_mb_per_s * seconds:
            return
        self._called_slow = True
        engines = ", ".join(target.name for target in self._transport.membership.members)
        log.warning(
            "version %d took %.0f s to reach %s: %.1f MiB/s, below weights.min_mb_per_s = %g. It went by %s; if that "
            "is not the fast network, name its interface in the environment, else lower the key",
            version,
            seconds,
            engines,
            mib / seconds,
            self._min_mb_per_s,
            self._transport.route,
        )

    def _someone_is_there(self, version: int) -> bool:
        """Let in who was replaced, and if nobody is left wait for anybody; False if that is not needed any more."""
        self._admit(self._find(self._come()))
        if self._transport.membership.members:
            return True
        self._tell(version, up_to_date=False)
        names = [engine.name for engine in self._engines]
        began = self._clock()
        limit_s, told_s = (self._wait_s, self._wait_s) if self._desert_s is None else (self._desert_s, QUEUE_S)
        with waiting("any of them to come back" if names else "an engine to join", *names, limit_s=told_s):
            is_needed = self._someone_comes(limit_s)
        if self._desert_s is not None and self._since is not None:
            self._since += max(0.0, self._clock() - began - LOOK_S)  # the queue's time is no engine's failure
        return is_needed

    def _someone_comes(self, limit_s: float) -> bool:
        self._counted_from = self._clock()
        members = self._transport.membership
        while not members.members:
            if self._stopping():
                return False
            self._judge_patience(limit_s)
            self._sleep(LOOK_S)
            self._admit(self._find(self._come() + [e for e in self._engines if self._may_return(e)]))
        return True

    def _nobody_came(self, waited_s: float) -> WaitTimeout:
        lost = self._transport.membership.lost
        fates = "; ".join(f"{name}: {why}" for name, why in sorted(lost.items())) or "none has ever joined"
        queue = "" if self._desert_s is None else ", while no satellite was in Slurm's queue that the run knows"
        return WaitTimeout(
            f"waited {waited_s:g} s for an engine to take new weights{queue}, and none came back: {fates}"
        )

    def _admit(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            self._transport.membership.admit(engine)

    def _come(self) -> list[Engine]:
        """Engines that have joined or whose process is another one now; what its predecessor had been told is void.
        Those that have left take no part any more."""
        membership = self._transport.membership
        joined, away = self._look()
        for engine in [engine for engine in self._engines if engine.name in away]:
            self._engines.remove(engine)
            if engine.name not in membership.lost:
                membership.dismiss(engine.name, "it has left")
            self._run(engine.close())
        replaced = [engine for engine in self._engines if engine.moved() is not None]
        for engine in replaced:
            membership.dismiss(engine.name, "its process was replaced")
        self._engines += joined
        for engine in joined:  # perhaps on another node
            self._failures.pop(engine.name, None)
        self._new |= {engine.name for engine in joined} - membership.lost.keys()
        return [*replaced, *joined]

    def _may_return(self, engine: Engine) -> bool:
        return engine.name in self._transport.membership.lost

    def _due(self) -> list[Engine]:
        now = self._clock()
        staying = [e for e in self._engines if self._given_up.get(e.name) != e.incarnation]
        return [e for e in staying if self._may_return(e) and self._next_try.get(e.name, 0.0) <= now]

    def _find(self, engines: Sequence[Engine]) -> list[Engine]:
        """Those of ``engines`` that can be reached; all are tried at once, since a node that is gone takes its time."""
        asked = list({engine.name: engine for engine in engines}.values())
        troubles = self._run(_reach(asked)) if asked else []
        found = []
        for engine, error in zip(asked, troubles, strict=True):
            if error is None:
                found.append(engine)
            else:
                self._transport.membership.dismiss(engine.name, str(error))
                self._postpone(engine.name)
        return found

    def _postpone(self, name: str) -> None:
        pause = self._pauses[name] = min(LAST_PAUSE_S, 2 * self._pauses.get(name, FIRST_PAUSE_S / 2))
        self._next_try[name] = self._clock() + pause

    def _count_failures(self, version: int, names: Collection[str]) -> None:
        """Note who of ``names`` has failed an update, and see to those that do nothing else."""
        lost = self._transport.membership.lost
        for engine in [engine for engine in self._engines if engine.name in lost and engine.name in names]:
            failures = self._failures[engine.name] = self._failures.get(engine.name, 0) + 1
            why = f"{failures} updates of its weights in a row have failed, the last so: {lost[engine.name]}"
            if failures == TRIES * LIVES:
                log.error("%s: %s; it gets no more while others serve", engine.name, why)
                self._record("engine", {"engine": engine.name, "event": "left out", "version": version, "reason": why})
            elif failures % TRIES == 0:
                log.error("%s: %s; it is started anew. Raise limits.weight_update_s if it is late", engine.name, why)
                self._record("engine", {"engine": engine.name, "event": "given up", "version": version, "reason": why})
                self._given_up[engine.name] = engine.incarnation
                self._give_up(engine.name, engine.incarnation, why)

    def _tell(self, version: int, *, up_to_date: bool) -> None:
        """Record who has been lost, and, once all members have ``version``, who is back."""
        lost = self._transport.membership.lost
        for name in sorted(lost.keys() - self._out):
            self._record("engine", {"engine": name, "event": "lost", "version": version, "reason": lost[name]})
            self._postpone(name)
        self._out |= lost.keys()
        for name in sorted((self._out | self._new) - lost.keys()) if up_to_date else ():
            event = "joined" if name in self._new else "back"
            self._record("engine", {"engine": name, "event": event, "version": version, "reason": ""})
            self._out.discard(name)
            self._new.discard(name)
            self._pauses.pop(name, None)
        if up_to_date:
            self._failures = {name: number for name, number in self._failures.items() if name in lost}


async def _reach(engines: Sequence[Engine]) -> list[GenerationError | None]:
    """What keeps each of them from being reached."""

    async def trouble(engine: Engine) -> GenerationError | None:
        try:
            await engine.reach()
        except GenerationError as error:
            return error
        return None

    return await asyncio.gather(*map(trouble, engines))


class NoEngines:
    """In place of a ``Fleet``: weights go to nobody."""

    def publish(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> Mapping[str, float]:
        """The fingerprint that engines would have been sent."""
        from areal_hpc.buckets import fingerprint_of

        return {"fingerprint": float(fingerprint_of(weights))}

    def behind(self) -> bool:
        return False

    def deserted_s(self) -> float:
        return 0.0

    def catch_up(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        raise AssertionError("nobody is behind")

    def close(self) -> None:
        """Nothing is open."""

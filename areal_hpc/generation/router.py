"""Several engines as one ``Generator``: sessions stay, load is level, the dead leave and the living come back.

Engines may join, and leave for good or for a while: ``look`` tells, once a second and whenever one was lost. One that
has left gets no more requests; what it could not finish is asked anew of another.

A member takes requests while its last sign of life was good and it serves the newest weights that ``expect`` named.
One that breaks a connection, or is found behind, is out until a probe finds it healthy and up to date. A request is
given to another engine only if the first never saw it; one that was lost on the way fails, and its caller decides.

                 connection broken or refused; found behind
        in  ------------------------------------------------->  out
        in  <-------------------------------------------------  out
                 probe: healthy and serving what is expected

An engine that is full, by ``Capacity``, gets no more until something of what it has ends; when all are, requests wait,
and the oldest is served first. A small one may find room where a larger one that is older does not; once ``MAX_PASSED``
have passed it so, the engine that is the least loaded is kept for it, and those behind it get the others alone.

An engine that is behind missed an update and may be paused for good, so what it was asked is failed, not waited for.
One that has left is no longer updated either, but samples on by the weights it had until it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from areal_hpc.errors import GenerationError
from areal_hpc.generation.connection import EngineLost, EngineRefused
from areal_hpc.types import Completion, GenerationRequest
from areal_hpc.waits import waiting

LOOK_S = 1.0
"""How often it is asked who has joined or left."""
AWAY = "it has left"
"""Why a member takes no requests that has left the run."""
MAX_PASSED = 16
"""Requests that may be served before an older one that needs more room than there is."""
MAX_SESSIONS = 65536
"""Sessions remembered; the longest unused is forgotten first and starts again wherever there is room."""


class Engine(Protocol):
    """What the router needs of a member; ``EngineClient`` and ``ScriptedGenerator`` are such."""

    name: str
    version: int

    async def generate(self, request: GenerationRequest) -> Completion: ...

    async def abort(self, request_id: str) -> None: ...

    async def probe(self) -> int: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one engine may be given at once; 0 is any number."""

    max_requests: int = 0
    max_tokens: int = 0
    """Prompts and budgets together. A request that exceeds it alone is given to an engine that has nothing else."""

    def has_room(self, num_requests: int, tokens: int, cost: int) -> bool:
        """Whether an engine with so many requests, of so many tokens, may be given one of ``cost`` tokens."""
        return num_requests == 0 or (
            (not self.max_requests or num_requests < self.max_requests)
            and (not self.max_tokens or tokens + cost <= self.max_tokens)
        )


Look = Callable[[], tuple[Sequence[Engine], Collection[str]]]
"""Engines that have joined, or come back, since it was last called, and the names of all that have left and not come
back. Reads files, so it is called in a thread."""


@dataclass(slots=True, eq=False)
class _Member:
    engine: Engine
    outstanding: int = 0  # tokens: prompts and budgets of its running requests
    num_requests: int = 0
    trouble: str = ""  # why it is out
    behind: asyncio.Event = field(default_factory=asyncio.Event)  # it missed an update


@dataclass(slots=True, eq=False)
class _Place:
    """A request's place in the queue for room."""

    session: str
    cost: int
    num_passed: int = 0
    kept: _Member | None = None  # what nobody behind it gets
    given: _Member | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)  # it was given one, or none is left


class Router:
    """A ``Generator`` over ``engines``.

    Args:
        probe_s: seconds between two looks at the members that are out.
        wait_s: longest time a request waits for a member to come, or come back, when none is in.
        capacity: of each engine.
        look: who has joined and who has left; None where nobody does.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        probe_s: float = 2.0,
        wait_s: float = 300.0,
        capacity: Capacity | None = None,
        look: Look | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        assert engines or look, "a router needs an engine, or somebody who tells of some"
        self._members = [_Member(engine) for engine in engines]
        self._probe_s = probe_s
        self._wait_s = wait_s
        self._capacity = capacity or Capacity()
        self._queue: list[_Place] = []  # oldest first
        self._look, self._look_s = look, look_s
        self._away: Collection[str] = ()
        self._looking = asyncio.Lock()
        self._follower: asyncio.Task[None] | None = None
        self._expected = 0
        self._sessions: OrderedDict[str, _Member] = OrderedDict()
        self._serving: dict[str, _Member] = {}  # by request id
        self._returned = asyncio.Condition()
        self._prober: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> Completion:
        """One completion from the session's engine, else from the one with the fewest outstanding tokens.

        Raises:
            GenerationError: the engine failed, or none was there in time; names the engine, or all with their trouble.
                Also where engines look healthy and still refuse it after ``wait_s``.
        """
        if self._look is not None and self._follower is None:
            self._follower = asyncio.create_task(self._follow())
        if self._follower is not None and self._follower.done():
            self._follower.result()  # nobody can tell any more who has joined
        deadline = time.monotonic() + self._wait_s
        cost = len(request.token_ids) + request.sampling.max_new_tokens
        while True:
            member = await self._choose(request.session, cost)
            self._serving[request.request_id] = member
            try:
                return await self._ask(member, request)
            except EngineLost as error:
                self._put_out(member, str(error))
                never_seen = isinstance(error, EngineRefused) and time.monotonic() <= deadline
                if not never_seen and not await self._may_be_repeated(request, member):
                    raise
            finally:
                del self._serving[request.request_id]
                self._release(member, cost)

    async def _ask(self, member: _Member, request: GenerationRequest) -> Completion:
        asking = asyncio.ensure_future(member.engine.generate(request))
        falling_behind = asyncio.ensure_future(member.behind.wait())
        try:
            await asyncio.wait({asking, falling_behind}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise EngineLost(f"engine {member.engine.name} was taken out while it ran a request: {member.trouble}")
            return asking.result()
        finally:
            asking.cancel()
            falling_behind.cancel()

    async def _may_be_repeated(self, request: GenerationRequest, member: _Member) -> bool:
        """Whether another engine may be asked: this one has left the run, so its loss is no failure, and the caller has
        been told no part of the answer."""
        await self._look_now()
        return member.engine.name in self._away and request.on_tokens is None

    async def abort(self, request_id: str) -> None:
        """End a running request; its ``generate`` returns what there is. Nothing happens if it is not running."""
        if member := self._serving.get(request_id):
            await member.engine.abort(request_id)

    async def expect(self, version: int) -> None:
        """Give requests only to engines that serve ``version`` or newer: call it when that is published.

        Engines not known to do so are asked; meanwhile they serve on.
        """
        self._expected = max(self._expected, version)
        unknown = [m for m in self._members if not m.trouble and m.engine.version < self._expected]
        await asyncio.gather(*(self._probe(member) for member in unknown))

    def outstanding(self) -> dict[str, int]:
        """Outstanding tokens by engine name."""
        return {member.engine.name: member.outstanding for member in self._members}

    def out(self) -> dict[str, str]:
        """The members that take no requests, and why."""
        return {member.engine.name: member.trouble for member in self._members if member.trouble}

    def is_deserted(self) -> bool:
        """Whether no member takes requests."""
        return all(member.trouble for member in self._members)

    async def close(self) -> None:
        """Stop looking and probing, and close every client."""
        for task in (self._follower, self._prober):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for member in self._members:
            await member.engine.close()

    async def _choose(self, session: str, cost: int) -> _Member:
        """A member with room, to whose load ``cost`` is added. Waits for one."""
        self._queue.append(place := _Place(session, cost))
        try:
            await self._until_given(place)
        except BaseException:  # most of all a cancellation
            if place.given is None:
                self._queue.remove(place)
                self._deal()  # what was kept for it is free for others
            else:
                self._release(place.given, cost)
            raise
        assert place.given is not None
        return place.given

    async def _until_given(self, place: _Place) -> None:
        while True:
            await self._until_one_is_in()
            self._deal()
            if place.given is None:
                place.woken.clear()
                with waiting("room at one of them", *self._names(), limit_s=None):  # as long as what they run may take
                    await place.woken.wait()
            elif not place.given.trouble:
                return
            else:  # it went out after it was given
                member, place.given = place.given, None
                self._queue.insert(0, place)
                self._release(member, place.cost)

    def _release(self, member: _Member, cost: int) -> None:
        member.outstanding -= cost
        member.num_requests -= 1
        self._deal()

    def _deal(self) -> None:
        """Give what room there is to who waits for it, the oldest first."""
        passed: list[_Place] = []
        kept: set[_Member] = set()
        members = [member for member in self._members if not member.trouble]
        smallest = min((place.cost for place in self._queue), default=0)
        for place in list(self._queue):
            open_to_it = [member for member in members if member not in kept]
            if not any(self._has_room(member, smallest) for member in open_to_it):
                break
            if fit := [member for member in open_to_it if self._has_room(member, place.cost)]:
                self._give(place, fit)
                for older in passed:
                    older.num_passed += 1
                continue
            passed.append(place)
            if place.num_passed >= MAX_PASSED:
                if place.kept is None or place.kept.trouble:
                    place.kept = min(members, key=lambda m: m.outstanding)
                kept.add(place.kept)

    def _give(self, place: _Place, fit: Sequence[_Member]) -> None:
        """Give the request to its session's member, if that is among ``fit``, else to the least loaded."""
        member = self._sessions.get(place.session)
        if member is None or member not in fit:
            member = min(fit, key=lambda m: m.outstanding)
        if place.session:
            self._sessions[place.session] = member
            self._sessions.move_to_end(place.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        member.outstanding += place.cost
        member.num_requests += 1
        self._queue.remove(place)
        place.given = member
        place.woken.set()

    def _names(self) -> list[str]:
        return [member.engine.name for member in self._members]

    def _has_room(self, member: _Member, cost: int) -> bool:
        return self._capacity.has_room(member.num_requests, member.outstanding, cost)

    async def _until_one_is_in(self) -> None:
        names = self._names()
        what = "any of them to come back" if names else "an engine to join"
        try:
            with waiting(what, *names, limit_s=self._wait_s):
                async with asyncio.timeout(self._wait_s), self._returned:
                    await self._returned.wait_for(lambda: any(not member.trouble for member in self._members))
        except TimeoutError as error:
            out = self.out() or "none has joined"
            raise GenerationError(f"no engine came back in {self._wait_s:g} s: {out}") from error

    async def _follow(self) -> None:
        while True:
            await self._look_now()
            await asyncio.sleep(self._look_s)

    async def _look_now(self) -> None:
        """Take in who has joined, give those that have left no more requests, and forget them once they have none."""
        if self._look is None:
            return
        async with self._looking:
            joined, self._away = await asyncio.to_thread(self._look)
        known = {id(member.engine) for member in self._members}
        for engine in joined:
            if id(engine) not in known:
                self._members.append(member := _Member(engine))
                self._put_out(member, "it has just joined")
        gone = [member for member in self._members if member.engine.name in self._away]
        for member in gone:
            if not member.trouble:
                self._put_out(member, AWAY)
        await self._forget([member for member in gone if not member.num_requests])

    async def _forget(self, members: Sequence[_Member]) -> None:
        if not members:
            return
        self._members = [member for member in self._members if member not in members]
        held = [session for session, member in self._sessions.items() if member in members]
        for session in held:
            del self._sessions[session]
        for member in members:
            await member.engine.close()

    def _put_out(self, member: _Member, trouble: str) -> None:
        member.trouble = trouble
        if self.is_deserted():
            for place in self._queue:
                place.woken.set()  # to wait for one to come back, and no longer than that may take
        if self._prober is None or self._prober.done():
            self._prober = asyncio.get_running_loop().create_task(self._probe_until_all_are_in())

    async def _probe_until_all_are_in(self) -> None:
        while troubled := [member for member in self._members if member.trouble]:
            there = [member for member in troubled if member.engine.name not in self._away]
            await asyncio.gather(*(self._probe(member) for member in there))
            async with self._returned:
                self._returned.notify_all()
            await asyncio.sleep(self._probe_s)

    async def _probe(self, member: _Member) -> None:
        try:
            version = await member.engine.probe()
        except (GenerationError, OSError) as error:  # also of the file that says where it is now
            self._put_out(member, str(error))
            return
        if member.engine.name in self._away:  # it has left while it was asked
            self._put_out(member, AWAY)
        elif version < self._expected:
            self._put_out(member, f"it serves version {version} where {self._expected} is expected")
            member.behind.set()
        else:
            member.trouble = ""
            member.behind.clear()
            self._deal()

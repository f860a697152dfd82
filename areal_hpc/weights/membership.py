"""Which engines get new weights, and what every transport does to all of them at once.

    members --an engine fails a call--> lost        it stays paused and takes no part until it is brought back
    members <------- admit -----------  anyone      a new engine, or one that was restarted: with the next publish
    members <----- catching_up -------  anyone      the same, at once and alone, while the members sample on

After a failed update nobody is resumed. Until a publish goes through, the members that are left stay paused, with
weights that may be half new; those that receive new weights beside the old ones sample on with the old. Nobody samples
with new weights before every member has answered for all that was sent. A member that receives weights beside sampling
may find only when it is resumed that some are not what was sent: it is lost then, and serves none of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from areal_hpc.errors import WeightUpdateError
from areal_hpc.protocols import WeightTarget
from areal_hpc.transfer import Reception
from areal_hpc.waits import waiting

Call = Callable[[WeightTarget], Awaitable[None]]


class Membership:
    """The engines of one transport.

    Args:
        timeout_s: longest time that any one call to an engine may take.
    """

    def __init__(self, targets: Sequence[WeightTarget], timeout_s: float) -> None:
        assert len({target.name for target in targets}) == len(targets), "engines need names of their own"
        self.members = list(targets)
        self.lost: dict[str, str] = {}
        self.timeout_s = timeout_s
        self.changes = 0
        """How often ``members`` has changed."""

    def admit(self, target: WeightTarget) -> None:
        """Let ``target`` take part from the next publish on, in place of any member of that name."""
        self.members = [member for member in self.members if member.name != target.name] + [target]
        self.lost.pop(target.name, None)
        self.changes += 1

    def dismiss(self, name: str, why: str) -> None:
        """Leave ``name`` out from now on, without a word to it."""
        self.members = [member for member in self.members if member.name != name]
        self.lost[name] = why
        self.changes += 1

    @contextmanager
    def catching_up(self, targets: Sequence[WeightTarget]) -> Iterator[Membership]:
        """``targets`` as a membership of their own; they become members here when the inside ends well.

        Raises:
            WeightUpdateError: from inside; all of them are lost then.
        """
        for target in targets:
            self.dismiss(target.name, "it is being brought up to date")
        newcomers = Membership(targets, self.timeout_s)
        try:
            yield newcomers
        except WeightUpdateError as error:
            self.lost |= {target.name: newcomers.lost.get(target.name, str(error)) for target in targets}
            raise
        for target in targets:
            self.admit(target)

    def require(self) -> None:
        """Raises WeightUpdateError if nobody is left."""
        if not self.members:
            raise WeightUpdateError(f"no engine is left that could take new weights; lost: {self.lost}")

    async def prepare(self) -> Reception:
        """Make every member ready for an update. It is staged if all of them do, and proven if one does.

        Raises:
            WeightUpdateError: as ``all``.
        """
        told: list[Reception] = []

        async def prepare(target: WeightTarget) -> None:
            told.append(await target.prepare())

        await self.all("get ready for new weights", prepare)
        return Reception(stages=all(one.stages for one in told), proves=any(one.proves for one in told))

    async def attempt(self, target: WeightTarget, what: str, call: Call) -> None:
        """One call in bounded time.

        Raises:
            WeightUpdateError: it failed or took too long.
        """
        try:
            with waiting(f"it to {what}", target.name, limit_s=self.timeout_s):
                async with asyncio.timeout(self.timeout_s):
                    await call(target)
        except TimeoutError as error:
            message = f"engine {target.name} did not {what} in {self.timeout_s:g} s"
            raise WeightUpdateError(message) from error

    async def failures(self, what: str, call: Call) -> dict[str, str]:
        """Make one call to every member at once; the names of those that failed, with the reason."""
        attempts = (self.attempt(target, what, call) for target in self.members)
        outcomes = await asyncio.gather(*attempts, return_exceptions=True)
        reasons: dict[str, str] = {}
        for target, outcome in zip(self.members, outcomes, strict=True):
            if isinstance(outcome, WeightUpdateError):
                reasons[target.name] = str(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        return reasons

    async def all(self, what: str, call: Call) -> None:
        """Make one call to every member at once; those that fail are lost.

        Raises:
            WeightUpdateError: naming all that failed, once every call has ended.
        """
        if reasons := await self.failures(what, call):
            self.lose(reasons)

    def lose(self, reasons: dict[str, str]) -> None:
        """Leave the named members out from now on, and say so.

        Raises:
            WeightUpdateError: always; this is how a failed update ends.
        """
        for name, why in reasons.items():
            self.dismiss(name, why)
        left = ", ".join(member.name for member in self.members) or "none"
        raise WeightUpdateError(
            f"{'; '.join(reasons.values())}. Engines left: {left}; publish again to bring them up to date"
        )

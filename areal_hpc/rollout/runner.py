"""The rollout worker's loops: prompts in, sealed groups out.

    feed    ── a place among `concurrency` ── next prompt, re-issues first ── its ticket, polled ── start its group ──┐
      ↑                                                                                                              │
      └── the place is free ── seal, or drop with a reason ── judge ── episodes, failed ones again ──  group       <──┘

    watch   ── nothing began or ended for a while: record whom we wait for

Everyone waits for somebody with a name: feed for the trainer, who frees tickets, or for a group; a group for its
episodes; an episode for an engine or a reward, behind a time limit. A failed sample is recorded and tried again; any
other exception (Fenced, a bug) ends ``run`` at once. A ticket whose group is cancelled stays reserved: the ring issues
its prompt again. Nothing is kept of a group that ended.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from areal_hpc.config.schema import RolloutConfig
from areal_hpc.protocols import RolloutWriter
from areal_hpc.rollout.episodes import EpisodeRunner, Record, Running, first
from areal_hpc.rollout.filters import judge
from areal_hpc.types import Drop, Prompt, StopReason, Ticket, Trajectory, TrajectoryGroup, episode_means
from areal_hpc.waits import LEADER, advance, waiting

POLL_S = 0.05
STALL_S = 60.0


class PromptStream(Protocol):
    """The endless stream of this worker's prompts; ``at`` gives any position again."""

    def next(self) -> Prompt: ...

    def at(self, position: int) -> Prompt: ...


class Runner:
    """Runs the groups of one rollout process.

    Args:
        episodes: runs the episodes of each group.
        config: of the same episodes.
        record: takes ``(kind, values)``: "group" for each that ended, and "stall".
        engines: says how the engines stand, for the sentence on whom this worker waits for.
    """

    def __init__(
        self,
        *,
        episodes: EpisodeRunner,
        stream: PromptStream,
        writer: RolloutWriter,
        config: RolloutConfig,
        record: Record,
        engines: Callable[[], str] = str,
        poll_s: float = POLL_S,
        stall_s: float = STALL_S,
    ) -> None:
        self._episodes, self._stream, self._writer, self._config = episodes, stream, writer, config
        self._record, self._engines, self._poll_s, self._stall_s = record, engines, poll_s, stall_s
        self._running: dict[int, Running] = {}  # by position
        self._reissues: deque[int] = deque()
        self._reserving: int | None = None
        self._moved = time.monotonic()
        self._failed_in_a_row = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set, then cancel what is in flight.

        Raises:
            Fenced, or whatever is not a sample's failure: at once, everything cancelled.
            GenerationError, RewardError, ...: the last of so many failed groups in a row that it cannot be chance.
        """
        working, stopping = asyncio.create_task(self._work()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.wait((working, stopping))
        if not working.cancelled():
            working.result()

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                await self._feed(tasks)
        except BaseExceptionGroup as failures:
            raise first(failures) from None

    async def _feed(self, groups: asyncio.TaskGroup) -> None:
        places = asyncio.Semaphore(self._config.concurrency)
        while True:
            await places.acquire()
            prompt = self._next_prompt()
            ticket = await self._reserve(prompt)
            running = self._running[prompt.position] = Running(prompt, f"{ticket.chain}.{ticket.number}")
            groups.create_task(self._group(running, ticket)).add_done_callback(lambda _: places.release())

    def _next_prompt(self) -> Prompt:
        known = {*self._reissues, *self._running}
        self._reissues.extend(position for position in self._writer.reissues() if position not in known)
        return self._stream.at(self._reissues.popleft()) if self._reissues else self._stream.next()

    async def _reserve(self, prompt: Prompt) -> Ticket:
        """A ticket as soon as the trainer frees one: the back-pressure of the whole system."""
        self._reserving = prompt.position
        ticket = self._writer.try_reserve(prompt.position)
        while ticket is None:
            ticket = await self._lacking(prompt.position)
        self._reserving = None
        self._moved = time.monotonic()
        return ticket

    async def _lacking(self, position: int) -> Ticket | None:
        """A ticket, or None once the writer lacks something else for it: that is another wait, with another name."""
        what, how = self._writer.lacks()
        with waiting(what, LEADER, limit_s=None, about=f"for position {position}{how and '; '}{how}"):
            while self._writer.lacks()[0] == what:
                await asyncio.sleep(self._poll_s)  # another process frees it
                if (ticket := self._writer.try_reserve(position)) is not None:
                    return ticket
        return None

    async def _group(self, running: Running, ticket: Ticket) -> None:
        trajectories, failure = await self._episodes.run(running)
        del self._running[running.prompt.position]
        outcome, reason = self._settle(ticket, running.prompt, trajectories, failure)
        advance("groups sealed" if outcome == "sealed" else "groups dropped")
        self._moved = time.monotonic()
        values = {"outcome": outcome, "reason": reason, "ticket_version": ticket.version.step}
        self._record("group", {**values, **_describe(running, trajectories)})
        self._raise_if_nothing_works(failure if outcome == Drop.FAILED else None)

    def _settle(
        self, ticket: Ticket, prompt: Prompt, trajectories: Sequence[Trajectory], failure: Exception | None
    ) -> tuple[str, str]:
        """Seal the group, or drop it; the outcome and its reason. What is left of a group may be enough."""
        limits = self._config.filter
        num_episodes = len({trajectory.episode for trajectory in trajectories})
        if failure is not None and num_episodes < max(limits.min_group_size, 1):
            self._writer.drop(ticket, Drop.FAILED)
            return Drop.FAILED, type(failure).__name__
        verdict = judge(trajectories, limits)
        if not verdict.is_keep():
            self._writer.drop(ticket, Drop.FILTERED)
            return Drop.FILTERED, verdict
        group = TrajectoryGroup(position=prompt.position, prompt_id=prompt.id, trajectories=tuple(trajectories))
        self._writer.seal(ticket, group)
        return "sealed", ""

    def _raise_if_nothing_works(self, failure: Exception | None) -> None:
        """End the run when all places failed twice without one success between: more attempts will not mend that."""
        self._failed_in_a_row = 0 if failure is None else self._failed_in_a_row + 1
        if failure is not None and self._failed_in_a_row >= max(16, 2 * self._config.concurrency):
            failure.add_note(
                f"{self._failed_in_a_row} prompts in a row failed for good; this is the last one's failure"
            )
            raise failure

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._stall_s)
            if (still_s := time.monotonic() - self._moved) >= self._stall_s:
                self._record("stall", {"seconds": still_s, "waiting_for": self.waiting_for()})

    def waiting_for(self) -> str:
        """One sentence: whom this worker waits for, and for how long nothing has begun or ended."""
        whom = []
        if self._reserving is not None:
            whom.append(f"the trainer to free a slot for the prompt at position {self._reserving}")
        if self._running:
            oldest = min(self._running.values(), key=lambda running: running.began)
            stages = list(oldest.stages.values())
            doing = ", ".join(f"{stages.count(stage)} {stage}" for stage in sorted(set(stages)))
            whom.append(
                f"{len(self._running)} of {self._config.concurrency} groups in flight, the oldest for "
                f"{time.monotonic() - oldest.began:.0f} s: prompt {oldest.prompt.id!r} at position "
                f"{oldest.prompt.position}, attempt {oldest.attempt + 1} of {self._config.attempts}, "
                f"its episodes: {doing or 'none, pausing before the next attempt'}{self._engines()}"
            )
        return (
            f"nothing moved for {time.monotonic() - self._moved:.0f} s; waiting for {' and '.join(whom) or 'a prompt'}"
        )


def _describe(running: Running, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """What is recorded of a group that ended; means and versions only where it has something to tell."""
    values: dict[str, Any] = {
        "position": running.prompt.position,
        "prompt_id": running.prompt.id,
        "attempts": running.attempt + 1,
        "seconds": time.monotonic() - running.began,
        "trajectories": len(trajectories),
        "tokens": sum(int(trajectory.token_ids.size) for trajectory in trajectories),
    }
    if trajectories:
        episodes = [trajectory.episode for trajectory in trajectories]
        rewards = episode_means([trajectory.reward for trajectory in trajectories], episodes)
        generated = np.array([trajectory.num_generated for trajectory in trajectories])
        values |= {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
        values |= {"generated_mean": float(generated.mean()), "generated_max": int(generated.max())}
        values |= {"truncated": float(np.mean([t.stop is StopReason.LENGTH for t in trajectories]))}
    sampled = [t.versions[t.loss_mask] for t in trajectories if t.num_generated]
    if sampled:
        versions = np.concatenate(sampled)
        values |= {"version_min": int(versions.min()), "version_max": int(versions.max())}
    return values

"""The loop of a rollout worker that serves agents in daily use: what they have finished goes into the ring.

    take ── complete episodes, oldest first ── judge ── position and ticket, polled ── seal
      ↑                                          └── dropped with a reason                │
      └── nobody has finished anything: waits for an agent  <─────────────────────────────┘

A ticket is reserved when an episode is complete and not when it begins: nobody knows how long a person will take, and
the trainer must not wait for it. The ticket is then of the oldest weights that sampled any of its tokens, so the bound
on staleness holds as everywhere; what is older than the bound by then is dropped, and uses no position up. While one
waits for its ticket, others go on to end and to become complete; at most ``concurrency`` of them wait behind it, and
beyond that the oldest are dropped.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from areal_hpc.config.schema import FilterConfig
from areal_hpc.protocols import RolloutWriter
from areal_hpc.rollout.episodes import Record
from areal_hpc.rollout.filters import judge
from areal_hpc.rollout.runner import PromptStream
from areal_hpc.types import Baseline, Drop, Trajectory, TrajectoryGroup, episode_means
from areal_hpc.waits import AGENT, LEADER, advance, waiting

POLL_S = 0.1
NEWEST = np.iinfo(np.int32).max


class CompleteEpisodes(Protocol):
    """Episodes that are complete and learned from together: one alone, or a group."""

    id: str
    alone: bool
    left_out: Counter[str]

    async def trajectories(self) -> list[Trajectory]: ...

    def settled(self, outcome: str, reason: str = "") -> None: ...


class RunningBaseline:
    """Mean and deviation of the rewards so far, newer ones counting more: those ``window`` ago about a third.

    Of the first rewards it is their plain mean. It is asked before a reward is added, so that it never depends on it.
    """

    def __init__(self, window: int, rewards: Iterable[float] = ()) -> None:
        self._window, self._count = window, 0
        self._mean = self._square = 0.0
        for reward in rewards:
            self.add(reward)

    def add(self, reward: float) -> None:
        self._count += 1
        share = 1.0 / min(self._count, self._window)
        self._mean += share * (reward - self._mean)
        self._square += share * (reward * reward - self._square)

    @property
    def value(self) -> Baseline | None:
        """None before the first reward."""
        if not self._count:
            return None
        return Baseline(mean=self._mean, deviation=float(np.sqrt(max(0.0, self._square - self._mean**2))))


class OnlineRunner:
    """Seals what agents have finished; ``run`` has the shape of ``Runner.run``.

    Args:
        take: gives what is complete by now, each once.
        stream: of positions; its prompts mean nothing here.
        concurrency: complete ones that may wait behind the one that waits for a ticket.
        patience_s: how long it is nothing to worry about that nobody finishes anything.
        record: takes ``("group", values)`` for each that ended.
    """

    def __init__(
        self,
        *,
        take: Callable[[], Sequence[CompleteEpisodes]],
        stream: PromptStream,
        writer: RolloutWriter,
        filters: FilterConfig,
        baseline: RunningBaseline,
        max_staleness: int,
        concurrency: int,
        patience_s: float,
        record: Record,
        poll_s: float = POLL_S,
    ) -> None:
        self._take, self._stream, self._writer, self._filters = take, stream, writer, filters
        # An episode without a group is alone, and has nobody to differ from.
        self._alone = replace(filters, min_group_size=1, zero_variance=False)
        self._baseline, self._max_staleness, self._concurrency = baseline, max_staleness, concurrency
        self._patience_s, self._record, self._poll_s = patience_s, record, poll_s
        self._complete: deque[CompleteEpisodes] = deque()
        self._reissues: deque[int] = deque()

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set; episodes that are open, or wait for a ticket, are then lost.

        Raises:
            Fenced, or whatever is no failure of a sample.
        """
        while not stop.is_set():
            with waiting("an agent to finish an episode", AGENT, limit_s=self._patience_s):
                while not (stop.is_set() or self._collected()):
                    await self._pause(stop)
            while self._complete and not stop.is_set():
                await self._settle(self._complete.popleft(), stop)

    def _collected(self) -> bool:
        """Take what has become complete meanwhile; whether there is something to settle."""
        self._complete.extend(self._take())
        while len(self._complete) > self._concurrency:
            self._end(self._complete.popleft(), Drop.STALE, "too many are complete", [])
        return bool(self._complete)

    async def _pause(self, stop: asyncio.Event) -> None:
        try:
            await asyncio.wait_for(stop.wait(), self._poll_s)
        except TimeoutError:
            return

    async def _settle(self, ended: CompleteEpisodes, stop: asyncio.Event) -> None:
        """Seal it, or drop it with a reason."""
        trajectories = await ended.trajectories()
        outcome, reason = self._refused(ended, trajectories) or await self._sealed(ended, trajectories, stop)
        self._end(ended, outcome, reason, trajectories)

    def _refused(self, ended: CompleteEpisodes, trajectories: Sequence[Trajectory]) -> tuple[str, str] | None:
        """The outcome and its reason where it is not worth training on."""
        if not trajectories:
            return "skipped", ", ".join(sorted(ended.left_out))
        verdict = judge(trajectories, self._alone if ended.alone else self._filters)
        return None if verdict.is_keep() else (Drop.FILTERED, verdict)

    async def _sealed(
        self, ended: CompleteEpisodes, trajectories: Sequence[Trajectory], stop: asyncio.Event
    ) -> tuple[str, str]:
        """The outcome and its reason, once a ticket was free or it has become too old for one."""
        oldest = min(int(t.versions[t.loss_mask].min(initial=NEWEST)) for t in trajectories)
        position = self._next_position()
        what, how = self._writer.lacks()
        with waiting(what, LEADER, limit_s=None, about=f"for {ended.id}{how and '; '}{how}"):
            while self._writer.version.step - oldest <= self._max_staleness and not stop.is_set():
                if (ticket := self._writer.try_reserve(position, oldest)) is not None:
                    self._writer.seal(ticket, self._group(ended, position, trajectories))
                    return "sealed", ""
                self._collected()
                await self._pause(stop)
        self._reissues.appendleft(position)
        return Drop.STALE, "the run stops" if stop.is_set() else "sampled by weights that are too old"

    def _group(self, ended: CompleteEpisodes, position: int, trajectories: Sequence[Trajectory]) -> TrajectoryGroup:
        return TrajectoryGroup(
            position=position,
            prompt_id=f"online/{ended.id}",
            trajectories=tuple(trajectories),
            baseline=self._baseline.value if ended.alone else None,
        )

    def _next_position(self) -> int:
        """One that has to be used again first: what stood there was not trained on."""
        self._reissues.extend(position for position in self._writer.reissues() if position not in self._reissues)
        return self._reissues.popleft() if self._reissues else self._stream.next().position

    def _end(self, ended: CompleteEpisodes, outcome: str, reason: str, trajectories: Sequence[Trajectory]) -> None:
        rewards = episode_means([t.reward for t in trajectories], [t.episode for t in trajectories])
        if ended.alone and outcome == "sealed":
            self._baseline.add(float(rewards.mean()))
        advance("groups sealed" if outcome == "sealed" else "groups dropped")
        self._record(
            "group",
            {
                "outcome": outcome,
                "reason": reason,
                "prompt_id": ended.id,
                "trajectories": len(trajectories),
                "tokens": sum(int(t.token_ids.size) for t in trajectories),
                **({"reward_mean": float(rewards.mean())} if rewards.size else {}),
                **{f"left_out_{why.replace(' ', '_')}": count for why, count in ended.left_out.items()},
            },
        )
        ended.settled(outcome, reason)

"""The training loop with a backend that only notes what it is given, on the ring in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_hpc.buffer.memory import MemoryRing
from areal_hpc.buffer.order import FixedOrder
from areal_hpc.buffer.scan import one_by_one
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.training.loop import Checkpoints, Engines, LoopSettings, TrainingLoop
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Batch, Drop, GroupRef, StopReason, Trajectory, TrajectoryGroup

GROUP_SIZE = 3


def reward(position: int, episode: int) -> float:
    return float((position * 7 + episode * 3) % 5)


def expected_advantage(position: int, episode: int, eps: float = 1e-5) -> float:
    """Shao et al. 2024 (GRPO): the reward less the group's mean, by its deviation (n - 1)."""
    rewards = np.array([reward(position, e) for e in range(GROUP_SIZE)])
    return float((rewards[episode] - rewards.mean()) / (rewards.std(ddof=1) + eps))


def group(position: int, version: int) -> TrajectoryGroup:
    """Trajectories that say in their tokens whose they are: position, episode, then two sampled tokens."""
    return TrajectoryGroup(
        position=position,
        prompt_id=f"p{position}",
        trajectories=tuple(
            Trajectory(
                token_ids=np.array([position, episode, 8, 9], dtype=np.int32),
                loss_mask=np.array([False, False, True, True]),
                logprobs=np.array([0, 0, -1, -2], dtype=np.float32),
                versions=np.array([-1, -1, version, version], dtype=np.int32),
                reward=reward(position, episode),
                stop=StopReason.STOP,
                episode=episode,
            )
            for episode in range(GROUP_SIZE)
        ),
    )


def branched(position: int, version: int) -> TrajectoryGroup:
    """The same episodes, the first of them recorded as three branches."""
    whole = group(position, version)
    return replace(whole, trajectories=(*whole.trajectories[:1] * 3, *whole.trajectories[1:]))


class Workers:
    """Rollout workers that have a group ready whenever the ring gives a ticket."""

    def __init__(self, ring: MemoryRing) -> None:
        self.ring, self.writer, self.make = ring, ring.writer(0), group
        self.positions = itertools.count()
        self.refused: set[int] = set()

    def produce(self) -> None:
        again = iter(self.writer.reissues())
        for position in itertools.chain(again, self.positions):
            ticket = self.writer.try_reserve(position)
            if ticket is None:
                self.positions = itertools.chain([position], self.positions)
                return
            if position in self.refused:
                self.writer.drop(ticket, Drop.FILTERED)
                continue
            self.writer.seal(ticket, self.make(position, ticket.version.step))


class Backend:
    """Notes every call in ``calls`` and every minibatch in ``trained``."""

    def __init__(self, calls: list[str], data_ranks: Ranks) -> None:
        self.calls, self.trained, self.data_ranks = calls, list[list[Batch]](), data_ranks

    def logprobs(self, batch: Batch) -> NDArray[np.float32]:
        self.calls.append("logprobs")
        return batch.behaviour - 0.5

    def train_step(self, minibatches: Sequence[Batch]) -> Mapping[str, float]:
        self.calls.append("train")
        self.trained.append(list(minibatches))
        return {"loss": 0.25}

    def weights(self) -> Iterator[tuple[str, Any]]:
        self.calls.append("weights")
        yield "w", None

    def snapshot(self) -> Callable[[Path], None]:
        raise AssertionError("the loop leaves that to whoever commits")

    def load(self, directory: str) -> None: ...


class World:
    """A loop on one rank and all that it talks to."""

    def __init__(
        self,
        *,
        step: int = 0,
        total_steps: int = 3,
        max_staleness: int = 1,
        checkpoint_every: int = 100,
        deterministic: bool = False,
        ranks: Ranks | None = None,
        data_ranks: Ranks | None = None,
        ring: MemoryRing | None = None,
        **algorithm: Any,
    ) -> None:
        self.algorithm = AlgorithmConfig(**{"groups_per_step": 2, **algorithm})
        capacity = (max_staleness + 1) * self.algorithm.groups_per_step
        ranks = ranks or Ranks()
        order = FixedOrder(groups_per_step=self.algorithm.groups_per_step, max_staleness=max_staleness)
        self.ring = ring or MemoryRing(capacity, max_staleness, order=order if deterministic else None)
        self.workers = Workers(self.ring) if ranks.leads else None
        self.stop = False
        self.calls: list[str] = []
        self.journal: dict[int, list[int]] = {}
        self.records: list[dict[str, Any]] = []
        self.backend = Backend(self.calls, data_ranks or ranks)
        self.now = 0.0
        self.behind: list[bool] = []  # what is answered, last first
        self.pressed: list[bool] = []
        self.settled = 0
        self.loop = TrainingLoop(
            epoch=1,
            step=step,
            settings=LoopSettings(
                total_steps=total_steps, checkpoint_every=checkpoint_every, max_new_tokens=2, starve_s=60.0, seed=1
            ),
            algorithm=self.algorithm,
            ranks=ranks,
            backend=self.backend,
            fetch=one_by_one(self.ring.reader.read),
            reader=self.ring.reader if ranks.leads else None,
            engines=Engines(
                publish=self.publish,
                behind=lambda: self.behind.pop() if self.behind else False,
                catch_up=lambda version, weights: self.calls.append(f"catch up {version} {list(weights())}"),
            ),
            checkpoints=Checkpoints(
                begin=lambda step: self.calls.append(f"commit {step}"),
                settle=self.settle,
                would_make_room=lambda: self.pressed.pop() if self.pressed else False,
            ),
            journal=self.note,
            stop_requested=self.stop_requested,
            record=lambda kind, values: self.records.append({"kind": kind, **values}),
            clock=lambda: self.now,
        )

    def publish(self, version: int, weights: Callable[[], Iterator[tuple[str, Any]]]) -> Mapping[str, float]:
        assert [name for name, _ in weights()] == ["w"]
        self.calls.append(f"publish {version}")
        return {"seconds_paused": 0.125, "bytes": 20.0, "bytes_saved": 60.0}

    def settle(self, wait: bool) -> None:
        self.settled += 1
        if wait:
            self.calls.append("durable")

    def note(self, step: int, trained: Sequence[GroupRef]) -> None:
        self.calls.append(f"journal {step}")
        self.journal[step] = [ref.position for ref in trained]

    def stop_requested(self) -> bool:
        """Asked wherever the loop waits; meanwhile the workers work."""
        if self.workers is not None:
            self.workers.produce()
        return self.stop

    def run(self) -> bool:
        self.loop.announce()
        return self.loop.run()

    def begin_without(self, position: int) -> Workers:
        """Start weights published and the positions before ``position`` done; the workers wait to be told to go on."""
        workers, self.workers = self.workers, None
        assert workers is not None
        self.loop.announce()
        workers.positions = iter(range(position))
        workers.produce()
        workers.positions = itertools.count(position)
        return workers

    def trained(self) -> list[tuple[int, int]]:
        """(position, episode) of every trajectory trained on, in no particular order."""
        batches = [batch for minibatches in self.backend.trained for batch in minibatches]
        return [(int(b.token_ids[start]), int(b.token_ids[start + 1])) for b in batches for start in b.boundaries[:-1]]

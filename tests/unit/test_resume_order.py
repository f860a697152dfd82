"""Stops and kills anywhere do not change which prompts are trained on, nor in which order: loop, ring and stream.

One worker that answers at once, so that there is one uninterrupted order; it is the stream's own. How many prompts
there are, how many a step takes, in how many minibatches, and where the run is interrupted must not be visible in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from areal_hpc.buffer.memory import MemoryRing
from areal_hpc.buffer.scan import one_by_one
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.schema import PromptsConfig
from areal_hpc.prompts import Dataset, PromptStream
from areal_hpc.training.loop import Checkpoints, Engines, LoopSettings, TrainingLoop
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Batch, StopReason, Trajectory, TrajectoryGroup, WeightVersion

PROMPTS = PromptsConfig(train="rows")


class Killed(Exception):
    """The trainer ends here; nothing after it happens."""


def group(position: int, version: int) -> TrajectoryGroup:
    """One trajectory that carries its position as its first token."""
    trajectory = Trajectory(
        token_ids=np.array([position, 8], dtype=np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.array([0, -1], dtype=np.float32),
        versions=np.array([-1, version], dtype=np.int32),
        reward=1.0,
        stop=StopReason.STOP,
        episode=0,
    )
    return TrajectoryGroup(position=position, prompt_id=f"p{position}", trajectories=(trajectory,))


@dataclass
class Saved:
    """What a checkpoint has of the ring, and the model: every position trained on, by step."""

    step: int
    trained: list[list[int]]
    ring: Mapping[str, Any]


@dataclass
class Run:
    """A run over its attempts. The backend's weights *are* the list of what it was trained on."""

    rows: int
    batch: int
    max_staleness: int
    minibatches: int
    every: int
    total: int
    ring: MemoryRing | None = None
    saved: tuple[WeightVersion, Saved] | None = None
    trained: list[list[int]] = field(default_factory=list)

    def attempt(self, *, stop_at: int | None = None, kill_at: int | None = None) -> bool:
        """Whether the run has come to its end."""
        parent, state = (None, None) if self.saved is None else (self.saved[0], self.saved[1].ring)
        capacity = (self.max_staleness + 1) * self.batch
        self.ring = MemoryRing(capacity, self.max_staleness, before=self.ring, state=state, parent=parent)
        self.trained = [] if self.saved is None else list(self.saved[1].trained)
        step = 0 if parent is None else parent.step
        work = worker(self.ring, self.rows)

        def publish(version: int, weights: Iterator[Any]) -> Mapping[str, float]:
            if version == kill_at and version > step:
                raise Killed
            return {}

        def stopping() -> bool:
            work()
            return loop.step == stop_at

        loop = TrainingLoop(
            epoch=self.ring.epoch,
            step=step,
            settings=LoopSettings(
                total_steps=self.total, checkpoint_every=self.every, max_new_tokens=1, starve_s=9.0, seed=1
            ),
            algorithm=AlgorithmConfig(groups_per_step=self.batch, minibatches=self.minibatches),
            ranks=Ranks(),
            backend=self,
            fetch=one_by_one(self.ring.reader.read),
            reader=self.ring.reader,
            engines=Engines(publish=publish),
            checkpoints=Checkpoints(begin=self.commit, settle=lambda wait: None),
            journal=lambda step, trained: None,
            stop_requested=stopping,
            record=lambda kind, values: None,
        )
        try:
            loop.announce()
            return loop.run()
        except Killed:
            return False

    def commit(self, step: int) -> None:
        assert self.ring is not None
        saved = Saved(step, list(self.trained), self.ring.reader.state_dict())
        self.saved = (WeightVersion(self.ring.epoch, step), saved)

    # TrainerBackend

    data_ranks = Ranks()

    def logprobs(self, batch: Batch) -> NDArray[np.float32]:
        return batch.behaviour

    def train_step(self, minibatches: Sequence[Batch]) -> Mapping[str, float]:
        self.trained.append([int(b.token_ids[start]) for b in minibatches for start in b.boundaries[:-1]])
        return {}

    def weights(self) -> Iterator[tuple[str, Any]]:
        yield from ()

    def snapshot(self) -> Callable[[Path], None]:
        raise AssertionError("commit is the test's own")

    def load(self, directory: str) -> None:
        raise AssertionError("so is loading")


class Rows(Dataset):
    name, fingerprint = "rows", "f"

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return {"prompt": f"row {row}", "answer": row}


def stream(rows: int, consumed: Any = None) -> PromptStream:
    return PromptStream(Rows(rows), PROMPTS, seed=3, consumed=consumed)


def worker(ring: MemoryRing, rows: int) -> Callable[[], None]:
    """A rollout worker: reserves in the stream's order, and answers at once, until no ticket is left."""
    writer, prompts = ring.writer(0), stream(rows, ring.done)
    waiting: list[int] = []

    def work() -> None:
        waiting.extend(writer.reissues())
        while True:
            position = waiting.pop(0) if waiting else prompts.next().position
            ticket = writer.try_reserve(position)
            if ticket is None:
                waiting.insert(0, position)
                return
            writer.seal(ticket, group(position, ticket.version.step))

    return work


def check_order(run: Run) -> None:
    """Each step has the positions that it has without interruption, and they mean the rows that they meant."""
    assert [sorted(step) for step in run.trained] == [
        list(range(step * run.batch, (step + 1) * run.batch)) for step in range(run.total)
    ]
    whole = stream(run.rows)
    uninterrupted = [whole.next().id for _ in range(run.total * run.batch)]
    assert [stream(run.rows).at(p).id for step in run.trained for p in sorted(step)] == uninterrupted


interruptions = st.lists(st.tuples(st.sampled_from(["stop", "kill"]), st.integers(0, 12)), max_size=5)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 9),
    batch=st.integers(1, 4),
    minibatches=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
    every=st.integers(1, 5),
    ends=interruptions,
)
def test_C26_C27_C29_the_order_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    rows: int, batch: int, minibatches: int, max_staleness: int, every: int, ends: list[tuple[str, int]]
) -> None:
    run = Run(rows, batch, max_staleness, min(minibatches, batch), every, total=12)
    for kind, step in ends:
        run.attempt(**{f"{kind}_at": step})
    assert run.attempt()
    check_order(run)


@pytest.mark.parametrize("kind", ["stop", "kill"])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_C2_a_checkpoint_at_around_or_after_an_epoch_s_end_goes_on_with_the_next_prompt(
    kind: str, offset: int, epochs: int, batch: int
) -> None:
    """With 8 prompts: steps k n - 1, k n and k n + 1, where a data epoch is n steps; and again at the very end."""
    steps_of_epoch = 8 // batch
    at = epochs * steps_of_epoch + offset
    run = Run(rows=8, batch=batch, max_staleness=1, minibatches=1, every=1, total=3 * steps_of_epoch)
    assert not run.attempt(**{f"{kind}_at": at})  # type: ignore[arg-type]
    assert (0 if run.saved is None else run.saved[0].step) == (at if kind == "stop" else at - 1)
    assert run.attempt()
    check_order(run)
    assert run.attempt(), "resumed at its end"
    check_order(run)

"""The trainer's loop: claim, prepare, update, publish, release, checkpoint.

Rank 0 alone claims, publishes and commits; every rank reads its own share of the bytes, computes, and takes part in the
collectives. Whoever waits for whom:

    reader.claim     waits for rollout workers to seal groups          (limit: starve_s, message from the ring)
                     or for nobody, where answers come from a data set
    publish          waits for every engine to load the new weights    (limit inside the transport), in deterministic
                     training first for what older weights still sample (limit: starve_s, message from the ring)
    behind, catch_up let an engine in that was replaced or has joined, while the trainer waits for groups: without it
                     none might ever come
    is_crowded       asks for a checkpoint before the wait for groups, so that the ring can delete enough in time
    would_make_room  asks for one during that wait, where workers begin nothing because space is short: once it is
                     durable, the ring may delete what the checkpoint before it covers
    require_room     ends the run where no group can come any more and no checkpoint would change that
    begin            waits for the checkpoint before it, then for a copy to host memory      (limit: checkpoint_s)
    evaluate         waits for nobody: held-out answers, where there are no engines to sample any
    archive          waits for its thread where that is behind         (limit inside the archiver)
    ranks.share      waits for rank 0                                  (limit: the process group's time-out)

A stop request is looked at wherever the loop waits and at every step's edge, and agreed on by all ranks first.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from areal_hpc.algorithms.advantages import AdvantageInputs
from areal_hpc.algorithms.table import find
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.errors import CorruptRecord, WaitTimeout
from areal_hpc.protocols import Fetch, RolloutReader, TrainerBackend
from areal_hpc.training.batching import pack, plan_step
from areal_hpc.training.credit import assess, gather_proximal
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import (
    Batch,
    Drop,
    Float32Array,
    GroupRef,
    TrainedStep,
    TrajectoryGroup,
    WeightVersion,
    episode_means,
)
from areal_hpc.waits import advance, waiting

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

CLAIM_POLL_S = 0.02
CATCH_UP, SAVE, MAKE_ROOM = "catch up", "save", "make room"
"""What may have to be done before groups can come: MAKE_ROOM is a checkpoint that is waited for."""


Weights = Callable[[], "Iterator[tuple[str, torch.Tensor]]"]
"""The backend's weights from the first on; each call is collective over the ranks."""


def no_evaluation(step: int) -> None:
    """The ``evaluate`` of a run whose evaluator is a process of its own, on the engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How far the loop goes, how often it saves, how long it waits, and two numbers that a batch depends on."""

    total_steps: int
    checkpoint_every: int
    starve_s: float
    """Longest wait for a batch, in seconds."""
    max_new_tokens: int
    """The sampling limit, for the penalty on answers close to it."""
    seed: int
    """Of the order in which a step's trajectories meet the optimizer."""


@dataclass(slots=True, kw_only=True)
class Engines:
    """Who samples by the weights. ``publish`` and ``catch_up`` are collective over the ranks; rank 0's have effect."""

    publish: Callable[[int, Weights], Mapping[str, float]]
    behind: Callable[[], bool] = lambda: False
    """Whether an engine was replaced that lacks the newest weights; asked on rank 0."""
    deserted_s: Callable[[], float] = lambda: 0.0
    """For how long in all no engine was there to sample anything: that counts for no limit of ours."""
    catch_up: Callable[[int, Weights], None] = lambda version, weights: None
    """Bring those engines up to date."""


@dataclass(slots=True, kw_only=True)
class Checkpoints:
    """What makes a step durable, and with that room in the ring. ``begin`` is collective over the ranks."""

    begin: Callable[[int], None]
    """Begins the checkpoint of a step; training may go on when it returns."""
    settle: Callable[[bool], None]
    """Lets a checkpoint that has become durable take effect, and raises what its making met; True: waits for it."""
    is_crowded: Callable[[], bool] = lambda: False
    """Whether the ring is so full that a checkpoint should begin before the next step; asked on rank 0."""
    would_make_room: Callable[[], bool] = lambda: False
    """Whether workers wait for room that a checkpoint would make; asked on rank 0, while it waits for groups."""
    require_room: Callable[[], None] = lambda: None
    """Raises where groups will never come for lack of room; asked on rank 0 where no checkpoint can be begun."""


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """One rank's loop. ``journal`` is called on rank 0 with effect, elsewhere in step."""

    epoch: int
    step: int
    """Optimizer steps done: the version of the weights the backend holds."""
    settings: LoopSettings
    algorithm: AlgorithmConfig
    ranks: Ranks
    backend: TrainerBackend
    fetch: Fetch
    reader: RolloutReader | None
    """The ring's trainer end; on rank 0 only."""
    engines: Engines
    checkpoints: Checkpoints
    journal: Callable[[int, Sequence[GroupRef]], None]
    """Takes each step with what it was trained on, before anybody else hears of it."""
    stop_requested: Callable[[], bool]
    workers: Sequence[str] = ()
    """Names of the rollout workers, for whom a batch is waited."""
    record: Callable[[str, Mapping[str, Any]], None]
    archive: Callable[[TrainedStep], None] | None = None
    """Takes what each step is made of; on every rank or, where there is no archive, on none. Rank 0's has effect."""
    gap_watch: Callable[[int, Mapping[str, float]], str | None] = lambda step, stats: None
    """Says what is wrong where trainer and engines do not compute the same."""
    evaluate: Callable[[int], None] = no_evaluation
    """Measures held-out data by the weights of a step, where that is due; collective."""
    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each part of the step took, for its record: wait, prepare, train, publish, paused."""
    published: dict[str, float] = field(default_factory=dict)
    """``weight_bytes`` sent to each engine in the step, and ``weight_bytes_saved`` where less than the model is."""
    committed: int = -1
    """The last step whose checkpoint was begun; -1 before the first."""

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.epoch, self.step)

    def run(self) -> bool:
        """Train until ``total_steps``; False when a stop request ended it. Either way the last step is durable."""
        while self.step < self.settings.total_steps:
            self.checkpoints.settle(False)
            began = self.clock()
            refs = self.claim()
            if refs is None:
                self.save()
                self.checkpoints.settle(True)
                return False
            minibatches, trained = self.prepare(refs)
            stats = self.update(minibatches)
            self.step += 1
            advance("steps trained")
            self.journal(self.step, trained)
            self.announce()
            self.tell(trained, stats, self.clock() - began)
            self.evaluate(self.step)
            if self.step % self.settings.checkpoint_every == 0:
                self.save()
        self.save()
        self.checkpoints.settle(True)
        return True

    def claim(self) -> list[GroupRef] | None:
        """The step's groups, the same on every rank; None when the run is to stop."""
        began = self.clock()
        since = began - self.engines.deserted_s()
        what = f"a batch of {self.algorithm.groups_per_step} groups for step {self.step + 1}"
        while True:
            with waiting(what, *self.workers, limit_s=self.settings.starve_s):
                refs, first = self._wait_for_groups(since) if self.reader is not None else (None, None)
            shared, first = self.ranks.share([None if refs is None else [ref.record() for ref in refs], first])
            if first is None:
                break
            if first == CATCH_UP:
                self.engines.catch_up(self.step, self.backend.weights)
            else:
                saving = self.clock()
                self.save()
                if first == MAKE_ROOM:
                    self.checkpoints.settle(True)
                since += self.clock() - saving  # for which no worker is to blame
        stop = self.ranks.any(self.stop_requested())
        self.seconds["wait"] = self.clock() - began
        return None if shared is None or stop else [GroupRef.from_record(record) for record in shared]

    def _wait_for_groups(self, since: float) -> tuple[list[GroupRef] | None, str | None]:
        """The groups, or None and what all ranks must do first; None for both where a stop is due.

        Args:
            since: when the wait began, less the time that the run had been deserted by then, plus that of checkpoints
                made meanwhile.
        """
        assert self.reader is not None
        while not self.stop_requested():
            if self.committed != self.step and self.checkpoints.is_crowded():
                return None, SAVE
            if (refs := self.reader.claim(self.algorithm.groups_per_step, self.version)) is not None:
                return refs, None
            deadline = since + self.engines.deserted_s() + self.settings.starve_s
            self._pause(deadline, f"step {self.step + 1} waited {self.settings.starve_s:g} s for a batch")
            if self.engines.behind():
                return None, CATCH_UP
            if self.committed == self.step:
                self.checkpoints.require_room()
            elif self.checkpoints.would_make_room():
                return None, MAKE_ROOM
        return None, None

    def _pause(self, deadline: float, waited: str) -> None:
        """A moment's sleep in a wait for the ring; WaitTimeout once ``deadline`` has passed."""
        assert self.reader is not None
        self.checkpoints.settle(False)  # what it frees on the disk may be what the workers wait for
        if self.clock() > deadline:
            raise WaitTimeout(f"{waited}: {self.reader.waiting_for()}; raise limits.starve_s if that is normal")
        time.sleep(CLAIM_POLL_S)

    def prepare(self, refs: Sequence[GroupRef]) -> tuple[list[Batch], list[GroupRef]]:
        """This rank's minibatches with all that the loss needs of them, and the groups that all ranks can read.

        Trajectories are numbered 0 to N - 1 in the order of ``refs``: plan, advantages and archive go by these numbers.
        """
        began = self.clock()
        dealt = self.backend.data_ranks  # those among which trajectories are dealt
        owners = [(group, index) for group, ref in enumerate(refs) for index in range(len(ref.rewards))]
        inputs = AdvantageInputs.of(refs, self.settings.max_new_tokens)
        outcomes = find(self.algorithm.name).outcomes(inputs, self.algorithm)
        plan = self._plan(refs)
        needed = {owners[i][0] for minibatch in plan for i in minibatch[dealt.rank]}
        groups, damaged = self._fetch(refs, sorted(needed))
        trajectories = {i: groups[g].trajectories[n] for i, (g, n) in enumerate(owners) if g in groups}
        readable = [[[i for i in share if not damaged[owners[i][0]]] for share in minibatch] for minibatch in plan]
        mine = [minibatch[dealt.rank] for minibatch in readable]
        minibatches = [pack([trajectories[i] for i in share], outcomes[share]) for share in mine]
        minibatches = assess(minibatches, [outcomes[share] for share in mine], self.backend, self.algorithm, dealt)
        if self.archive is not None:
            lengths = [length for ref in refs for length in ref.lengths]
            proximal = gather_proximal(readable, lengths, minibatches, dealt)
            self.archive(self._made_of(refs, damaged, outcomes, proximal))
        self.seconds["prepare"] = self.clock() - began
        return minibatches, [ref for ref, bad in zip(refs, damaged, strict=True) if not bad]

    def _plan(self, refs: Sequence[GroupRef]) -> list[list[list[int]]]:
        """For each minibatch and rank which trajectories are its share."""
        return plan_step(
            lengths=[length for ref in refs for length in ref.lengths],
            generated=[count for ref in refs for count in ref.generated],
            num_minibatches=self.algorithm.minibatches,
            num_ranks=self.backend.data_ranks.size,
            seed=self.settings.seed + self.step,
            together=find(self.algorithm.name).data.together,
        )

    def _made_of(
        self,
        refs: Sequence[GroupRef],
        damaged: NDArray[np.bool_],
        outcomes: NDArray[np.float64],
        proximal: Mapping[int, Float32Array],
    ) -> TrainedStep:
        return TrainedStep(
            version=WeightVersion(self.epoch, self.step + 1),
            refs=tuple(refs),
            readable=tuple(not bad for bad in damaged.tolist()),
            advantages=outcomes.astype(np.float32),
            proximal=proximal,
        )

    def _fetch(
        self, refs: Sequence[GroupRef], needed: Sequence[int]
    ) -> tuple[dict[int, TrajectoryGroup], NDArray[np.bool_]]:
        """The needed groups that are readable, and which of all [N] are damaged: left out everywhere, issued again."""
        groups: dict[int, TrajectoryGroup] = {}
        damaged = np.zeros(len(refs), dtype=np.bool_)
        for index, fetched in zip(needed, self.fetch([refs[index] for index in needed]), strict=True):
            if isinstance(fetched, CorruptRecord):
                log.warning("left out of step %d: %s", self.step + 1, fetched)
                damaged[index] = True
            else:
                groups[index] = fetched
        damaged = self.ranks.any_each(damaged)
        for index in np.flatnonzero(damaged).tolist():
            groups.pop(index, None)
            if self.reader is not None:
                self.reader.discard(refs[index], Drop.CORRUPT)
        return groups, damaged

    def update(self, minibatches: Sequence[Batch]) -> Mapping[str, float]:
        began = self.clock()
        stats = self.backend.train_step(minibatches)
        self.seconds["train"] = self.clock() - began
        return stats

    def announce(self) -> None:
        """New weights to every engine, then the slots of the step back to the workers."""
        self._let_older_weights_finish()
        began = self.clock()
        moved = self.engines.publish(self.step, self.backend.weights)
        if self.reader is not None:
            self.reader.release(self.version)
        self.seconds["publish"] = self.clock() - began
        self.seconds["paused"] = moved.get("seconds_paused", 0.0)
        self.published = {f"weight_{name}": moved[name] for name in ("bytes", "bytes_saved") if name in moved}

    def _let_older_weights_finish(self) -> None:
        """Wait until the ring allows new weights; at once, but for deterministic training.

        A stop request does not end this wait: the step is done and could not be committed. Its limit is that of a stop.
        """
        began = self.clock()
        if self.reader is not None:
            limit_s = self.settings.starve_s
            while not self.reader.may_publish(self.version):
                self._pause(began + limit_s, f"version {self.step} waited {limit_s:g} s for what older ones sample")
                self.checkpoints.require_room()
        self.ranks.barrier()  # so that the others' next collective need not outlast this wait as well
        self.seconds["wait"] = self.seconds.get("wait", 0.0) + self.clock() - began

    def save(self) -> None:
        """Begin one atomic commit of all state, unless this step already has one."""
        if self.committed != self.step:
            self.checkpoints.begin(self.step)
            self.committed = self.step

    def tell(self, refs: Sequence[GroupRef], stats: Mapping[str, float], seconds: float) -> None:
        """The step's record, on rank 0; ``refs`` are the groups that were trained on, perhaps none."""
        if self.reader is None:
            return
        ring = self.reader.stats()
        trained = sum(sum(ref.lengths) for ref in refs)
        busy = self.seconds["train"] + 1e-9
        if problem := self.gap_watch(self.step, stats):
            log.warning("%s", problem)
            self.record("alarm", {"step": self.step, "problem": problem})
        self.record(
            "step",
            {
                "step": self.step,
                "version": self.step,
                "tokens_trained": trained,
                **({"offline": True} if find(self.algorithm.name).data.is_offline else _told_of_rollouts(refs)),
                "train_tokens_per_s": trained / busy,
                "seconds_step": seconds,
                **{f"seconds_{name}": value for name, value in self.seconds.items()},
                **self.published,
                **{f"ring_{name}": value for name, value in ring.items()},
                **stats,
            },
        )


def _told_of_rollouts(refs: Sequence[GroupRef]) -> dict[str, float]:
    """What a step's record says of episodes."""
    rewards = np.array([mean for ref in refs for mean in episode_means(ref.rewards, ref.episodes)])
    return {
        "reward_mean": rewards.mean() if rewards.size else math.nan,
        "reward_std": rewards.std() if rewards.size else math.nan,
        "tokens_generated": sum(sum(ref.generated) for ref in refs),
    }

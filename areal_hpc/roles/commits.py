"""Checkpoints of one trainer rank: begun at a step's edge, written while training goes on, noted at a later edge.

    begin(step)          the one before is durable -> every rank copies its state to host memory -> a thread writes it
    settle()             at every edge and in every wait: what is durable is told to the ring, a failure is raised
    settle(wait=True)    before the next ``begin``, and at the end; waits at most limits.checkpoint_s

One atomic commit holds all state of the run. What is in it, and what is not and why:

    model, both Adam moments, in float32        model.safetensors, optimizer.safetensors, by rank 0: data-parallel ranks
                                                hold the same bits, so any number of ranks may load them; of a model
                                                that is split, shards/, of which each rank writes its share
    optimizer step, number of updates           trainer.json. The learning rate is a function of the step and has no
                                                state; masters are float32, so there is no gradient scaler
    random streams of every rank                streams-RANK.json: Python, numpy, torch and the device's own
    weight version                              MANIFEST.json: (attempt, step), with code, library versions and layout
    consumed prompts, finished tickets, drops   state.json, ``ring``
    what a prompt position means                state.json, ``prompts``. The stream is arithmetic on positions and never
                                                ends, so it has no cursor and no end to remember. Prompts in flight are
                                                those not consumed: they are issued again, or found sealed in the ring
    fingerprint of the weights on the engines   state.json, ``weights``: what is loaded must be what was served; null
                                                where no engine proves what it gets. ``merged``: whether adapters were
                                                part of it
    configuration                               config.yaml, its digest in state.json
    evaluations asked for and not finished      state.json, ``evaluations``; a result is a file with (attempt, step)
    which run of a tracker this is              state.json, ``trackers``: the id at Weights & Biases
    other telemetry                             nothing: each record carries (attempt, step), so readers leave out what
                                                was taken back. TensorBoard purges from an attempt's first step on
    KL coefficient, where it adapts             trainer.json
    critic and its moments                      critic.safetensors, critic_optimizer.safetensors, or critic_shards/
    baseline of an agent in daily use           nothing: it follows from the rewards in the records of the run so far
    curriculum, moving averages of weights      nothing: no algorithm here has such state
    endpoints, keys, caches, process groups     nothing: every attempt makes its own
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import check_fence, load_lineage
from areal_hpc.buffer.reader import RingReader
from areal_hpc.config.derived import takes_whole
from areal_hpc.config.describe import dump
from areal_hpc.errors import ConfigError
from areal_hpc.fs import publish
from areal_hpc.mount import MIB, has_room, low_space
from areal_hpc.protocols import TrainerBackend
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.carried import carried_at
from areal_hpc.roles.wiring.evaluations import results
from areal_hpc.roles.wiring.training import TrainerSide, first_checkpoint_bytes
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import WeightVersion
from areal_hpc.waits import waiting

log = logging.getLogger(__name__)

CONFIG = "config.yaml"
SPARE = 16 << 20
"""Bytes that a checkpoint leaves for the journal, records and logs."""
SPACE_LOOK_S = 5.0
"""How often free space is looked at, at most."""


def config_digest(process: RoleProcess) -> str:
    """SHA-256 of the resolved configuration."""
    return hashlib.sha256(dump(process.config).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """A checkpoint that survives a power cut."""

    step: int
    ring: Mapping[str, Any]
    """The ring's state in it."""
    seconds: float
    """From the step's end until it was durable."""
    seconds_stalled: float
    """For how much of that training had to wait."""


class Commits:
    """One rank's.

    Args:
        side: what rank 0 has; the other ranks only write their part.
        newest: the checkpoint that rank 0 goes on from, with its state of the ring.
    """

    def __init__(
        self,
        *,
        process: RoleProcess,
        ranks: Ranks,
        backend: TrainerBackend,
        side: TrainerSide | None,
        newest: checkpoint.Checkpoint | None = None,
    ) -> None:
        self._process, self._ranks, self._backend, self._side = process, ranks, backend, side
        self._background = checkpoint.Background[Durable | None]()
        self._verified: list[Path] = []
        self._newest = None if newest is None else newest.path
        self._begun: Mapping[str, Any] | None = None if newest is None else newest.state["ring"]
        self._next_look_s = 0.0  # on the monotonic clock

    def begin(self, step: int, weights: int | None) -> None:
        """Start the checkpoint of ``step``; returns once this rank's state is in host memory. Collective.

        Args:
            weights: fingerprint of the weights that the engines have, None if no engine has them; counts on rank 0.

        Raises:
            What ``settle`` raises, of the one before.
        """
        began = time.monotonic()
        self.settle(wait=True)
        version, run = WeightVersion(self._process.epoch, step), self._process.run
        write = self._backend.snapshot()
        directory = Path(self._ranks.share(str(checkpoint.begin(run, version)) if self._ranks.leads else None))
        if self._side is None:
            self._start(step, lambda: checkpoint.add_part(directory, self._ranks.rank, write))
        else:
            state = {
                "ring": (begun := self._side.reader.state_dict()),
                "prompts": dict(self._side.identity),
                "weights": weights,
                "merged": takes_whole(self._process.config),
                "config": config_digest(self._process),
            }
            self._begun = begun
            archived = self._seal_archive()
            stalled = time.monotonic() - began
            self._start(
                step, lambda: self._make(version, state, directory, write, archived, began=began, stalled=stalled)
            )
        if not self._process.config.checkpoint.asynchronous:
            self.settle(wait=True)

    def _start(self, step: int, make: Callable[[], Durable | None]) -> None:
        def make_named() -> Durable | None:
            with waiting(f"writing {_named(step)}", limit_s=self._process.config.limits.checkpoint_s):
                return make()

        self._background.start(_named(step), make_named)

    def _seal_archive(self) -> Callable[[], None]:
        """A function that returns once all that was trained on by now is in the archive, if there is one."""
        assert self._side is not None
        return (lambda: None) if self._side.archiver is None else self._side.archiver.seal()

    def _make(
        self,
        version: WeightVersion,
        trained: Mapping[str, Any],
        directory: Path,
        write: Callable[[Path], None],
        archived: Callable[[], None],
        *,
        began: float,
        stalled: float,
    ) -> Durable:
        """Rank 0's thread: write its own part, wait for the other ranks', commit, and delete what is no longer kept."""
        process, run = self._process, self._process.run
        state = {**trained, **carried_at(version.step, run, process.epoch, process.config)}

        def save(place: Path) -> None:
            write(place)
            publish(place / CONFIG, dump(process.config).encode())
            checkpoint.await_parts(place, range(1, self._ranks.size), process.config.limits.checkpoint_s)
            self._backend.complete(str(place))
            archived()

        self._newest = checkpoint.write(
            run,
            version,
            save,
            state,
            directory=directory,
            layout={"ranks": self._ranks.size},
            still_leader=lambda: check_fence(run, process.epoch),
        )
        check_fence(run, process.epoch)  # what a successor goes on from is not ours to delete
        self._verified = checkpoint.prune(run, load_lineage(run, process.epoch + 1), self._keep(), self._verified)
        seconds = time.monotonic() - began
        return Durable(
            step=version.step,
            ring=state["ring"],
            seconds=seconds,
            seconds_stalled=stalled if process.config.checkpoint.asynchronous else seconds,
        )

    def is_crowded(self) -> bool:
        """Whether a checkpoint should begin before the next step: the ring's quota asks for one; or space is short and
        there was none yet, and it takes two until the ring may delete anything."""
        ring = self._ring
        if ring is not None and ring.is_crowded(self._begun):
            held_mb = ring.stats()["bytes"] / MIB
            log.info("a checkpoint now, so that the ring, at %.3g MiB, stays within buffer.max_mb", held_mb)
            return True
        return ring is not None and self._begun is None and self._finds_room_where_space_is_short()

    def would_make_room(self) -> bool:
        """Whether workers begin nothing since space is short, on the disk or in the ring's quota, and a checkpoint
        finds room itself: after it the ring may delete what the one before it covers."""
        if self._ring is not None and (shortage := self._ring.shortage()):
            log.warning("a checkpoint now, so that the ring can let go of more: %s", shortage.text)
            return True
        return self._newest is not None and self._finds_room_where_space_is_short()

    def _finds_room_where_space_is_short(self) -> bool:
        if (now := time.monotonic()) < self._next_look_s:
            return False
        self._next_look_s = now + SPACE_LOOK_S
        run = self._process.run
        problem = low_space(run.ring, self._process.config.buffer.min_free_mb)
        if problem is None:
            return False
        if not has_room(run.checkpoints, self._expected_bytes() + SPARE):
            return False
        log.warning("a checkpoint now, so that the ring can let go of more: %s", problem)
        return True

    def _expected_bytes(self) -> int:
        """Size of the next checkpoint: that of the last one, or the most that a first one may have."""
        return (
            first_checkpoint_bytes(self._process.config) if self._newest is None else checkpoint.size_of(self._newest)
        )

    def require_room(self) -> None:
        """Check that the ring still has room for new groups, or will have some after the checkpoint under way.

        Raises:
            ConfigError: no group can come any more, since the ring has no room, and no checkpoint is under way.
        """
        if self._ring is not None and not self._background.is_busy and (shortage := self._ring.shortage()):
            advice = f"set it to {shortage.least_mb:g} at least, and go on with --resume"
            raise ConfigError(f"buffer.max_mb: quota too small: {shortage.text}; {advice}")

    @property
    def _ring(self) -> RingReader | None:
        return None if self._side is None else self._side.ring

    def _keep(self) -> checkpoint.Keep:
        rules, process = self._process.config.checkpoint, self._process
        found = results(process.run, process.epoch) if rules.keep_best else {}
        numbers = {
            step: {name: float(value) for name, value in result.items() if isinstance(value, int | float)}
            for step, result in found.items()
        }
        scores = {step: one[rules.keep_best] for step, one in numbers.items() if rules.keep_best in one}
        if found and not scores:
            there_are = ", ".join(sorted(numbers[min(found)]))
            log.warning("checkpoint.keep_best: no evaluation has %s; there are %s", rules.keep_best, there_are)
        return checkpoint.Keep(newest=rules.keep, every=rules.keep_every, scores=scores)

    def settle(self, *, wait: bool = False) -> None:
        """Let what is durable take effect: the ring may delete what it covers.

        Raises:
            WaitTimeout: the checkpoint that is waited for did not become durable in time; names it.
            Fenced: a newer attempt owns the run.
            Whatever else its making met, such as OSError from the disk or RoleDied of another rank's part.
        """
        if wait:
            limit_s = self._process.config.limits.checkpoint_s
            with waiting("the checkpoint under way", limit_s=limit_s):
                self._background.wait(limit_s)
        done = self._background.take()
        if done is not None and self._side is not None:
            self._side.reader.covered(done.ring)
            values = {"step": done.step, "seconds": done.seconds, "seconds_stalled": done.seconds_stalled}
            self._process.recorder.record("checkpoint", values)

    def close(self) -> None:
        """After an error elsewhere: let a checkpoint that is being written become durable, for as long as a stop may
        take."""
        try:
            self._background.wait(self._process.config.limits.stop_s)
            self._background.take()
        except Exception as error:
            log.warning("%s", error)


def _named(step: int) -> str:
    return f"the checkpoint of step {step}"

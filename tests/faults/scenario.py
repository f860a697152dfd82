"""A run without models, processes or clocks: ring, checkpoints and evaluations of the product, driven by one thread.

    trial = Trial(root)
    trial.attempt(until=5)      claim an epoch, resume, write, roll, seal, train, release, checkpoint, reclaim, prune
    trial.attempt()             the next attempt resumes, and goes on to the end of the prompts

The "model" is the list of positions it was trained on, kept in its checkpoints as real weights are. What the run has
promised (a group whose commit returned, a checkpoint or an evaluation that was reported) is kept in ``Promises``,
outside of the volume; whatever breaks a promise, trains a position twice or never, trains on other tokens than were
sealed, or evaluates weights twice or never is a Violation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from areal_hpc import checkpoint
from areal_hpc.buffer.chain import ChainWriter
from areal_hpc.buffer.epochs import check_fence, claim_epoch, lineage, load_lineage, read_start, sweep
from areal_hpc.buffer.reader import RingReader
from areal_hpc.buffer.writer import RingWriter
from areal_hpc.config.schema import BufferConfig, EvaluationConfig
from areal_hpc.errors import CorruptRecord
from areal_hpc.fs import publish_json, read_json
from areal_hpc.patience import PASSING, naming
from areal_hpc.roles.wiring.carried import agenda_of, carried_at, carried_on
from areal_hpc.roles.wiring.evaluations import results
from areal_hpc.run_dir import RunDir
from areal_hpc.types import Drop, GroupRef, StopReason, Ticket, Trajectory, TrajectoryGroup, WeightVersion
from areal_hpc.watermark import Watermark

NUM_SLOTS = 2
GROUPS = 2
MAX_STALENESS = 1
CAPACITY = (MAX_STALENESS + 1) * GROUPS
POSITIONS = 18
CHECKPOINT_STEPS = 2
KEEP = 2
EVALUATE_STEPS = 4
NEVER_S = 1e6
CONFIG = BufferConfig(max_staleness=MAX_STALENESS, segment_mb=1800 / (1 << 20), commit_s=NEVER_S)
"""Segments of a commit or two, so that they roll and are reclaimed all the time."""
NO_PAUSES = (0.0, 0.0, 0.0)
BATCH_BYTES = 600
"""So few that most commits are two batches, the COMMIT of the first written with the second."""
IDLE_ROUNDS = 60
"""Rounds in which nothing is trained until a run counts as stuck."""


class Violation(AssertionError):
    """Something happened that must never happen."""


def is_filtered(position: int) -> bool:
    """Whether the group of ``position`` is dropped by its worker."""
    return position % 7 == 3


TRAINABLE = [position for position in range(POSITIONS) if not is_filtered(position)]
TOTAL_STEPS = -(-len(TRAINABLE) // GROUPS)
SETTINGS: Any = SimpleNamespace(
    evaluation=EvaluationConfig(every_steps=EVALUATE_STEPS), trainer=SimpleNamespace(total_steps=TOTAL_STEPS)
)
EVALUATED = {*range(0, TOTAL_STEPS, EVALUATE_STEPS), TOTAL_STEPS}
"""Steps whose weights are to be evaluated, once each: here the evaluator keeps up with the trainer."""


@dataclass(slots=True)
class Promises:
    """What the outside world was told is safe, in order."""

    sealed: list[tuple[int, WeightVersion]] = field(default_factory=list)
    """Position and newest weights of every group whose commit returned."""
    saved: list[WeightVersion] = field(default_factory=list)
    """Checkpoints whose write returned."""
    evaluated: list[WeightVersion] = field(default_factory=list)
    """Weights whose evaluation has a result that was published."""


def borne(call: Callable[[], None]) -> bool:
    """Whether ``call`` went well; errors that the thread of GroupCommit waits out are waited out."""
    try:
        call()
    except OSError as error:
        if error.errno not in PASSING:
            raise
        return False
    return True


class InlineCommit:
    """GroupCommit without its thread: what that would do soon is done at once, so that a run repeats itself."""

    failing = False

    def __init__(self, chain: ChainWriter, commit_s: float, patience_s: float) -> None:
        self._chain, self._reclaimed = chain, 0

    def check(self) -> None:
        pass

    def reclaim(self, finished: int) -> None:
        if finished > self._reclaimed and borne(lambda: self._chain.reclaim(finished)):
            self._reclaimed = finished

    def stop(self) -> None:
        pass


@contextmanager
def without_threads() -> Iterator[None]:
    with (
        patch("areal_hpc.buffer.writer.GroupCommit", InlineCommit),
        patch("areal_hpc.buffer.chain.COMMIT_BYTES", BATCH_BYTES),
        patch("areal_hpc.patience.RETRY_PAUSES_S", NO_PAUSES),
        patch("areal_hpc.buffer.scan.RETRY_PAUSES_S", NO_PAUSES),
        patch("areal_hpc.buffer.control.RETRY_PAUSES_S", NO_PAUSES),
        patch("importlib.metadata.version", cache(metadata.version)),  # reads files of the real disk, slowly
    ):
        yield


def group_of(position: int, versions: tuple[int, int]) -> TrajectoryGroup:
    """What the engines would answer: tokens that tell their position, a fifth of them longer than several sectors."""
    length = 20 + 13 * (position * 37 % 11) + (150 if position % 5 == 0 else 0)
    one = Trajectory(
        token_ids=np.arange(position * 1000, position * 1000 + length, dtype=np.int32),
        loss_mask=np.ones(length, np.bool_),
        logprobs=np.full(length, -0.5, np.float32),
        versions=np.array([versions[0]] * (length - 1) + [versions[1]], np.int32),
        reward=float(position),
        stop=StopReason.STOP,
    )
    return TrajectoryGroup(position=position, prompt_id=f"p{position}", trajectories=(one,))


class Worker:
    """A rollout worker: walks its shard, positions to run again first, with up to two prompts in flight."""

    def __init__(self, writer: RingWriter, slot: int, promises: Promises) -> None:
        self.writer, self.slot, self._position, self._promises = writer, slot, slot, promises
        self._again: list[int] = []
        self._open: list[Ticket] = []
        self._handed_over: list[tuple[int, WeightVersion]] = []

    def move(self, rng: Random) -> None:
        self._reserve()
        if self._open and (len(self._open) > 1 or rng.random() < 0.6):
            self._finish(self._open.pop(0))
        if rng.random() < 0.8:
            self.flush()

    def flush(self) -> None:
        if borne(self.writer.flush):
            self._promises.sealed += self._handed_over
            self._handed_over = []

    def _reserve(self) -> None:
        issued = self.writer.issued()
        if issued is None:
            return
        self._again += self.writer.reissues()
        while self._position in issued:
            self._position += NUM_SLOTS
        position = self._again[0] if self._again else self._position
        if position >= POSITIONS or (ticket := self.writer.try_reserve(position)) is None:
            return
        self._open.append(ticket)
        if self._again:
            self._again.pop(0)
        else:
            self._position += NUM_SLOTS

    def _finish(self, ticket: Ticket) -> None:
        if is_filtered(ticket.position):
            self.writer.drop(ticket, Drop.FILTERED)
            return
        newest = self.writer.version
        self.writer.seal(ticket, group_of(ticket.position, (ticket.version.step, newest.step)))
        self._handed_over.append((ticket.position, newest))


class Trainer:
    """Rank 0 of a trainer, in the order of the real one: claim, train, release, checkpoint, covered, prune."""

    def __init__(self, run: RunDir, promises: Promises) -> None:
        self.run, self._promises = run, promises
        self.epoch = claim_epoch(run, {})
        sweep(run, self.epoch)
        checkpoint.sweep(run, self.epoch)
        found = checkpoint.newest(run, load_lineage(run, self.epoch))
        parent = None if found is None else found.version
        self._check_saved(parent)
        self.model: list[int] = [] if found is None else read_json(found.path / "model.json")
        self.reader = RingReader(
            run,
            self.epoch,
            num_slots=NUM_SLOTS,
            config=CONFIG,
            capacity=CAPACITY,
            state=None if found is None else found.state["ring"],
            parent=parent,
            poll_s=0.0,
            discover_s=0.0,
        )
        self.step = 0 if parent is None else parent.step
        carried = carried_on(run, None if found is None else found.state)
        start = self.reader.write_start(self.version, "data", carried)
        self._check_sealed(start.consumed, lineage(run, self.epoch, parent))
        self.reader.release(self.version)

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.epoch, self.step)

    def _check_saved(self, parent: WeightVersion | None) -> None:
        if self._promises.saved and (parent is None or parent < self._promises.saved[-1]):
            raise Violation(f"checkpoint {self._promises.saved[-1]} was reported; {parent} is resumed from")

    def _check_sealed(self, consumed: Watermark, survives: Callable[[WeightVersion], bool]) -> None:
        lost = [p for p, newest in self._promises.sealed if survives(newest) and p not in consumed]
        if lost:
            raise Violation(f"groups of positions {lost} were durable and are lost")

    def consumed(self) -> Watermark:
        return Watermark.from_state(self.reader.state_dict()["consumed"])

    def move(self) -> bool:
        """One step, if a batch is there."""
        left = POSITIONS - len(self.consumed())
        refs = self.reader.claim(min(GROUPS, left), self.version) if left else None
        if refs is None:
            return False
        for ref in refs:
            self._train_on(ref)
        self.step += 1
        self.reader.release(self.version)
        if self.step % CHECKPOINT_STEPS == 0:
            self.save()
        return True

    def _train_on(self, ref: GroupRef) -> None:
        if not 0 <= self.step - ref.version.step <= MAX_STALENESS:
            raise Violation(f"position {ref.position} of step {ref.version.step} is trained at step {self.step}")
        try:
            group = self.reader.read(ref)
        except CorruptRecord as error:
            raise Violation(f"a committed group cannot be read: {error}") from error
        tokens = group_of(ref.position, (0, 0)).trajectories[0].token_ids
        if not np.array_equal(group.trajectories[0].token_ids, tokens):
            raise Violation(f"position {ref.position} has the tokens of another")
        if ref.position in self.model:
            raise Violation(f"position {ref.position} is trained twice")
        self.model.append(ref.position)

    def save(self) -> None:
        if self.version in self._promises.saved:
            return
        state = {"ring": self.reader.state_dict(), **carried_at(self.step, self.run, self.epoch, SETTINGS)}
        checkpoint.write(
            self.run, self.version, self.write_model, state, still_leader=lambda: check_fence(self.run, self.epoch)
        )
        self._promises.saved.append(self.version)
        self.reader.covered(state["ring"])
        checkpoint.prune(self.run, load_lineage(self.run, self.epoch + 1), checkpoint.Keep(newest=KEEP))

    def write_model(self, directory: Path) -> None:
        path = directory / "model.json"
        with naming(path):
            path.write_text(str(self.model), encoding="ascii")


class Evaluator:
    """Publishes the result of whatever is due, by what its attempt began with."""

    def __init__(self, run: RunDir, epoch: int, promises: Promises) -> None:
        self._run, self._epoch, self._promises = run, epoch, promises
        self._agenda, self._done = agenda_of(run, epoch), set(results(run, epoch))
        if lost := {version.step for version in self._promised()} - self._done:
            raise Violation(f"the evaluations of steps {sorted(lost)} had a result and are lost")

    def _promised(self) -> list[WeightVersion]:
        start = read_start(self._run, self._epoch, known=True)
        assert start is not None
        return [one for one in self._promises.evaluated if lineage(self._run, self._epoch, start.parent)(one)]

    def move(self, step: int) -> None:
        for due in self._agenda.at(step, SETTINGS.evaluation, TOTAL_STEPS, self._done).owed:
            if any(version.step == due for version in self._promised()):
                raise Violation(f"the weights of step {due} are evaluated twice")
            publish_json(self._run.evaluation(due), {"epoch": self._epoch, "step": due})
            self._done.add(due)
            self._promises.evaluated.append(WeightVersion(self._epoch, due))


class Trial:
    """One run, attempt after attempt."""

    def __init__(
        self,
        root: Path,
        promises: Promises | None = None,
        seed: int = 0,
        acting: Callable[[str], None] = lambda _: None,
        tidy: bool = True,
    ) -> None:
        self.root = root / "run"
        self._acting = acting  # told who uses the volume from now on: every process is a client of its own
        self._tidy = tidy  # nothing may be left behind at the end
        self.promises = promises or Promises()
        self._rng = Random(seed)

    def attempt(self, until: int | None = None, replace_at: int | None = None) -> None:
        """Go on to step ``until`` and vanish; to the end of the prompts by default, and end in order.

        Args:
            replace_at: step at which writer 0 is killed and another takes its place.

        Raises:
            Violation: see the module.
        """
        trainer, workers = self.begin()
        evaluator = self.evaluator(trainer)
        idle = 0
        while len(trainer.consumed()) < POSITIONS and (until is None or trainer.step < until):
            if trainer.step == replace_at:
                workers[0], replace_at = self.worker(trainer, 0), None
            for worker in workers:
                self._acting(f"writer {worker.slot}")
                worker.move(self._rng)
            self._acting("trainer")
            idle = 0 if trainer.move() else idle + 1
            self._acting("evaluator")
            evaluator.move(trainer.step)
            if idle > IDLE_ROUNDS:
                raise Violation(f"stuck at step {trainer.step}: {trainer.reader.waiting_for()}")
        if until is None:
            self._end(trainer, workers)

    def begin(self) -> tuple[Trainer, list[Worker]]:
        self._acting("trainer")
        self.trainer = trainer = Trainer(RunDir.create(self.root), self.promises)
        return trainer, [self.worker(trainer, slot) for slot in range(NUM_SLOTS)]

    def evaluator(self, trainer: Trainer) -> Evaluator:
        self._acting("evaluator")
        made = Evaluator(trainer.run, trainer.epoch, self.promises)
        made.move(trainer.step)
        return made

    def worker(self, trainer: Trainer, slot: int) -> Worker:
        self._acting(f"writer {slot}")
        writer = RingWriter(
            trainer.run,
            trainer.epoch,
            slot=slot,
            num_slots=NUM_SLOTS,
            config=CONFIG,
            capacity=CAPACITY,
            poll_s=0.0,
            fence_s=0.0,
        )
        return Worker(writer, slot, self.promises)

    def _end(self, trainer: Trainer, workers: list[Worker]) -> None:
        trainer.save()
        for worker in workers:
            self._acting(f"writer {worker.slot}")
            worker.writer.close()
        self._acting("trainer")
        found = checkpoint.newest(trainer.run, load_lineage(trainer.run, trainer.epoch + 1))
        assert found is not None
        model = read_json(found.path / "model.json")
        if sorted(model) != TRAINABLE:
            raise Violation(f"trained on {sorted(model)}, not once on each of {TRAINABLE}")
        self._acting("evaluator")  # the trainer may not see the last result yet
        if missing := EVALUATED - results(trainer.run, trainer.epoch).keys():
            raise Violation(f"steps {sorted(missing)} were to be evaluated, and are not")
        self._acting("trainer")
        if self._tidy:
            self._check_litter(trainer.epoch)

    def _check_litter(self, epoch: int) -> None:
        left = [path for path in self.root.rglob("*") if path.suffix in (".tmp", ".trash")]
        if litter := [path for path in left if not path.name.startswith(f".e{epoch:08d}")]:
            raise Violation(f"left behind: {litter}")  # another claim of this epoch may still be under way

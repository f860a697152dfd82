"""The trainer: one rank of the training loop.

Rank 0 also owns the ring's reading end, the weight transport and the commits. In the order of a start: the ranks find
each other, rank 0 finds the checkpoint that the attempt goes on from and reads the ring, every rank loads it, the
engines get the weights (which proves the transport before a single token is generated), and only then may workers
reserve.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import load_lineage, read_start
from areal_hpc.buffer.scan import one_by_one
from areal_hpc.config.derived import queue_s, takes_whole
from areal_hpc.config.recipes import is_offline
from areal_hpc.config.schema import Config
from areal_hpc.errors import CheckpointError
from areal_hpc.exits import EXIT_DONE, EXIT_STOPPED
from areal_hpc.fs import read_if_listed, wait_for
from areal_hpc.protocols import Fetch, TrainerBackend
from areal_hpc.roles.commits import Commits, config_digest
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.carried import agenda_of, carried_on
from areal_hpc.roles.wiring.fleet import RunCoroutine
from areal_hpc.roles.wiring.offline import HeldOut, answers_at, keep_weights, make_offline_side
from areal_hpc.roles.wiring.replay import last_step, make_replay_side, replay_origin
from areal_hpc.roles.wiring.training import (
    TrainerSide,
    join_ranks,
    make_backend,
    make_fetch,
    make_trainer_side,
)
from areal_hpc.run_dir import RunDir
from areal_hpc.training.gap import GapWatch, suspects
from areal_hpc.training.loop import Checkpoints, Engines, LoopSettings, TrainingLoop, Weights, no_evaluation
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import GroupRef, TrainedStep, WeightVersion

log = logging.getLogger(__name__)


def main(process: RoleProcess) -> int:
    ranks = join_ranks(process)
    parent = _choose(process) if ranks.leads else None
    backend = make_backend(process.config, ranks)
    with asyncio.Runner() as loop_runner:
        side = _side_of(process.config)(process, parent, loop_runner.run) if ranks.leads else None
        origin = parent or replay_origin(process.config.replay) if ranks.leads else None
        # Last, so that nothing draws from the random streams that it restores.
        start_step = _load(process, ranks, backend, origin)
        if side is not None:
            carried = carried_on(process.run, None if parent is None else parent.state)
            side.begin(WeightVersion(process.epoch, start_step), carried)
        member = Member(process=process, ranks=ranks, backend=backend, side=side, parent=origin)
        loop = _loop(process, member, start_step)
        process.starting.close()
        try:
            loop.announce()
            member.wait_for_start_evaluation(start_step)
            if start_step == 0:
                loop.evaluate(start_step)
            finished = loop.run()
        finally:
            member.close()
    return EXIT_DONE if finished else EXIT_STOPPED


def _side_of(config: Config) -> Callable[[RoleProcess, checkpoint.Checkpoint | None, RunCoroutine], TrainerSide]:
    """What makes rank 0's side: the ring's reader and the engines, or what stands in their place."""
    if config.replay.run:
        return make_replay_side
    return make_offline_side if is_offline(config.algorithm) else make_trainer_side


def _choose(process: RoleProcess) -> checkpoint.Checkpoint | None:
    """What the attempt goes on from, verified: that reads the whole of it, so rank 0 alone does."""
    run, epoch = process.run, process.epoch
    checkpoint.sweep(run, epoch)
    lineage = load_lineage(run, epoch)
    step = requested_step(run, epoch)
    return checkpoint.newest(run, lineage) if step is None else checkpoint.at_step(run, lineage, step)


def requested_step(run: RunDir, epoch: int) -> int | None:
    """The step that a person asked to go back to, unless an attempt that began since has done so; None: the newest."""
    request = read_if_listed(run.attempt(epoch).resume_from)
    if request is None or any(read_start(run, later) for later in range(request["after"] + 1, epoch)):
        return None
    return int(request["step"])


def _load(process: RoleProcess, ranks: Ranks, backend: TrainerBackend, parent: checkpoint.Checkpoint | None) -> int:
    """Load rank 0's ``parent`` on every rank; the step that it is of, 0 where there is none."""
    path, step = ranks.share((None, 0) if parent is None else (str(parent.path), parent.version.step))
    if path is None:
        log.info("fresh start from %s", process.config.model.path)
        return 0
    backend.load(path)
    log.info("resumed from %s", path)
    if parent is not None and parent.state["config"] != config_digest(process):
        log.info("the configuration is not the one that %s was saved under, see config.yaml there", path)
    return int(step)


def _loop(process: RoleProcess, member: Member, start_step: int) -> TrainingLoop:
    config, offline = process.config, is_offline(process.config.algorithm)
    measured = offline and config.evaluation.every_steps > 0
    return TrainingLoop(
        epoch=process.epoch,
        step=start_step,
        settings=LoopSettings(
            total_steps=last_step(config),
            checkpoint_every=config.checkpoint.every_steps,
            starve_s=config.limits.starve_s,
            max_new_tokens=config.rollout.sampling.max_new_tokens,
            seed=config.seed,
        ),
        algorithm=config.algorithm,
        ranks=member.ranks,
        backend=member.backend,
        fetch=_fetch_of(process, member.side),
        reader=None if member.side is None else member.side.reader,
        engines=Engines(
            publish=keep_weights if offline else member.publish,
            behind=member.behind,
            deserted_s=member.deserted_s,
            catch_up=member.catch_up,
        ),
        checkpoints=Checkpoints(
            begin=member.commit,
            settle=member.settle,
            is_crowded=member.commits.is_crowded,
            would_make_room=member.commits.would_make_room,
            require_room=member.commits.require_room,
        ),
        journal=member.note,
        stop_requested=process.stopping,
        workers=[] if offline else [f"rollout-{index}" for index in range(config.rollout.workers)],
        record=process.recorder.record,
        archive=member.archive if config.archive.every_steps else None,
        gap_watch=GapWatch(config.trainer.gap_alarm, suspects(config)).look,
        evaluate=HeldOut(process, member.ranks, member.backend).measure if measured else no_evaluation,
    )


def _fetch_of(process: RoleProcess, side: TrainerSide | None) -> Fetch:
    """How this rank reads the groups of its share."""
    if not is_offline(process.config.algorithm):
        return make_fetch(process)
    if side is not None:
        return one_by_one(side.reader.read)  # it has just made them
    make = answers_at(process.config)
    return one_by_one(lambda ref: make(ref.position))


class Member:
    """What the loop calls on this rank: rank 0 acts, the others take part in the collectives."""

    def __init__(
        self,
        *,
        process: RoleProcess,
        ranks: Ranks,
        backend: TrainerBackend,
        side: TrainerSide | None,
        parent: checkpoint.Checkpoint | None,
    ) -> None:
        self.process, self.ranks, self.backend, self.side = process, ranks, backend, side
        self.parent = parent
        self.fingerprint: int | None = None  # of what the engines have; None where none has the newest, or proves it
        self.commits = Commits(process=process, ranks=ranks, backend=backend, side=side, newest=parent)
        self.archiver = None if side is None else side.archiver

    def publish(self, version: int, weights: Weights) -> Mapping[str, float]:
        """Bring every engine to ``version``; gathering the weights is collective, so the other ranks walk along."""
        while True:
            told = self._walk(weights) if self.side is None else self.side.fleet.publish(version, weights())
            if self.ranks.share(told is not None):
                break
        if self.side is not None:
            # SGLang on a GPU proves nothing unless it keeps a copy of its weights.
            self.fingerprint = int(told["fingerprint"]) if told and "fingerprint" in told else None
        if self.parent is not None and version == self.parent.version.step:
            self._require_same_weights(self.parent)
        return told or {}

    def behind(self) -> bool:
        return self.side is not None and self.side.fleet.behind()

    def deserted_s(self) -> float:
        return self.side.fleet.deserted_s() if self.side is not None else 0.0

    def catch_up(self, version: int, weights: Weights) -> None:
        """Bring engines that were replaced to ``version``, with the other ranks walking along."""
        if self.side is None:
            self._walk(weights)
        else:
            self.side.fleet.catch_up(version, weights())

    @staticmethod
    def _walk(weights: Weights) -> Mapping[str, float]:
        for _ in weights():
            pass
        return {}

    def _require_same_weights(self, parent: checkpoint.Checkpoint) -> None:
        """Before a token is sampled: what the engines were sent is what they had when the checkpoint was made. Engines
        that take adapters in another form than those did are sent other numbers.

        Raises:
            CheckpointError: it is not, so the checkpoint was loaded wrong or into another model.
        """
        same_form = parent.state.get("merged", False) is takes_whole(self.process.config)
        if same_form and self.fingerprint is not None and parent.state["weights"] not in (None, self.fingerprint):
            raise CheckpointError(
                f"the weights loaded from {parent.path} are not those that the engines had when it was made; load it "
                "with the code that wrote it, whose versions are in its MANIFEST.json"
            )

    def note(self, step: int, trained: Sequence[GroupRef]) -> None:
        """The step's line in the journal, on rank 0."""
        if self.side is not None:
            self.side.journal.step(step, trained, self.side.reader.take_dropped())

    def archive(self, step: TrainedStep) -> None:
        """Keep what the step is made of, on rank 0; a replay keeps nothing again."""
        if self.archiver is not None:
            self.archiver.add(step)

    def commit(self, step: int) -> None:
        """Begin one atomic checkpoint of the weights on the engines, once the journal of its steps is durable."""
        if self.side is not None:
            self.side.journal.checkpoint(step, self.side.reader.take_dropped())
        self.commits.begin(step, self.fingerprint)

    def settle(self, wait: bool) -> None:
        self.commits.settle(wait=wait)

    def wait_for_start_evaluation(self, start_step: int) -> None:
        """Let the evaluator measure the weights the run starts from before new ones replace them.

        Rollout workers fill the ring meanwhile. An episode's time limit is below ``limits.starve_s``, and does not run
        where satellites are awaited.
        """
        evaluation = self.process.config.evaluation
        by_evaluator = evaluation.every_steps > 0 and not is_offline(self.process.config.algorithm)
        if self.side is not None and start_step == 0 and by_evaluator and self._owes_step_0():
            reader, limits = self.side.reader, self.process.config.limits

            def done() -> bool:
                reader.poll()
                return self.process.stopping() or 0 in self.process.run.evaluated_steps()

            wait_for(
                "the evaluation of the start weights",
                done,
                limits.starve_s + queue_s(self.process.config),
                party="evaluator-0",
                hint=f"look into {self.process.attempt.log('evaluator', 0)}",
            )
        self.ranks.barrier()

    def _owes_step_0(self) -> bool:
        config = self.process.config
        agenda = agenda_of(self.process.run, self.process.epoch)
        return 0 in agenda.at(0, config.evaluation, config.trainer.total_steps, finished=()).owed

    def close(self) -> None:
        self.commits.close()
        if self.archiver is not None:
            self.archiver.close()
        if self.side is not None:
            self.side.fleet.close()
            self.side.journal.close()

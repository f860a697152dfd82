"""The trainer: one rank of the training loop.

Rank 0 also owns the ring's reading end, the weight transport and the commits. In the order of a start: the ranks find
each other, rank 0 says which checkpoint the attempt goes on from, every rank loads it, the ring is read, the engines
get the weights (which proves the transport before a single token is generated), and only then may workers reserve.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import check_fence, load_lineage
from areal_hpc.fs import wait_for
from areal_hpc.protocols import TrainerBackend
from areal_hpc.roles.process import EXIT_DONE, EXIT_STOPPED, RoleProcess
from areal_hpc.roles.wiring.training import (
    TrainerSide,
    join_ranks,
    make_backend,
    make_fetch,
    make_trainer_side,
)
from areal_hpc.training.loop import Pace, TrainingLoop, Weights
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import GroupRef, WeightVersion
from areal_hpc.waits import waiting

log = logging.getLogger(__name__)


def main(process: RoleProcess) -> int:
    ranks = join_ranks(process)
    backend = make_backend(process.config, ranks)
    parent, start_step = _resume(process, ranks, backend)
    with asyncio.Runner() as loop_runner:
        side = make_trainer_side(process, parent, loop_runner.run) if ranks.leads else None
        member = Member(process=process, ranks=ranks, backend=backend, side=side, runner=loop_runner)
        loop = _loop(process, member, start_step)
        process.starting.close()
        try:
            loop.announce()
            member.wait_for_start_evaluation(start_step)
            finished = loop.run()
        finally:
            member.close()
    return EXIT_DONE if finished else EXIT_STOPPED


def _resume(process: RoleProcess, ranks: Ranks, backend: TrainerBackend) -> tuple[checkpoint.Checkpoint | None, int]:
    """Load the newest checkpoint of the surviving history on every rank; the checkpoint, on rank 0, and its step.

    Rank 0 alone verifies it: that reads the whole of it.
    """
    found = None
    if ranks.leads:
        checkpoint.sweep(process.run, process.epoch)
        found = checkpoint.newest(process.run, load_lineage(process.run, process.epoch))
    path, step = ranks.share((None, 0) if found is None else (str(found.path), found.version.step))
    if path is None:
        log.info("fresh start from %s", process.config.model.path)
    else:
        backend.load(path)
        log.info("resumed from %s", path)
    return found, step


def _loop(process: RoleProcess, member: Member, start_step: int) -> TrainingLoop:
    config = process.config
    return TrainingLoop(
        epoch=process.epoch,
        step=start_step,
        pace=Pace(
            total_steps=config.trainer.total_steps,
            checkpoint_every=config.checkpoint.every_steps,
            max_new_tokens=config.rollout.sampling.max_new_tokens,
            starve_s=config.limits.starve_s,
            seed=config.seed,
        ),
        algorithm=config.algorithm,
        ranks=member.ranks,
        backend=member.backend,
        fetch=make_fetch(process),
        reader=None if member.side is None else member.side.reader,
        publish=member.publish,
        behind=member.behind,
        catch_up=member.catch_up,
        commit=member.commit,
        journal=member.note,
        stop_requested=process.stopping,
        workers=[f"rollout-{index}" for index in range(config.rollout.workers)],
        record=process.recorder.record,
    )


class Member:
    """What the loop calls on this rank: rank 0 acts, the others take part in the collectives."""

    def __init__(
        self,
        *,
        process: RoleProcess,
        ranks: Ranks,
        backend: TrainerBackend,
        side: TrainerSide | None,
        runner: asyncio.Runner,
    ) -> None:
        self.process, self.ranks, self.backend, self.side, self.runner = process, ranks, backend, side, runner

    def publish(self, version: int, weights: Weights) -> Mapping[str, float]:
        """Bring every engine to ``version``; gathering the weights is collective, so the other ranks walk along."""
        while True:
            moved = self._walk(weights) if self.side is None else self.side.fleet.publish(version, weights())
            if self.ranks.share(moved is not None):
                return moved or {}

    def behind(self) -> bool:
        return self.side is not None and self.side.fleet.behind()

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

    def note(self, step: int, trained: Sequence[GroupRef]) -> None:
        """The step's line in the journal, on rank 0."""
        if self.side is not None:
            self.side.journal.step(step, trained, self.side.reader.take_dropped())

    def commit(self, step: int) -> None:
        """One atomic checkpoint: every rank writes its part, rank 0 the ring's state and the manifest."""
        with waiting(f"writing the checkpoint of step {step}", limit_s=self.process.config.limits.checkpoint_s):
            self._commit(step)

    def _commit(self, step: int) -> None:
        if self.side is None:
            self.backend.save(self.ranks.share(None))
            self.ranks.barrier()
            return
        reader, run = self.side.reader, self.process.run
        self.side.journal.checkpoint(step, reader.take_dropped())
        state = {"ring": reader.state_dict(), "prompts": dict(self.side.identity)}
        checkpoint.write(
            run,
            WeightVersion(self.process.epoch, step),
            self._save_together,
            state,
            layout={"ranks": self.ranks.size},
            still_leader=lambda: check_fence(run, self.process.epoch),
        )
        reader.covered(state["ring"])
        checkpoint.prune(run, self.process.config.checkpoint.keep)

    def _save_together(self, directory: Path) -> None:
        self.backend.save(self.ranks.share(str(directory)))
        self.ranks.barrier()

    def wait_for_start_evaluation(self, start_step: int) -> None:
        """Let the evaluator measure the weights the run starts from before new ones replace them.

        Rollout workers fill the ring meanwhile.
        """
        evaluation = self.process.config.evaluation
        if self.side is not None and start_step == 0 and evaluation.every_steps and evaluation.at_start:
            reader = self.side.reader

            def done() -> bool:
                reader.poll()
                return self.process.stopping() or 0 in self.process.run.evaluated_steps()

            wait_for(
                "the evaluation of the start weights",
                done,
                self.process.config.limits.starve_s,  # an episode's time limit is below it
                party="evaluator-0",
                hint=f"look into {self.process.attempt.log('evaluator', 0)}",
            )
        self.ranks.barrier()

    def close(self) -> None:
        if self.side is not None:
            self.runner.run(self.side.transport.close())
            for client in self.side.clients:
                self.runner.run(client.close())
            self.side.journal.close()

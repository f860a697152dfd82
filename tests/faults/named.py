"""Scenarios for safety steps that no crash of a single run can show: two trainers, two writers, damaged bytes.

Each is a function that returns quietly, or raises a Violation or an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from faults.images import File, Image, Write, patched, power_cut, tree
from faults.mounted import mounted
from faults.scenario import Trainer, Trial, Violation, Worker, group_of, without_threads
from faults.volume import Call, Volume

from areal_hpc.buffer.chain import ChainName, ChainWriter
from areal_hpc.buffer.records import RecordType
from areal_hpc.buffer.scan import ChainReader
from areal_hpc.errors import CorruptRecord, Fenced
from areal_hpc.run_dir import RunDir
from areal_hpc.types import TrajectoryGroup

Scenario = Callable[[], None]
ROOT = Path("/volume")
NUM_FLIPS = 300


def _train(trainer: Trainer, workers: list[Worker], until: int) -> None:
    rng = Random(0)
    while trainer.step < until:
        for worker in workers:
            worker.move(rng)
        trainer.move()


def trainer_that_sleeps_through_its_replacement() -> None:
    """It sleeps where it begins to write a checkpoint; another attempt takes over; then it goes on."""
    with mounted(volume := Volume(ROOT)), without_threads():
        trial = Trial(ROOT)
        zombie, workers = trial.begin()
        _train(zombie, workers, until=3)
        before = sorted(os.listdir(zombie.run.checkpoints))

        def sleep(call: Call, do: Callable[..., Any]) -> Any:
            if call.name == "mkdir" and call.path.startswith(str(zombie.run.checkpoints)):
                volume.intercept = lambda _, do: do()
                trial.begin()
            return do()

        volume.intercept = sleep
        try:
            zombie.save()
        except Fenced:
            pass
        else:
            raise Violation("a trainer that was replaced has published a checkpoint")
        if sorted(os.listdir(zombie.run.checkpoints)) != before:
            raise Violation("a trainer that was replaced has left something among the checkpoints")
        trial.attempt()


def writer_that_was_taken_for_dead() -> None:
    """Its prompt was run again by another and trained on; then it seals its own answer after all, and the run restarts
    from before both."""
    with mounted(Volume(ROOT)), without_threads():
        trial = Trial(ROOT)
        trainer, workers = trial.begin()
        trainer.move()  # follows the writers
        zombie = workers[0].writer
        ticket = zombie.try_reserve(0)
        assert ticket is not None
        zombie.flush()
        workers[0] = trial.worker(trainer, 0)
        _train(trainer, workers, until=1)
        if 0 not in trainer.model:
            raise Violation("the prompt of a writer that was replaced has not been run again")
        zombie.seal(ticket, group_of(0, (0, 0)))
        zombie.flush()
        trial.attempt()


def writer_that_is_restarted_behind_a_torn_record() -> None:
    """Killed in the middle of a record, started again: what the second life commits must be readable."""
    with mounted(Volume(ROOT)):
        first = ChainWriter(ROOT, ChainName.new(0, 1, 0), 1 << 20)
        first.append(RecordType.DATA, 0, {}, b"one")
        first.commit()
        path = first.directory / "00000000.seg"
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, path.read_bytes()[:50], path.stat().st_size)
        os.close(fd)
        second = ChainWriter(ROOT, ChainName.new(0, 1, 1), 1 << 20)
        second.append(RecordType.DATA, 1, {}, b"two")
        second.commit()
        chains = [ChainReader(ROOT, name) for text in os.listdir(ROOT) if (name := ChainName.parse(text))]
        seen = sorted(record.meta["ticket"] for chain in chains for record in chain.poll(last=True))
        if seen != [0, 1]:
            raise Violation(f"committed were tickets 0 and 1, readable are {seen}")


def evaluator_that_is_killed_before_its_result_is_durable() -> None:
    """Its result has its name, which is not synced; a checkpoint counts it as done; then no power."""
    with mounted(volume := Volume(ROOT)), without_threads():
        trial = Trial(ROOT)
        trainer, workers = trial.begin()

        def die(call: Call, do: Callable[..., Any]) -> Any:
            if call.name == "fsync" and call.path == str(trainer.run.evaluations):
                raise InterruptedError
            return do()

        volume.intercept = die
        with suppress(InterruptedError):
            trial.evaluator(trainer)
        volume.intercept = lambda _, do: do()
        assert trainer.run.evaluated_steps() == {0}
        _train(trainer, workers, until=2)
        images = [power_cut(volume.image, Random(seed)) for seed in range(20)]
    for image in images:
        with mounted(Volume(ROOT, image)), without_threads():
            Trial(ROOT, deepcopy(trial.promises)).attempt()


def flipped_bits() -> None:
    """One bit of one segment flips, many times over: a group reads as it was written, or as damaged, or is not seen."""
    with mounted(volume := Volume(ROOT)), without_threads():
        trial = Trial(ROOT)
        trainer, workers = trial.begin()
        _train(trainer, workers, until=2)
        for _ in range(8):
            for worker in workers:
                worker.move(Random(1))
        written = _readable(trial, volume.image)
    assert len(written) > 2
    rng = Random(5)
    for _ in range(NUM_FLIPS):
        for position, group in _readable(trial, _flip(volume.image, rng)).items():
            if position not in written or not _same(group, written[position]):
                raise Violation(f"a flipped bit has changed the group of position {position}")


def _flip(image: Image, rng: Random) -> Image:
    """``image`` with one bit of one segment file changed."""
    segments = [path for path in tree(image) if path.endswith(".seg") and tree(image)[path]]
    inode = Volume(ROOT, image).look_up(f"{ROOT}{rng.choice(segments)}")
    node = image[inode]
    assert isinstance(node, File)
    at = rng.randrange(len(node.data))
    data = patched(node.data, Write(at, bytes([node.data[at] ^ 1 << rng.randrange(8)])))
    return {**image, inode: replace(node, data=data)}


def _readable(trial: Trial, image: Image) -> dict[int, TrajectoryGroup]:
    """What a next attempt can read of what was sealed, by position."""
    with mounted(Volume(ROOT, image)), without_threads():
        trainer = Trainer(RunDir(trial.root), type(trial.promises)())
        found = {}
        for ref in trainer.reader._ledger.waiting.values():
            try:
                group = trainer.reader.read(ref)
            except CorruptRecord:
                continue
            found[group.position] = group
    return found


def _same(one: TrajectoryGroup, other: TrajectoryGroup) -> bool:
    return (one.position, one.prompt_id) == (other.position, other.prompt_id) and all(
        np.array_equal(getattr(ours, field.name), getattr(theirs, field.name))
        for ours, theirs in zip(one.trajectories, other.trajectories, strict=True)
        for field in fields(ours)
    )

"""A replay gives the weights of its run, bit for bit: of a loop in this process, and of a run that was killed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launched import GROUPS, command, launched, newest_checkpoint
from tiny_models import VOCAB_SIZE, make_model

from areal_hpc.buffer.archive import archived_steps, read_step
from areal_hpc.buffer.archiver import Archiver
from areal_hpc.buffer.epochs import StartRecord, claim_epoch, write_start
from areal_hpc.buffer.memory import MemoryRing
from areal_hpc.buffer.replay import ReplayReader
from areal_hpc.buffer.scan import one_by_one
from areal_hpc.config.algorithm import AlgorithmConfig, Level, NormConfig
from areal_hpc.config.schema import OptimizerConfig, TrainerConfig
from areal_hpc.errors import CorruptRecord
from areal_hpc.report.inspect import show_step
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Record
from areal_hpc.training.loop import Checkpoints, Engines, LoopSettings, TrainingLoop
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.types import GroupRef, StopReason, Trajectory, TrajectoryGroup, WeightVersion
from areal_hpc.watermark import Watermark

STEPS = 4
ALGORITHM = AlgorithmConfig(
    groups_per_step=3,
    minibatches=2,
    adv_norm=NormConfig(mean=Level.BATCH, std=Level.BATCH),  # so that one group's absence would change all others
)
TRAINER = TrainerConfig(total_steps=STEPS + 3, optimizer=OptimizerConfig(lr=1e-2), tokens_per_microbatch=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(path, "qwen3", 1, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    return path


# In one process


def random_group(position: int, version: int) -> TrajectoryGroup:
    """Three answers of different lengths with log-probs that no policy has."""
    random = np.random.default_rng(position)
    trajectories = []
    for episode in range(3):
        prompt, answer = 5, int(random.integers(1, 20))
        mask = np.arange(prompt + answer) >= prompt
        trajectories.append(
            Trajectory(
                token_ids=random.integers(0, VOCAB_SIZE, mask.size).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, random.normal(-5.0, 0.3, mask.size), 0).astype(np.float32),
                versions=np.where(mask, version, -1).astype(np.int32),
                reward=float(random.normal()),
                stop=StopReason.LENGTH if episode == 0 else StopReason.STOP,
                episode=episode,
            )
        )
    return TrajectoryGroup(position=position, prompt_id=f"p{position}", trajectories=tuple(trajectories))


def train(
    model: Path, reader: Any, fetch: Callable[[GroupRef], TrajectoryGroup], **hooks: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The weights after STEPS steps, and the steps' records."""
    records: list[dict[str, Any]] = []
    backend = ReferenceBackend(model_path=str(model), algorithm=ALGORITHM, trainer=TRAINER, temperature=1.0)
    loop = TrainingLoop(
        epoch=1,
        step=0,
        settings=LoopSettings(total_steps=STEPS, checkpoint_every=100, max_new_tokens=20, starve_s=5.0, seed=7),
        algorithm=ALGORITHM,
        ranks=Ranks(),
        backend=backend,
        fetch=one_by_one(fetch),
        reader=reader,
        engines=Engines(publish=lambda _version, _weights: {}),
        checkpoints=Checkpoints(begin=lambda _step: None, settle=lambda _wait: None),
        journal=lambda _step, _trained: None,
        record=lambda _kind, values: records.append(dict(values)),
        **{"stop_requested": lambda: False, **hooks},
    )
    loop.announce()
    assert loop.run()
    return {name: tensor.clone() for name, tensor in backend.weights()}, records


def same(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_replayed_loop_makes_the_same_weights_and_the_same_records(model: Path, tmp_path: Path) -> None:
    """Also where a group of the second step was damaged: its step went on without it."""
    run = RunDir.create(tmp_path / "run")
    assert claim_epoch(run, {}) == 1
    begin = StartRecord(parent=None, version=WeightVersion(1, 0), consumed=Watermark(), fingerprint="")
    write_start(run, 1, begin)
    ring = MemoryRing(capacity=6, max_staleness=1)
    writer, positions = ring.writer(0), itertools.count()

    def produce() -> bool:
        while (ticket := writer.try_reserve(position := next(positions))) is not None:
            writer.seal(ticket, random_group(position, ticket.version.step))
        return False

    def fetch(ref: GroupRef) -> TrajectoryGroup:
        if ref.position == 5:
            raise CorruptRecord("position 5 fails its checksum")
        return ring.reader.read(ref)

    archiver = Archiver(run, 1, every_steps=3, fetch=one_by_one(fetch), timeout_s=10)
    weights, records = train(model, ring.reader, fetch, archive=archiver.add, stop_requested=produce)
    archiver.seal()()
    archiver.close()
    damaged = [n for n, path in archived_steps(run).items() if not all(read_step(path, n).step.readable)]
    assert damaged == [2]

    replay = ReplayReader(run)
    again, again_records = train(model, replay, replay.read)
    assert same(weights, again)
    for key in ("reward_mean", "tokens_trained", "loss", "grad_norm", "logprob_gap", "ring_staleness_max"):
        assert [record[key] for record in again_records] == [record[key] for record in records]

    changed = ReplayReader(run)
    different, _ = train(
        model,
        changed,
        lambda ref: random_group(99, 0) if ref.position == 0 else changed.read(ref),
    )
    assert not same(weights, different), "the comparison cannot fail"


# A whole run

WORDS = (
    "deterministic=true",
    "trainer.ranks=2",
    "archive.every_steps=100",  # so that files end with checkpoints alone
    "checkpoint.every_steps=3",
    "checkpoint.keep=10",
)


@pytest.mark.long
def test_a_run_that_was_killed_has_a_whole_archive_and_replays_bit_for_bit(model: Path, tmp_path: Path) -> None:
    """Two ranks, killed with all else in the middle of a file, resumed to the end; replayed from a checkpoint."""
    with launched(tmp_path, model, *WORDS, "trainer.total_steps=400") as started:
        started.wait_for_step(5)
        started.roles()
        for process in [*started.seen.values(), started.process]:
            process.kill()
        started.process.wait()
    with launched(tmp_path, model, *WORDS, "trainer.total_steps=8", "--resume") as again:
        assert again.wait() == 0, again.text
        assert_archive_is_whole(again.run)
        (record,) = [record for record in again.records("step") if record.number("step") == last_step(again.run)]
        assert_archive_agrees(again.run, record)
    assert_replay_is_equal(again.run, tmp_path / "again", "--from-step", "3")


def last_step(run: RunDir) -> int:
    return int(newest_checkpoint(run).version.step)


def assert_archive_is_whole(run: RunDir) -> None:
    """No step is missing or there twice; those that the kill took back are the second attempt's."""
    last = last_step(run)
    steps = [read_step(path, step).step for step, path in archived_steps(run).items()]
    assert [step.version.step for step in steps] == list(range(1, last + 1))
    epochs = [step.version.epoch for step in steps]
    resumed_at = epochs.count(1)
    assert resumed_at in range(3, last, 3) and epochs == [1] * resumed_at + [2] * (last - resumed_at)
    positions = [ref.position for step in steps for ref in step.refs]
    assert len(positions) == len(set(positions)) == last * GROUPS


def assert_archive_agrees(run: RunDir, record: Record) -> None:
    """With what the trainer recorded of the step; and a person can read it."""
    step = last_step(run)
    archived = read_step(archived_steps(run)[step], step)
    rewards = [trajectory.reward for group in archived.groups.values() for trajectory in group.trajectories]
    assert np.mean(rewards) == pytest.approx(record.number("reward_mean"))
    assert archived.step.proximal, "rank 0 has computed some"
    text = "\n".join(show_step(run, step))
    assert text.count("  | <|im_start|>user\n  | train ") == GROUPS
    assert text.count("episode ") == len(rewards)


def assert_replay_is_equal(run: RunDir, out: Path, *words: str) -> None:
    done = command("replay", run.root, "--train-only", "--out", out, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = newest_checkpoint(RunDir.open(out)), newest_checkpoint(run)
    assert f"weights of step {theirs.version.step}: bit-equal to {theirs.path}" in done.stdout
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (ours.path / name).read_bytes() == (theirs.path / name).read_bytes()

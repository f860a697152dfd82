"""Reading an archive in place of the ring, and what a replay refuses before it begins."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from archived import group, step_with, trajectory
from reference_steps import small_model

from areal_hpc.buffer.archive import ArchiveFile
from areal_hpc.buffer.epochs import StartRecord, claim_epoch, write_start
from areal_hpc.buffer.replay import ReplayReader
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config, TrainerBackendName
from areal_hpc.errors import CheckpointError, CorruptRecord, DataError, RunDirError
from areal_hpc.protocols import RolloutReader
from areal_hpc.roles.replay import replay_config, replay_run
from areal_hpc.roles.supervisor import roles_of
from areal_hpc.roles.wiring.replay import check_replay, last_step
from areal_hpc.routing import Routing
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of quickstart that has archived steps 1 to 4; in step 2 the second of two groups was damaged."""
    run = RunDir.create(tmp_path / "run")
    run.config.write_bytes(QUICKSTART.read_bytes())
    run.archive.mkdir()
    epoch = claim_epoch(run, {})
    start = StartRecord(parent=None, version=WeightVersion(epoch, 0), consumed=Watermark(), fingerprint="")
    write_start(run, epoch, start)
    file = ArchiveFile(WeightVersion(epoch, 1))
    for step in range(1, 5):
        made_of = [group(2 * step + row, trajectory([1], [(step, step - 1)])) for row in range(2)]
        file.add(step_with(WeightVersion(epoch, step), made_of, damaged=[1] if step == 2 else []))
    file.publish(run)
    return run


def replayed(run: RunDir, from_step: int = 0, to_step: int = 0, *overrides: str) -> Config:
    out = run.root.parent / "again"
    return replay_config(run, out, from_step=from_step, to_step=to_step, overrides=overrides)


def test_each_step_is_claimed_as_it_was_whatever_is_asked_for(run: RunDir) -> None:
    reader: RolloutReader = ReplayReader(run)
    for step in (1, 3, 2):
        refs = reader.claim(16, WeightVersion(7, step - 1))
        assert refs is not None
        assert [ref.position for ref in refs] == [2 * step, 2 * step + 1]
        assert int(reader.read(refs[0]).trajectories[0].token_ids[1]) == step
        assert reader.stats() == {"staleness_mean": 0.0, "staleness_max": 0}


def test_any_rank_may_read_what_rank_0_claimed(run: RunDir) -> None:
    refs = ReplayReader(run).claim(2, WeightVersion(7, 2))
    assert [ReplayReader(run).read(ref).position for ref in refs] == [6, 7]


def test_what_was_damaged_then_is_left_out_again(run: RunDir) -> None:
    reader = ReplayReader(run)
    refs = reader.claim(2, WeightVersion(7, 1))
    assert reader.read(refs[0]).position == 4
    with pytest.raises(CorruptRecord, match="position 5 of step 2"):
        reader.read(refs[1])


def test_a_step_that_is_not_archived_is_an_error_with_its_number(run: RunDir) -> None:
    with pytest.raises(DataError, match="step 5 is not in"):
        ReplayReader(run).claim(2, WeightVersion(7, 4))


def test_a_replay_is_the_run_without_engines_rollouts_and_evaluation(run: RunDir) -> None:
    config = replayed(run, 0, 3, "algorithm.clip_high=0.5")
    before = load([QUICKSTART])
    assert roles_of(config) == {"trainer": before.trainer.ranks}
    assert (config.trainer, config.model, config.seed) == (before.trainer, before.model, before.seed)
    assert (config.algorithm.clip_high, config.algorithm.clip_low) == (0.5, before.algorithm.clip_low)
    assert (config.evaluation.every_steps, config.archive.every_steps) == (0, 0)
    assert (Path(config.run_root) / config.name, last_step(config)) == (run.root.parent / "again", 3)


def test_without_a_last_step_all_that_is_archived_is_replayed(run: RunDir) -> None:
    assert last_step(replayed(run)) == 4
    assert last_step(load([QUICKSTART])) == 60
    check_replay(replayed(run))


def test_steps_that_are_not_there_are_named_before_anything_begins(run: RunDir) -> None:
    with pytest.raises(DataError, match=r"lacks step 5 of steps 1 to 6 \(it has 1 to 4\)"):
        check_replay(replayed(run, 0, 6))
    with pytest.raises(CheckpointError, match="no checkpoint of step 2; there are: none"):
        check_replay(replayed(run, 2))
    (path,) = run.archive.iterdir()
    path.unlink()
    with pytest.raises(DataError, match=r"lacks step 1 .*it is empty.*archive.every_steps"):
        check_replay(replayed(run))


def test_a_replay_does_not_write_into_a_directory_that_is_there(run: RunDir) -> None:
    with pytest.raises(RunDirError, match="exists; give a new directory with --out"):
        replay_run(run, run.root, from_step=0, to_step=0, overrides=[], stream=io.StringIO())


def archive_a_step_of_a_mixture(run: RunDir, step: int) -> None:
    """Sampled by two layers that chose 2 of at least 8 experts; nothing is known of the last token."""
    experts = np.array([[[0, 7], [1, 2]], [[255, 255], [255, 255]]], dtype=np.uint8)
    one = replace(trajectory([1], [(5, step - 1)]), experts=experts)
    file = ArchiveFile(WeightVersion(1, step))
    file.add(step_with(WeightVersion(1, step), [group(2 * step, one)]))
    file.publish(run)


@pytest.mark.parametrize(
    ("routing", "said"),
    [
        (Routing(2, 2, 7), "more than 7 experts, and model.path has 2 layers with 2 of 7 experts a token"),
        (Routing(3, 2, 8), "2 layers with 2 experts a token, and model.path has 3 layers with 2 of 8"),
        (Routing(2, 4, 8), "2 layers with 2 experts a token, and model.path has 2 layers with 4 of 8"),
    ],
    ids=["fewer experts", "more layers", "more experts a token"],
)
def test_records_of_another_mixture_are_an_error_of_who_chose_the_model(
    run: RunDir, routing: Routing, said: str
) -> None:
    archive_a_step_of_a_mixture(run, 5)
    for taken in (None, Routing(2, 2, 8)):
        assert len(ReplayReader(run, taken).claim(1, WeightVersion(7, 4))) == 1
    with pytest.raises(DataError, match=f"step 5 of .* was sampled by a mixture of {said}"):
        ReplayReader(run, routing).claim(1, WeightVersion(7, 4))


def test_another_mixture_is_refused_before_the_replay_begins_where_the_trainer_heeds_records(
    run: RunDir, tmp_path: Path
) -> None:
    for path in run.archive.iterdir():
        path.unlink()
    archive_a_step_of_a_mixture(run, 1)
    config = replayed(run, 0, 0, f"model.path={small_model(tmp_path / 'mixture', 'qwen3_moe')}", "model.maker=''")
    check_replay(config)
    megatron = replace(config, trainer=replace(config.trainer, backend=TrainerBackendName.MEGATRON))
    with pytest.raises(DataError, match=r"mixture of more than 7 experts, .*; replay with the run's own model"):
        check_replay(megatron)

"""What ``areal-hpc eval`` makes of a configuration and a checkpoint, what it refuses, and what it tells in the end;
``tests/integration/test_run.py`` evaluates a real run."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import StartRecord, claim_epoch, write_start
from areal_hpc.cluster.components import components_of, divide, placements
from areal_hpc.config.cluster import ComponentConfig, Shape
from areal_hpc.config.describe import dump
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.errors import CheckpointError, ConfigError, DataError, RunDirError
from areal_hpc.fs import publish_json, read_json
from areal_hpc.report import report_run, status_lines
from areal_hpc.roles.evaluation import evaluate, evaluation_config
from areal_hpc.roles.supervisor import roles_of
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion
from areal_hpc.watermark import Watermark

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load([QUICKSTART], [f"run_root={tmp_path}", "generation.replicas=2", "cluster.shape=het"])


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Attempt 1 made steps 10, 20 and 30; attempt 2 went on from 20, and has made none yet."""
    run = RunDir.create(tmp_path / "trained")
    run.config.write_bytes(QUICKSTART.read_bytes())
    for parent, steps in ((None, (10, 20, 30)), (WeightVersion(1, 20), ())):
        epoch = claim_epoch(run, {"pid": 1})
        version = WeightVersion(epoch, parent.step if parent else 0)
        write_start(run, epoch, StartRecord(parent=parent, version=version, consumed=Watermark(), fingerprint="f"))
        for step in steps:
            checkpoint.write(run, WeightVersion(epoch, step), lambda path: None, {})
    return run


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_a_run_is_measured_by_its_newest_surviving_checkpoint(config: Config, run: RunDir, tmp_path: Path) -> None:
    measured = evaluation_config(config, run.root, None, None)
    root = tmp_path / "quickstart-eval-trained-20"
    assert (measured.evaluation.checkpoint, measured.evaluation.step) == (str(run.root), 20)
    assert (Path(measured.run_root) / measured.name, measured.model.path) == (root, str(root / "model"))
    assert roles_of(measured) == {"generator": 2, "evaluator": 1}
    assert (measured.prompts, measured.rollout, measured.seed) == (config.prompts, config.rollout, config.seed)
    assert evaluation_config(config, run.root, 10, None).evaluation.step == 10


def test_a_directory_of_weights_is_served_from_where_it_is(config: Config, weights: Path, tmp_path: Path) -> None:
    measured = evaluation_config(config, weights, None, tmp_path / "there")
    assert (measured.evaluation.checkpoint, measured.evaluation.step) == (str(weights), 0)
    assert (Path(measured.run_root) / measured.name, measured.model.path) == (tmp_path / "there", str(weights))
    assert measured.model.maker == ""


def test_in_a_slurm_job_its_engines_have_all_nodes_and_what_was_asked_for_those_of_the_training_run(
    config: Config, weights: Path
) -> None:
    cluster = replace(config.cluster, generation=ComponentConfig(gres="gpu:2", nodes=1), setup=("module load cuda",))
    measured = evaluation_config(replace(config, cluster=cluster), weights, None, None, num_nodes=3)
    (component,) = components_of(measured)
    assert (component.roles, component.request.nodes, component.gpus) == (("generator", "part", "evaluator"), 3, 2)
    assert measured.cluster.setup == ("module load cuda",)
    nodes = divide(measured, [("n1", "n2", "n3")])
    placed = placements(measured, nodes, roles_of(measured))
    assert {key: seat.node for key, seat in placed.items()} == {
        ("generator", 0): "n1",
        ("generator", 1): "n2",
        ("evaluator", 0): "n1",
    }
    assert evaluation_config(config, weights, None, None).cluster.shape is Shape.LOCAL


def test_what_cannot_be_measured_is_refused(config: Config, run: RunDir, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 30; there are: 10, 20"):
        evaluation_config(config, run.root, 30, None)
    with pytest.raises(DataError, match=r"neither a run directory nor a Hugging Face directory; .* give the run"):
        evaluation_config(config, run.checkpoints / "step-00000010.e00000001", None, None)
    with pytest.raises(ConfigError, match="has no steps; leave --step out"):
        evaluation_config(config, weights, 3, None)
    with pytest.raises(ConfigError, match=r"prompts\.eval: there is nothing to evaluate on"):
        evaluation_config(replace(config, prompts=replace(config.prompts, eval="")), run.root, None, None)
    offline = replace(config, algorithm=replace(config.algorithm, name="sft"))
    with pytest.raises(ConfigError, match=r"algorithm\.name = sft .*samples nothing"):
        evaluation_config(offline, run.root, None, None)
    with pytest.raises(RunDirError, match="trained exists; give a new directory with --out"):
        evaluate(config, weights, None, run.root, io.StringIO())
    empty = RunDir.create(tmp_path / "empty")
    empty.config.write_bytes(QUICKSTART.read_bytes())
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        evaluation_config(config, empty.root, None, None)


def evaluated(config: Config, run: RunDir, samples: int) -> RunDir:
    """The run directory of an evaluation that has begun."""
    measured = evaluation_config(config, run.root, None, None)
    measured = replace(measured, evaluation=replace(measured.evaluation, samples=samples))
    done = RunDir.create(Path(measured.run_root) / measured.name)
    done.config.write_text(dump(measured), encoding="utf-8")
    return done


def test_the_table_tells_what_was_measured_and_how_surely(config: Config, run: RunDir) -> None:
    done = evaluated(config, run, samples=2)
    result: dict[str, Any] = {"prompts": 2, "samples": 3, "failed": 1, "step": 20, "epoch": 1}
    for name, value in {"reward_mean": 0.5, "pass_at_1": 0.25, "pass_at_2": 1 / 3}.items():
        result |= {name: value, f"{name}_low": value / 2, f"{name}_high": 1.0}
    answers = [{"id": "a", "rewards": [1.0, 0.0]}, {"id": "b", "rewards": [0.5]}]
    publish_json(done.evaluation(20), {**result, "answers": answers})
    stream = io.StringIO()
    report_run(done, stream)
    assert stream.getvalue().splitlines() == [
        "evaluation quickstart-eval-trained-20",
        f"  checkpoint  step 20 of {run.root}",
        "  answers     2 prompts of areal_hpc.tasks.sort_digits:SortDigits, 2 samples each at temperature 1; 1 failed",
        "  reward      0.5 [0.25, 1]",
        "  pass@1      0.25 [0.125, 1]",
        "  pass@2      0.3333 [0.1667, 1]",
        "  left out    prompts with fewer samples than k: pass@2 is of 1 prompts",
        "  intervals   95%, from prompts drawn again 2,000 times",
        f"  written     summary.json in {done.root}",
    ]
    summary = read_json(done.summary)
    assert (summary["checkpoint"], summary["pass_reward"], summary["answers"]) == (str(run.root), 1.0, answers)


def test_an_evaluation_that_was_stopped_has_no_result_and_says_so(config: Config, run: RunDir) -> None:
    done = evaluated(config, run, samples=1)
    stream = io.StringIO()
    report_run(done, stream)
    assert "result  none: it was stopped, or has failed" in stream.getvalue()
    assert not done.summary.exists()


def test_its_status_is_silent_on_training(config: Config, run: RunDir) -> None:
    done = evaluated(config, run, samples=1)
    publish_json(done.attempt(1).create().state, {"state": "finished"})
    names = [line.split("  ")[0].strip() for line in status_lines(done, ask=lambda _: None)]
    assert names == ["run", "state", "generation", "evaluation", "last record"]

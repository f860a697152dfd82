"""The examples run, teach what the library does, and use nothing of it that is private."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from areal_hpc.algorithms.advantages import AdvantageInputs, trajectory_advantages
from areal_hpc.algorithms.losses import clipped_loss
from areal_hpc.algorithms.objective import LossInputs
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.errors import ConfigError
from areal_hpc.roles.wiring.dotted import dotted
from areal_hpc.roles.wiring.preflight import preflight
from areal_hpc.roles.wiring.training import make_backend
from areal_hpc.training.batching import pack
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import StopReason, Trajectory, TrajectoryGroup
from tests.tiny_models import make_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
STEP = re.compile(r"step +(\d+)  reward (\S+) .* oldest token (\d+) versions behind")


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file_rl", EXAMPLES / "one_file_rl.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_file_learns_from_answers_that_are_old_but_within_the_bound(quickstart_model: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "one_file_rl.py"), "--model", str(quickstart_model), "--steps", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    before, after = (float(reward) for reward in re.findall(r"held-out reward \w+: (\S+)", done.stdout))
    assert before < 0.25, "the model must not be able to do it yet"
    assert after > before + 0.3, done.stdout
    steps = STEP.findall(done.stdout)
    assert [int(number) for number, *_ in steps] == list(range(1, 13))
    assert np.mean([float(reward) for _, reward, *_ in steps[-3:]]) > before + 0.3
    assert 1 <= max(int(oldest) for *_, oldest in steps) <= 2, done.stdout


def test_one_file_has_the_librarys_loss(one_file: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(400, generator=generator) < 0.7

    def logprobs(near: torch.Tensor | float, by: float) -> torch.Tensor:
        return torch.where(mask, near + by * torch.randn(400, generator=generator), 0.0)

    proximal = logprobs(-2.0, 1.0)
    current = logprobs(proximal, 0.3)
    common = {
        "proximal": proximal,
        "behaviour": logprobs(proximal, 1.5),  # some ratios beyond 5, which are left out
        "advantages": torch.where(mask, torch.randn(400, generator=generator), 0.0),
        "mask": mask,
        "segments": torch.arange(400) // 40,
        "versions": torch.where(mask, 3, -1),
        "version_now": 5,
    }
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.28)
    ours, theirs = current.clone().requires_grad_(), current.clone().requires_grad_()
    found = one_file.loss(LossInputs(current=ours, **common), config)
    expected = clipped_loss(LossInputs(current=theirs, **common), config)
    assert 0 < expected.stats["kept_fraction"][0] < mask.sum(), "the case must reject some tokens and keep others"
    torch.testing.assert_close(found.per_token, expected.per_token)
    found.per_token.sum().backward()
    expected.per_token.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_one_file_has_the_librarys_advantages(one_file: ModuleType) -> None:
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.25]]
    groups = [
        TrajectoryGroup(position=n, prompt_id=str(n), trajectories=tuple(_trajectory(reward) for reward in group))
        for n, group in enumerate(rewards)
    ]
    flat = np.concatenate(rewards)
    inputs = AdvantageInputs(
        rewards=flat,
        groups=np.repeat(np.arange(3), [len(group) for group in rewards]),
        generated=np.ones(flat.size, dtype=np.int64),
        truncated=np.zeros(flat.size, dtype=np.bool_),
        episodes=np.concatenate([np.arange(len(group)) for group in rewards]),
        max_new_tokens=16,
    )
    expected = trajectory_advantages(inputs, AlgorithmConfig())
    np.testing.assert_allclose(one_file.advantages(groups), expected, atol=1e-12)


def _trajectory(reward: float) -> Trajectory:
    return Trajectory(
        token_ids=np.array([1, 2], dtype=np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.array([0, -1], dtype=np.float32),
        versions=np.array([-1, 0], dtype=np.int32),
        reward=reward,
        stop=StopReason.STOP,
    )


def test_own_workflow_passes_its_own_tests() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(EXAMPLES / "own_workflow.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_the_layer_of_own_workflow_fits_the_quickstart(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(load([ROOT / "configs" / "quickstart.yaml", EXAMPLES / "own_workflow.yaml"]))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    workflow = dotted(config.rollout.workflow, "rollout.workflow")()
    reward = dotted(config.rollout.reward, "rollout.reward")
    assert callable(workflow.run)
    assert [reward(text, "1 2", None) for text in (r"\boxed{1 2}", r"\boxed{2 1}", "1 2")] == [1.0, 0.2, 0.0]


def test_own_algorithm_passes_its_own_tests_and_is_found_by_the_trainer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through the same door as a run's trainer: the loss of the configuration is the one that trains."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(EXAMPLES / "own_algorithm.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    make_model(tmp_path / "model", "qwen3", seed=0, hidden_size=32, intermediate_size=48)
    paths = [ROOT / "configs" / "quickstart.yaml", EXAMPLES / "own_algorithm.yaml"]
    config = resolve(load(paths, [f"model.path={tmp_path}/model"]))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    backend = make_backend(config, Ranks())
    batch = pack([_trajectory(1.0), _trajectory(0.0)], np.array([1.0, -1.0]))
    stats = backend.train_step([batch.with_proximal(backend.logprobs(batch))])
    assert stats["trust"] == 1.0


def test_a_loss_that_is_not_there_ends_a_run_before_it_begins() -> None:
    paths = [ROOT / "configs" / "quickstart.yaml", EXAMPLES / "own_algorithm.yaml"]
    with pytest.raises(ConfigError, match=r"algorithm\.loss = 'areal_hpc\.algorithms\.losses:nothing'"):
        preflight(resolve(load(paths, ["algorithm.loss=areal_hpc.algorithms.losses:nothing"])))


@pytest.mark.parametrize(
    ("script", "limit"), [("one_file_rl.py", 200), ("own_workflow.py", 80), ("own_algorithm.py", 80)]
)
def test_the_examples_stay_short(script: str, limit: int) -> None:
    assert len((EXAMPLES / script).read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_examples_use_public_names_only(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
            names += (getattr(node, "module", "") or "").split(".")
        private = [name for name in names if name.startswith("_") and name != "__future__"]
        assert not private, f"{script.name}:{node.lineno} uses {private}"

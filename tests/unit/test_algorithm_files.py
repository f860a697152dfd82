"""Every file in configs/algorithms trains: the real trainer and loop, the ring in memory, answers from a script."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_hpc.algorithms.table import find
from areal_hpc.buffer.memory import MemoryRing
from areal_hpc.buffer.offline import OfflineReader
from areal_hpc.buffer.scan import one_by_one
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.recipes import RECIPES
from areal_hpc.config.resolve import read_config
from areal_hpc.config.schema import Config, OptimizerConfig, TrainerConfig
from areal_hpc.generation.scripted import Utf8Renderer
from areal_hpc.prompts import open_dataset
from areal_hpc.roles.wiring.offline import answers_at, check_answers, keep_weights
from areal_hpc.roles.wiring.training import make_backend
from areal_hpc.rollout.rewards import gsm8k_answer
from areal_hpc.tasks.sort_digits import SortDigits, reward
from areal_hpc.training.batching import pack
from areal_hpc.training.loop import Checkpoints, Engines, LoopSettings, TrainingLoop
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.types import Batch, StopReason, Trajectory, TrajectoryGroup
from tests.tiny_models import make_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ALL = sorted((CONFIGS / "algorithms").glob("*.yaml"))
OFFLINE = [file for file in ALL if file.stem in RECIPES and RECIPES[file.stem].data.is_offline]
FILES = [file for file in ALL if file not in OFFLINE]
SMALL = (
    "algorithm.groups_per_step=2",
    "rollout.group_size=4",
    "trainer.total_steps=4",
    "trainer.tokens_per_microbatch=128",
    "trainer.optimizer.lr=0.003",
    "trainer.optimizer.warmup_steps=0",
)
ROWS = SortDigits()
RENDERER = Utf8Renderer()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    make_model(path, "qwen3", seed=0, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    return path


@pytest.fixture(scope="module")
def teacher(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, taught the right answers."""
    optimizer = OptimizerConfig(lr=3e-3)
    trainer = TrainerConfig(total_steps=8, tokens_per_microbatch=1024, optimizer=optimizer)
    backend = ReferenceBackend(
        model_path=str(model), algorithm=AlgorithmConfig(name="sft"), trainer=trainer, temperature=1.0
    )
    given = [trajectory for position in range(8) for trajectory in trajectories(position, 0, backend)]
    for _ in range(8):
        backend.train_step([pack([one for one in given if one.reward == 1.0], np.zeros(16))])
    path = tmp_path_factory.mktemp("teacher") / "qwen3"
    backend.export(str(path))
    return path


def configuration(file: Path, *overrides: str) -> Config:
    if file in OFFLINE:
        return read_config([file], overrides)
    paths, words = [CONFIGS / "quickstart.yaml", file], (*SMALL, *overrides)
    return read_config(paths, words)


def answers(row: Mapping[str, str]) -> list[str]:
    """Two right ones and two wrong ones; one of each is cut by length."""
    return [rf"\boxed{{{row['answer']}}}", rf"!\boxed{{{row['answer']}}}", "nothing", row["prompt"]]


def trajectories(position: int, version: int, backend: ReferenceBackend) -> list[Trajectory]:
    """One prompt's answers, with log-probs of the backend's present weights as another engine would round them."""
    row = ROWS[position]
    context = RENDERER.render([{"role": "user", "content": row["prompt"]}])
    found = []
    for episode, text in enumerate(answers(row)):
        tokens = np.array([*context, *text.encode()], dtype=np.int32)
        mask = np.arange(tokens.size) >= len(context)
        blank = Trajectory(
            token_ids=tokens,
            loss_mask=mask,
            logprobs=np.zeros(tokens.size, dtype=np.float32),
            versions=np.where(mask, version, -1).astype(np.int32),
            reward=reward(text, row["answer"]),
            stop=StopReason.LENGTH if episode % 2 else StopReason.STOP,
            episode=episode,
        )
        noise = np.random.default_rng(position).normal(scale=0.02, size=tokens.size)
        logprobs = np.where(mask, backend.logprobs(pack([blank], [0.0])) + noise, 0.0)
        found.append(replace(blank, logprobs=logprobs.astype(np.float32)))
    return found


@dataclass(slots=True)
class Run:
    """A loop on one rank with a worker that fills the ring whenever the loop asks for a stop request."""

    config: Config
    backend: ReferenceBackend
    records: list[dict[str, Any]] = field(default_factory=list)
    positions: Iterator[int] = field(default_factory=count)

    def train(self) -> None:
        config = self.config
        ring = MemoryRing(
            (config.buffer.max_staleness + 1) * config.algorithm.groups_per_step, config.buffer.max_staleness
        )
        writer = ring.writer(0)

        def produce() -> bool:
            while (ticket := writer.try_reserve(position := next(self.positions))) is not None:
                group = tuple(trajectories(position, ticket.version.step, self.backend))
                writer.seal(ticket, TrajectoryGroup(position=position, prompt_id=str(position), trajectories=group))
            self.positions = count(position)
            return False

        loop = TrainingLoop(
            epoch=1,
            step=0,
            settings=LoopSettings(total_steps=4, checkpoint_every=100, max_new_tokens=16, starve_s=60.0, seed=1),
            algorithm=config.algorithm,
            ranks=Ranks(),
            backend=self.backend,
            fetch=one_by_one(ring.reader.read),
            reader=ring.reader,
            engines=Engines(publish=lambda version, weights: {}),
            checkpoints=Checkpoints(begin=lambda step: None, settle=lambda wait: None),
            journal=lambda step, trained: None,
            stop_requested=produce,
            record=lambda kind, values: self.records.append(dict(values)),
        )
        loop.announce()
        assert loop.run() is True


def margin(batch: Batch, backend: ReferenceBackend) -> float:
    """How much likelier the right answers are than the wrong ones, in nats per token."""
    logprobs, per_sequence = backend.logprobs(batch), np.repeat(np.arange(batch.num_sequences) % 4 < 2, batch.lengths)
    right = batch.loss_mask & per_sequence
    wrong = batch.loss_mask & ~per_sequence
    return float(logprobs[right].mean() - logprobs[wrong].mean())


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_four_steps_make_right_answers_likelier(file: Path, model: Path, request: pytest.FixtureRequest) -> None:
    taught = file.stem == "distillation"
    words = (f"algorithm.kl.reference={request.getfixturevalue('teacher')}",) if taught else ()
    config = configuration(file, *words)
    backend = ReferenceBackend(
        model_path=str(model), algorithm=config.algorithm, trainer=config.trainer, temperature=1.0, seed=1
    )
    batch = pack([t for position in range(100, 104) for t in trajectories(position, 0, backend)], np.zeros(16))
    before = margin(batch, backend)
    run = Run(config=config, backend=backend)
    run.train()
    assert margin(batch, backend) > before + 0.01
    assert [record["updates"] for record in run.records] == [2.0] * 4
    assert all(math.isfinite(record["loss"]) for record in run.records)
    assert all(record["nonfinite_fraction"] == 0.0 for record in run.records)
    assert all(0 < record["kept_fraction"] <= 1.0 for record in run.records)
    assert max(record["staleness_max"] for record in run.records) == 2.0  # the ring was full of older weights' answers
    assert all(("reference_kl" in record) == (config.algorithm.kl.coef > 0) for record in run.records)
    if find(config.algorithm.name).critic:
        assert run.records[-1]["value_loss"] < run.records[0]["value_loss"]


@pytest.mark.parametrize("file", OFFLINE, ids=lambda path: path.stem)
def test_ten_steps_on_given_answers_lower_the_loss(file: Path, quickstart_model: Path, tmp_path: Path) -> None:
    """The file as it is but for its length, with the real data, template, reader, loop and trainer."""
    words = (f"model.path={quickstart_model}", "algorithm.groups_per_step=8", "prompts.limit=64")
    config = configuration(file, *words)
    config = replace(config, trainer=replace(config.trainer, optimizer=OptimizerConfig(lr=1e-3)))
    check_answers(config)
    backend = make_backend(config, Ranks())
    dataset = open_dataset(config.prompts, "train", config.seed)
    reader = OfflineReader(answers_at(config), num_rows=len(dataset), max_tokens=config.model.max_tokens)
    records: list[dict[str, Any]] = []
    loop = TrainingLoop(
        epoch=1,
        step=0,
        settings=LoopSettings(total_steps=10, checkpoint_every=100, max_new_tokens=16, starve_s=60.0, seed=1),
        algorithm=config.algorithm,
        ranks=Ranks(),
        backend=backend,
        fetch=one_by_one(reader.read),
        reader=reader,
        engines=Engines(publish=keep_weights),
        checkpoints=Checkpoints(begin=lambda step: None, settle=lambda wait: None),
        journal=lambda step, trained: None,
        stop_requested=lambda: False,
        record=lambda kind, values: records.append(dict(values)),
    )
    assert loop.run() is True
    losses = [record["loss"] for record in records]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert all(record["offline"] is True and "reward_mean" not in record for record in records)
    assert reader.state_dict()["consumed"]["low"] == 80
    if config.algorithm.name != "sft":
        assert records[0]["loss"] == pytest.approx(math.log(2), rel=1e-4)
        assert records[-1]["accuracy"] > 0.6
    backend.export(str(tmp_path / "out"))
    exported = (tmp_path / "out" / "config.json").read_text(encoding="utf-8")
    assert ("ForSequenceClassification" in exported) == (config.algorithm.name == "reward_model")


def test_every_algorithm_has_its_file_and_every_file_its_algorithm() -> None:
    assert {configuration(file).algorithm.name for file in ALL} == set(RECIPES)
    assert set(RECIPES) <= {file.stem for file in ALL}
    guide = (CONFIGS / "algorithms" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{file.stem}`" in guide for file in ALL)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("gsm8k_*.yaml")), ids=lambda path: path.stem)
def test_real_models_resolve_offline_and_read_a_data_set_on_disk(file: Path, tmp_path: Path) -> None:
    rows = '{"question": "2 and 2?", "answer": "2+2=4\\n#### 4"}\n'
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(rows * 3, encoding="utf-8")
    overrides = [f"prompts.train={tmp_path}/train.jsonl", f"prompts.eval={tmp_path}/test.jsonl"]
    paths = [CONFIGS / "gsm8k_grpo.yaml", *([] if file.stem == "gsm8k_grpo" else [file])]
    config = read_config(paths, overrides)
    assert config.name == file.stem
    assert config.algorithm.name == file.stem.removeprefix("gsm8k_")
    dataset = open_dataset(config.prompts, "train", config.seed)
    assert len(dataset) == 3
    assert gsm8k_answer("so it is #### 4", dataset[0][config.prompts.answer_key], None) == 1.0

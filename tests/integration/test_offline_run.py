"""Offline algorithms as a person runs them: one process, from a file of rows to a model, whatever is killed."""

from __future__ import annotations

import asyncio
import filecmp
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from launched import Launched, command, newest_checkpoint
from ranks import run_ranks
from torch.distributed import ProcessGroup

from areal_hpc.config.algorithm import AlgorithmConfig, DpoConfig, ProximalMethod
from areal_hpc.config.schema import OptimizerConfig, TrainerConfig
from areal_hpc.errors import ConfigError
from areal_hpc.fs import read_json
from areal_hpc.report.ledger import prove_run
from areal_hpc.rollout.reward_pool import RewardPool
from areal_hpc.run_dir import RunDir
from areal_hpc.training.batching import plan_step
from areal_hpc.training.credit import assess
from areal_hpc.training.preference import PreferenceBackend, RewardModelBackend
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.reference import ReferenceBackend
from areal_hpc.types import Batch, Prompt

STEPS = 40
NUM_ROWS, NUM_LONG = 80, 2
LIKED, DISLIKED = "thank you", "go away"
CONFIG: dict[str, Any] = {
    "deterministic": True,
    "model": {"max_tokens": 128},
    "algorithm": {"groups_per_step": 4, "minibatches": 2},
    "trainer": {"total_steps": STEPS, "optimizer": {"lr": 3.0e-3}},
    "evaluation": {"every_steps": 20, "num_prompts": 8},
    "checkpoint": {"every_steps": 5},
    "limits": {"stop_s": 30.0},
}


def rows(count: int, *, long: int = 0) -> Iterator[dict[str, Any]]:
    for number in range(count):
        wish = "please " * (40 if number < long else number % 5)
        yield {"prompt": f"{wish}{number}?", "chosen": LIKED, "rejected": DISLIKED, "response": LIKED}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    directory = tmp_path_factory.mktemp("offline")
    for name, data in (("train", rows(NUM_ROWS, long=NUM_LONG)), ("eval", rows(8))):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
    prompts = {"train": str(directory / "train.jsonl"), "eval": str(directory / "eval.jsonl")}
    made = CONFIG | {"prompts": prompts, "run_root": str(directory), "model": {**CONFIG["model"], "path": str(model)}}
    (directory / "config.yaml").write_text(yaml.safe_dump(made), encoding="utf-8")
    return directory


def start(files: Path, name: str, algorithm: str, *words: str) -> Launched:
    settings = (f"name={name}", f"algorithm.name={algorithm}", *words)
    return Launched(files / name, str(files / "config.yaml"), *settings)


@pytest.fixture(scope="module")
def undisturbed(files: Path) -> Launched:
    started = start(files, "undisturbed", "dpo")
    assert started.wait() == 0, started.text
    return started


def evaluations(run: RunDir) -> dict[int, dict[str, float]]:
    told = {step: read_json(run.evaluation(step)) for step in run.evaluated_steps()}
    return {step: {name: result[name] for name in ("loss", "accuracy", "margin")} for step, result in told.items()}


def test_preferences_are_learned_and_every_row_is_consumed_once(undisturbed: Launched) -> None:
    found = evaluations(undisturbed.run)
    assert sorted(found) == [0, 20, STEPS]
    assert found[0] == {"loss": pytest.approx(math.log(2)), "accuracy": 0.0, "margin": 0.0}
    assert found[STEPS]["loss"] < 0.5
    assert found[STEPS]["accuracy"] == 1.0
    proof = prove_run(undisturbed.run)
    assert proof.proven, proof.violations
    assert (proof.steps, proof.trained, proof.num_rows) == (STEPS, 4 * STEPS, NUM_ROWS)
    assert proof.finished_epochs == 2
    assert sum(proof.consumed_by_drop.values()) >= 2 * NUM_LONG  # left out, and not one of them cut


def test_only_the_trainer_runs_and_its_loss_is_what_is_shown(undisturbed: Launched) -> None:
    assert {path.stem for path in undisturbed.run.newest_attempt().telemetry.iterdir()} == {"trainer-0", "launcher-0"}
    text = undisturbed.text
    assert "evaluation loss 0.6931, accuracy 0 at step 0" in text
    assert "| loss " in text and "reward" not in text and "staleness" not in text
    summary = read_json(undisturbed.run.summary)
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["evaluations"][-1]["step"] == STEPS
    told = command("status", undisturbed.run.root).stdout
    assert "loss" in told and "staleness" not in told


@pytest.mark.long
def test_C3_a_killed_trainer_ends_with_the_same_bits(files: Path, undisturbed: Launched) -> None:
    arguments = f"prompts.task_args={{path: {files / 'train.jsonl'}, after: {files / 'killed once'}}}"
    started = start(files, "killed", "dpo", "prompts.train=tiny_task:Deadly", arguments)
    assert started.wait() == 0, started.text
    assert "trainer-0 ended with signal 9 (SIGKILL)" in started.text
    newest, expected = newest_checkpoint(started.run), newest_checkpoint(undisturbed.run)
    assert newest.version.step == STEPS
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert filecmp.cmp(newest.path / name, expected.path / name, shallow=False), name
    assert evaluations(started.run) == evaluations(undisturbed.run)
    proof = prove_run(started.run)
    assert proof.proven, proof.violations
    assert (proof.attempts, proof.trained) == (2, 4 * STEPS)


def test_a_data_set_that_has_changed_is_refused(files: Path, undisturbed: Launched) -> None:
    other = command(
        *("run", files / "config.yaml", "name=undisturbed", "algorithm.name=dpo", "--resume"),
        *(f"trainer.total_steps={STEPS + 1}", "prompts.limit=50"),
    )
    assert other.returncode == 2
    assert "prompts.limit (was 0) would change within one run" in other.stderr


def test_a_mistake_in_a_row_is_named_before_anything_runs(files: Path) -> None:
    bad = files / "bad.jsonl"
    bad.write_text('{"prompt": "1?", "chosen": "a", "rejected": "b"}\n{"prompt": "2?", "chosen": "a"}\n', "utf-8")
    told = command("run", files / "config.yaml", "name=bad", "algorithm.name=dpo", f"prompts.train={bad}")
    assert told.returncode == 2
    assert f"row {bad}/1: no column 'rejected'" in told.stderr
    assert not (files / "bad").exists()


# A reward model, from pairs to a reward


@pytest.mark.long
def test_a_reward_model_scores_rollouts(files: Path, tmp_path: Path) -> None:
    started = start(files, "scorer", "reward_model", "trainer.total_steps=20", "trainer.ranks=2")
    assert started.wait() == 0, started.text
    exported = files / "exported"
    told = command("export", started.run.root, exported)
    assert "give it as rollout.reward to any run, written with a /" in told.stdout, told.stderr
    prompt = Prompt(position=0, id="a", messages=({"role": "user", "content": "please 7?"},))
    liked, disliked = asyncio.run(scored(exported, prompt, LIKED, DISLIKED))
    assert liked > disliked
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    for text, reward in ((LIKED, liked), (DISLIKED, disliked)):
        conversation = [*prompt.messages, {"role": "assistant", "content": text}]
        written = tokenizer.apply_chat_template(conversation, tokenize=False).removesuffix("\n")
        with torch.no_grad():
            expected = classifier(**tokenizer(written, return_tensors="pt", add_special_tokens=False)).logits
        assert reward == pytest.approx(expected.item(), abs=1e-4)


async def scored(directory: Path, prompt: Prompt, *texts: str) -> list[float]:
    pool = RewardPool(f"{directory}/", workers=1, timeout_s=60.0)
    try:
        await pool.start()
        return [await pool.score(text, prompt) for text in texts]
    finally:
        await pool.close()


def test_a_language_model_is_no_reward(model: Path) -> None:
    prompt = Prompt(position=0, id="a", messages=({"role": "user", "content": "?"},))
    with pytest.raises(ConfigError, match=r"is no reward model: it lacks 1 weights, first score.weight"):
        asyncio.run(scored(model, prompt, "a"))


@pytest.mark.long
def test_E15_a_score_of_zero_is_a_reward(model: Path, tmp_path: Path) -> None:
    """A new head scores everything 0.0: a number like any other, not a missing one."""
    trainer = TrainerConfig(total_steps=1)
    settings = algorithm("reward_model")
    backend = RewardModelBackend(model_path=str(model), algorithm=settings, trainer=trainer, temperature=1.0)
    backend.export(str(tmp_path / "new"))
    prompt = Prompt(position=0, id="a", messages=({"role": "user", "content": "?"},))
    assert asyncio.run(scored(tmp_path / "new", prompt, "a")) == [0.0]


# Ranks


def algorithm(name: str) -> AlgorithmConfig:
    return AlgorithmConfig(name=name, decoupled=False, proximal=ProximalMethod.BEHAVIOUR, dpo=DpoConfig(beta=0.3))


def whole() -> Batch:
    generator = np.random.default_rng(2)
    lengths = np.array([40, 6, 11, 25, 5, 18, 9, 9, 30, 7])
    mask = np.concatenate([np.arange(n) >= 3 for n in lengths])
    return Batch(
        token_ids=generator.integers(0, 256, mask.size).astype(np.int32),
        loss_mask=mask,
        behaviour=np.zeros(mask.size, dtype=np.float32),
        versions=np.full(mask.size, -1, dtype=np.int32),
        advantages=mask.astype(np.float32),
        boundaries=np.concatenate([[0], lengths.cumsum()]).astype(np.int32),
    )


def two_updates(group: ProcessGroup | None, path: Path, name: str) -> list[float]:
    """Losses of two updates on the same five pairs, and of the weights after them."""
    kind: type[ReferenceBackend] = {"sft": ReferenceBackend, "dpo": PreferenceBackend}.get(name, RewardModelBackend)
    ranks = Ranks(group)
    backend = kind(
        model_path=str(path),
        algorithm=algorithm(name),
        trainer=TrainerConfig(total_steps=9, tokens_per_microbatch=96, optimizer=OptimizerConfig(lr=1e-3)),
        temperature=1.0,
        group=group,
    )
    batch = whole()
    together = 1 if name == "sft" else 2
    (shares,) = plan_step(batch.lengths, np.ones(10), 1, ranks.size, 1, together=together)
    mine = batch.select(shares[ranks.rank])
    (mine,) = assess([mine], [np.zeros(mine.num_sequences)], backend, algorithm(name), ranks)
    losses = [backend.train_step([mine])["loss"] for _ in range(2)]
    return [*losses, backend.evaluate(mine)["loss"]]


@pytest.mark.long
@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
def test_E8_any_number_of_ranks_makes_the_same_steps(name: str, model: Path) -> None:
    expected = two_updates(None, model, name)
    for losses in run_ranks(3, two_updates, model, name):
        assert losses == pytest.approx(expected, rel=1e-5)

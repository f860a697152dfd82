"""Runs of several ranks, engines and workers, and runs whose rewards or inputs do not work."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from launched import (
    GROUPS,
    STEPS,
    Launched,
    arguments,
    assert_stopped_in_order,
    groups_in,
    launched,
    num_consumed,
)

from areal_hpc.cli import main


@pytest.fixture(scope="module")
def hostile(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A finished run of two workers whose rewards hang or raise for two of three prompts."""
    words = ("rollout.workers=2", "weights.transport=disk", "buffer.max_staleness=3", "algorithm.proximal=loglinear")
    words += ("rollout.reward=tiny_task:sometimes", "rollout.reward_timeout_s=0.3", "rollout.attempts=1")
    words += ("weights.delta=true", "generation.max_requests=2")
    with launched(tmp_path_factory.mktemp("hostile"), model, *words, "rollout.reward_workers=2") as started:
        assert started.wait() == 0, started.text
    return started


def assert_finished(started: Launched, max_staleness: int) -> None:
    assert started.left_over() == []
    steps = started.records("step")
    assert [record.number("step") for record in steps] == list(range(1, STEPS + 1))
    assert max(record.number("ring_staleness_max") or 0 for record in steps) <= max_staleness


def assert_savings_are_told(started: Launched) -> None:
    """At this learning rate float32 weights change nearly all, and travel whole then: it is told all the same."""
    told = [(record.number("weight_bytes"), record.number("weight_bytes_saved")) for record in started.records("step")]
    assert all(sent is not None and saved is not None for sent, saved in told)
    assert len({sent + saved for sent, saved in told}) == 1  # type: ignore[operator]  # both are there


def test_two_ranks_and_two_engines_train_synchronously(model: Path, tmp_path: Path) -> None:
    words = ("trainer.ranks=2", "algorithm.minibatches=2", "generation.replicas=2", "buffer.max_staleness=0")
    with launched(tmp_path, model, *words, "weights.delta=true") as started:
        assert started.wait() == 0, started.text
    assert_finished(started, max_staleness=0)
    assert_savings_are_told(started)
    assert num_consumed(started.run) == STEPS * GROUPS


def test_two_workers_over_the_disk_transport_finish(hostile: Launched) -> None:
    assert_finished(hostile, max_staleness=3)
    assert_savings_are_told(hostile)


def test_A38_two_trainer_ranks_stop_together_and_one_that_dies_ends_the_run(model: Path, tmp_path: Path) -> None:
    words = ("trainer.ranks=2", "trainer.total_steps=400")
    with launched(tmp_path, model, *words) as started:
        started.wait_for_step(1)
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 75, started.text
        stopped_at = assert_stopped_in_order(started)
    with launched(tmp_path, model, *words, "limits.attempts=0", "--resume") as again:
        again.wait_for_step(stopped_at + 1)
        again.roles()["trainer-1"].kill()
        assert again.wait() == 1
        assert "areal-hpc: trainer-1 ended with signal 9 (SIGKILL)" in again.text
        assert again.left_over() == []


# Rewards and inputs that do not work


def test_samples_whose_reward_hangs_or_raises_are_failed_and_never_0(hostile: Launched) -> None:
    outcomes = [record.values["outcome"] for record in hostile.records("group")]
    assert outcomes.count("failed") >= 2
    reasons = {record.values["reason"] for record in hostile.records("group") if record.values["outcome"] == "failed"}
    assert reasons <= {"RewardError", "RewardRaised"}
    trained = [trajectory.reward for _, group in groups_in(hostile.run) for trajectory in group.trajectories]
    assert min(trained) >= 1.0, "a failed reward was counted"  # an empty answer is worth exactly 1
    steps = hostile.records("step")
    assert [record.number("step") for record in steps] == list(range(1, STEPS + 1))
    assert all((record.number("reward_mean") or 0.0) >= 1.0 for record in steps)
    dropped = steps[-1].number("ring_dropped_failed")
    assert dropped is not None and 0 < dropped <= outcomes.count("failed")


def test_a_reward_that_never_works_ends_the_run_and_says_so(model: Path, tmp_path: Path) -> None:
    words = ("rollout.reward=tiny_task:never", "rollout.attempts=1", "rollout.concurrency=4", "limits.restarts=1")
    with launched(tmp_path, model, *words) as started:
        assert started.wait() == 1
        assert "rollout-0 ended with exit code 1; it is started again" in started.text
        assert "areal-hpc: rollout-0 died more often than limits.restarts = 1 allows in 600 s: " in started.text
        assert "this prompt has no reward" not in started.text
        assert "no text has a reward" in started.text
        assert started.left_over() == []


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.path=/nowhere/model", "model.path: there is no directory /nowhere/model"),
        ("prompts.train=/nowhere/data.jsonl", "/nowhere/data.jsonl"),
        ("prompts.train=tiny_task:Missing", "tiny_task:Missing"),
        ("rollout.reward=tiny_task:missing", "tiny_task:missing"),
        ("rollout.reward=no_such_module:reward", "no_such_module"),
        ("rollout.workflow=tiny_task:Missing", "rollout.workflow = 'tiny_task:Missing' cannot be imported"),
    ],
)
def test_what_is_missing_is_found_before_anything_is_written(
    word: str, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments(tmp_path, model), word]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    assert message in told
    assert not (tmp_path / "run").exists()

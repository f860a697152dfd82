"""A run whose episodes an agent runs: the OpenAI client against each worker's own service, all processes real."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import GROUPS, STEPS, groups_in, launched, newest_checkpoint, num_consumed
from tiny_models import make_model

from areal_hpc.fs import read_json


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    make_model(directory, "qwen3", seed=3)
    return directory


def test_an_agents_turns_are_what_the_run_trains_on(tmp_path: Path, model: Path) -> None:
    words = ("agent.python=tiny_agent:TwoTurns", "evaluation.every_steps=2", "evaluation.num_prompts=2")
    with launched(tmp_path, model, *words) as started:
        assert started.wait() == 0, started.text
    run = started.run
    assert newest_checkpoint(run).version.step == STEPS
    assert num_consumed(run) == STEPS * GROUPS
    first = started.records("step")[0]
    assert first.number("staleness_max") == 0
    assert first.number("logprob_gap_max") < 1e-4  # the trainer finds the engine's log-probs at the very same tokens
    attempts = [record.values for record in started.records("agent")]
    assert attempts and all(attempt["turns"] == 2 and attempt["start"] == 1 for attempt in attempts)
    groups = [group for _, group in groups_in(run)]
    for group in groups:
        episodes = {trajectory.episode for trajectory in group.trajectories}
        assert episodes == {0, 1}
        for trajectory in group.trajectories:
            assert 1.0 <= trajectory.reward < 3.0  # what the agent gave, not what the reward function would
            assert (trajectory.versions[trajectory.loss_mask] >= 0).all()
    # Answers that ended their turn are continued by the second turn; those that were cut begin a branch.
    assert {len(group.trajectories) for group in groups} <= {2, 3, 4}
    assert read_json(run.evaluation(STEPS))["reward_mean"] >= 1.0
    url = read_json(run.attempt(1).endpoint("rollout", 0))["agents_url"]
    assert url.startswith("http://127.0.0.1:")

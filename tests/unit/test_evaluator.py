"""Which evaluation is made next, what its result says, and that the evaluator ends when the last one has its result."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rollout_fakes import Engine, Records, Stream, config, episodes_of, failing, parity, position_of, run

from areal_hpc.config.schema import EvaluationConfig, RolloutConfig
from areal_hpc.errors import ConfigError, GenerationError, RewardError
from areal_hpc.exits import EXIT_STOPPED
from areal_hpc.fs import read_json
from areal_hpc.protocols import Episode, Workflow
from areal_hpc.roles import evaluator
from areal_hpc.roles.evaluator import _answer_all, _result
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.episodes import EvaluationParts
from areal_hpc.roles.wiring.evaluations import Agenda
from areal_hpc.run_dir import RunDir
from areal_hpc.types import GenerationRequest, Prompt, StopReason, Trajectory


class Parts:
    """The engines' version, one after the other, what was owed in the beginning and what was evaluated before."""

    def __init__(self, versions: list[int | None], agenda: Agenda, done: set[int]) -> None:
        self.versions, self.start, self.done = versions, agenda, done

    def agenda(self) -> Agenda:
        return self.start

    def newest_version(self) -> int | None:
        return self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]

    def evaluated(self) -> set[int]:
        return set(self.done)


@dataclasses.dataclass
class Trainer:
    total_steps: int


@dataclasses.dataclass
class Settings:
    evaluation: EvaluationConfig
    trainer: Trainer
    rollout: RolloutConfig | None = None


@dataclasses.dataclass
class Process:
    config: Settings


@pytest.mark.parametrize(
    ("versions", "agenda", "done", "expected"),
    [
        ([None, 0, 1, 2, 3, 4, 5, 6], Agenda(), set(), [0, 2, 4, 6]),
        ([0, 3, 6], Agenda(), set(), [0, 2, 6]),
        ([0, 5, 6], Agenda(), {0}, [4, 6]),  # the newest stands for those that were missed
        ([6], Agenda(through=6, owed=(6,)), {0, 2, 4}, [6]),  # the run ended between its last step and its evaluation
        ([6], Agenda(through=6), set(), []),
        ([4, 5, 6], Agenda(through=4, owed=(2, 4)), {0}, [4, 6]),
        ([6], Agenda(), {0, 6}, []),
        ([9], Agenda(), {0, 8}, []),  # total_steps was lowered after step 8: nothing is due, and nothing is waited for
    ],
)
def test_C20_the_evaluator_makes_up_what_is_due_and_ends(
    versions: list[int | None],
    agenda: Agenda,
    done: set[int],
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluated = []

    async def evaluate(_process: Any, _parts: Any, step: int) -> None:
        evaluated.append(step)

    monkeypatch.setattr(evaluator, "_evaluate", evaluate)
    monkeypatch.setattr(evaluator, "POLL_S", 0.0)
    process: Any = Process(Settings(EvaluationConfig(every_steps=2), Trainer(6)))
    parts: Any = Parts(versions, agenda, done)
    asyncio.run(asyncio.wait_for(evaluator._evaluate_all(process, parts), timeout=10))
    assert evaluated == expected


# One evaluation

TWO_SAMPLES = EvaluationConfig(samples=2)


def parts_of(engine: Engine, records: Records, num_prompts: int = 6, **parts: Any) -> EvaluationParts:
    knobs = {"config": config(group_size=2, attempts=2), "record": records}
    stream = Stream()
    return EvaluationParts(
        prompts=[stream.next() for _ in range(num_prompts)],
        episodes=episodes_of(engine, **knobs | parts),
        newest_version=lambda: 0,
        agenda=Agenda,
        evaluated=set,
    )


def test_no_more_prompts_are_asked_at_once_than_there_are_places() -> None:
    """So that the others wait before their time limit begins, and not in an engine's queue behind it."""

    async def test() -> None:
        engine = Engine()
        groups = await _answer_all(parts_of(engine, Records()), "a1.eval-4", 2)
        assert engine.most_open == 2 * 2
        assert [len(trajectories) for trajectories, _ in groups] == [2] * 6
        result = _result(4, groups, TWO_SAMPLES)
        told = {"step": 4, "reward_mean": 0.5, "samples": 12, "failed": 0, "version_min": 5, "version_max": 5}
        assert result.items() >= told.items()
        assert (result["pass_at_1"], result["pass_at_2"]) == (0.5, 1.0)  # of each prompt's two samples one is right

    run(test())


def test_what_fails_is_asked_again_and_else_counted_and_never_0() -> None:
    async def test() -> None:
        error, records = GenerationError("gone"), Records()
        engine = Engine(failing((1, 1, 0), (2, 1, 0), (2, 1, 1), error=error))
        groups = await _answer_all(parts_of(engine, records), "a1.eval-4", 6)
        result = _result(4, groups, TWO_SAMPLES)
        assert (result["samples"], result["failed"]) == (11, 1)
        assert result["reward_mean"] == pytest.approx(5 / 11)
        failures = [(f["position"], f["sample"], f["attempt"]) for f in records.kept["failure"]]
        assert failures == [(1, 1, 0), (2, 1, 0), (2, 1, 1)]
        ids = [request.request_id for request in engine.requests]
        assert len(set(ids)) == len(ids) == 14

    run(test())


def test_an_evaluation_without_one_answer_is_a_result_that_says_why_and_no_zero(tmp_path: Path) -> None:
    async def broken(text: str, prompt: Prompt) -> float:
        raise RewardError("division by zero")

    async def test() -> None:
        records, directory = Records(), RunDir.create(tmp_path / "run")
        process: Any = Evaluating(directory, records)
        await evaluator._evaluate(process, parts_of(Engine(), records, score=broken), 4)
        (recorded,) = records.kept["evaluation"]
        expected = {
            "step": 4,
            "samples": 0,
            "failed": 12,
            "reason": "all 12 samples failed, the last by RewardError: division by zero",
            "prompts": 6,
        }
        assert {key: value for key, value in recorded.items() if key != "seconds"} == expected
        answers = read_json(directory.evaluation(4))["answers"]
        assert answers == [{"id": f"prompt-{position}", "rewards": []} for position in range(6)]
        assert read_json(directory.evaluation(4)) == {"epoch": 1, **recorded, "answers": answers}
        assert directory.evaluated_steps() == {4}, "it is not due again, and the trainer does not wait for it"

    run(test())


class Evaluating:
    """What an evaluation needs of its process."""

    epoch = 1

    def __init__(self, directory: RunDir, records: Records) -> None:
        self.run = directory
        self.recorder = SimpleNamespace(record=records)
        self.config = SimpleNamespace(rollout=config(), evaluation=EvaluationConfig(every_steps=2, samples=2))


def test_a_mistake_ends_the_evaluation_at_once() -> None:
    async def test() -> None:
        error = ConfigError("no such reward")
        engine = Engine(failing((1, 1, 0), error=error))
        with pytest.raises(ConfigError) as caught:
            await _answer_all(parts_of(engine, Records()), "a1.eval-4", 6)
        assert caught.value is error
        assert engine.open == 0

    run(test())


@dataclasses.dataclass
class Signalled:
    """As much of a role's process as the evaluator's watch needs; a signal raises the flag, and only that."""

    config: Settings
    starting: ExitStack = dataclasses.field(default_factory=ExitStack)
    stop_flag: threading.Event = dataclasses.field(default_factory=threading.Event)
    epoch: int = 1

    async def watch_stop(self) -> None:
        await RoleProcess.watch_stop(self, poll_s=0.001)  # type: ignore[arg-type]

    def stopping(self) -> bool:
        return self.stop_flag.is_set()


def test_fault_12_a_signal_during_an_evaluation_ends_it_without_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has the requests and answers none of them; the evaluation is due again after the restart."""
    rollout = config(concurrency=2)
    settings = Settings(EvaluationConfig(every_steps=2), Trainer(6), rollout)
    process = Signalled(settings)

    async def never(_request: GenerationRequest, count: int) -> None:
        if count == 4:  # two prompts with two samples each are open
            signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

    engine = Engine(never)

    @asynccontextmanager
    async def make(_process: Any) -> AsyncIterator[EvaluationParts]:
        yield parts_of(engine, Records())

    monkeypatch.setattr(evaluator, "make_evaluation", make)
    monkeypatch.setattr(evaluator, "publish_json", lambda *_: pytest.fail("there is no result"))
    monkeypatch.setattr(os, "nice", lambda _: 0)
    before = signal.signal(signal.SIGTERM, lambda *_: process.stop_flag.set())
    try:
        ended: Any = evaluator.main(process)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == EXIT_STOPPED
    assert len(engine.requests) == 4
    assert engine.open == 0, "a request was left behind"


def branch(reward: float, version: int) -> Trajectory:
    return Trajectory(
        token_ids=np.zeros(1, dtype=np.int32),
        loss_mask=np.ones(1, dtype=np.bool_),
        logprobs=np.zeros(1, dtype=np.float32),
        versions=np.full(1, version, dtype=np.int32),
        reward=reward,
        stop=StopReason.STOP,
    )


class Branching(Workflow):
    """Sample 0 leaves three branches of reward 0, sample 1 leaves one of reward 1; all of position 3 leave nothing."""

    async def run(self, prompt: Prompt, episode: Episode) -> Sequence[Trajectory]:
        reward = await parity(episode.id, prompt)
        num_branches = 0 if position_of(episode.id) == 3 else 1 if reward else 3
        return [branch(reward, prompt.position) for _ in range(num_branches)]


def test_the_mean_is_over_episodes_however_many_branches_they_left() -> None:
    async def test() -> None:
        groups = await _answer_all(parts_of(Engine(), Records(), workflow=Branching()), "a1.eval-4", 6)
        assert sum(len(trajectories) for trajectories, _ in groups) == 5 * 4
        result = _result(4, groups, TWO_SAMPLES)
        assert (result["reward_mean"], result["samples"], result["failed"]) == (0.5, 10, 2)
        assert (result["version_min"], result["version_max"]) == (0, 5)

    run(test())


def test_two_evaluations_differ_by_their_weights_only() -> None:
    async def test() -> None:
        asked: list[dict[tuple[int, Any], int | None]] = []
        for step in (0, 4):
            engine = Engine()
            await _answer_all(parts_of(engine, Records()), f"a1.eval-{step}", 6)
            asked.append({(r.token_ids[0], r.request_id.partition(".s")[2]): r.sampling.seed for r in engine.requests})
        assert asked[0] == asked[1]
        assert len(set(asked[0].values())) == 12

    run(test())

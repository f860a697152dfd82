"""The evaluator: answers held-out prompts on the run's own engines whenever an evaluation is due.

    a run               at the start, each ``evaluation.every_steps`` versions, and at the last one
    areal-hpc eval      once, by the weights that the engines were started with; there is no trainer

One evaluation runs on whatever version the engines serve while it goes on; the versions that really sampled are part of
the result. What is due is committed with the weights (``wiring/evaluations.py``), so one that a kill has cost is due
again after the restart. Steps between two looks are not caught up one by one: the newest stands for them. One whose
samples have all failed is a result as well, without a reward but with the reason: a reward that is broken is no fault
of this process, and training may go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from areal_hpc.algorithms.pass_at_k import measure
from areal_hpc.config.schema import EvaluationConfig
from areal_hpc.exits import EXIT_DONE, EXIT_STOPPED
from areal_hpc.fs import publish_json
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.episodes import EvaluationParts, make_evaluation
from areal_hpc.rollout.episodes import Running, together
from areal_hpc.types import Prompt, Trajectory, episode_means
from areal_hpc.waits import LEADER, waiting

log = logging.getLogger(__name__)

POLL_S = 0.2
NICENESS = 5

Answered = tuple[list[Trajectory], Exception | None]
"""One prompt's trajectories, and a failure where some of its samples have none."""


def main(process: RoleProcess) -> int:
    os.nice(NICENESS)
    finished = asyncio.run(_watch(process))
    return EXIT_DONE if finished else EXIT_STOPPED


async def _watch(process: RoleProcess) -> bool:
    """Evaluate what is due until the last step has its result (True) or a stop request comes (False)."""
    async with make_evaluation(process) as parts:
        process.starting.close()
        evaluation = process.config.evaluation
        once = _evaluate(process, parts, evaluation.step) if evaluation.checkpoint else None
        working = asyncio.create_task(once or _evaluate_all(process, parts))
        stopping = asyncio.create_task(process.watch_stop())
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        stopping.cancel()
        await asyncio.wait((working, stopping))
        if working.cancelled():
            return False
        working.result()
        return True


async def _evaluate_all(process: RoleProcess, parts: EvaluationParts) -> None:
    config, total = process.config.evaluation, process.config.trainer.total_steps
    version = await _newer(parts, None)
    agenda, done = parts.agenda(), parts.evaluated()
    while True:
        if owed := agenda.at(version, config, total, done).owed:
            await _evaluate(process, parts, owed[-1])
            done.add(owed[-1])
        elif version >= total:
            return
        else:
            version = await _newer(parts, version)


async def _newer(parts: EvaluationParts, known: int | None) -> int:
    """A version after ``known``, as soon as there is one: the trainer says it, in a file."""
    with waiting("newer weights", LEADER, limit_s=None):
        while (version := parts.newest_version()) is None or version == known:  # noqa: ASYNC110  it comes in a file
            await asyncio.sleep(POLL_S)
    return version


async def _evaluate(process: RoleProcess, parts: EvaluationParts, step: int) -> None:
    began = time.monotonic()
    groups = await _answer_all(parts, f"a{process.epoch}.eval-{step}", process.config.rollout.concurrency)
    result = _result(step, groups, process.config.evaluation)
    result |= {"prompts": len(parts.prompts), "seconds": time.monotonic() - began}
    if "reason" in result:
        log.warning("the evaluation at step %d failed: %s", step, result["reason"])
    answers = [
        {"id": prompt.id, "rewards": rewards.tolist()}
        for prompt, rewards in zip(parts.prompts, _rewards(groups), strict=True)
    ]
    publish_json(process.run.evaluation(step), {"epoch": process.epoch, **result, "answers": answers})
    process.recorder.record("evaluation", result)


async def _answer_all(parts: EvaluationParts, name: str, concurrency: int) -> list[Answered]:
    """Every prompt's answers, and what failed the last of those without. Waiting for a place counts for no limit."""
    places = asyncio.Semaphore(concurrency)

    async def answer(prompt: Prompt) -> Answered:
        async with places:
            return await parts.episodes.run(Running(prompt, name))

    return await together(answer(prompt) for prompt in parts.prompts)


def _rewards(groups: Sequence[Answered]) -> list[NDArray[np.float64]]:
    """For each prompt the rewards of its episodes; an episode that failed for good has none."""
    return [
        episode_means([t.reward for t in answers], [t.episode for t in answers]) if answers else np.zeros(0)
        for answers, _ in groups
    ]


def _result(step: int, groups: Sequence[Answered], config: EvaluationConfig) -> dict[str, float | str]:
    """The evaluation's record, with pass@k; an episode that failed for good is counted, and never as reward 0.

    Where not one sample succeeded there is no "reward_mean", and a "reason".
    """
    rewards, num_samples = _rewards(groups), len(groups) * config.samples
    num_answered = sum(one.size for one in rewards)
    if not num_answered:
        last = next((failure for _, failure in reversed(groups) if failure is not None), None)
        what = "no sample left a trajectory" if last is None else f"the last by {type(last).__name__}: {last}"
        reason = f"all {num_samples} samples failed, {what}"
        return {"step": step, "samples": 0, "failed": num_samples, "reason": reason}
    versions = [int(v) for answers, _ in groups for t in answers for v in t.versions[t.loss_mask]]
    return {
        "step": step,
        **measure(rewards, config.samples, config.pass_reward),
        "samples": num_answered,
        "failed": num_samples - num_answered,
        "version_min": min(versions, default=step),
        "version_max": max(versions, default=step),
    }

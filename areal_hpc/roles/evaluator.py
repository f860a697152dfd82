"""The evaluator: answers held-out prompts on the run's own engines whenever an evaluation is due.

    due(version): at the start, each ``evaluation.every_steps`` versions, and at the last one

One evaluation runs on whatever version the engines serve while it goes on; the versions that really sampled are part of
the result. A result is a file, so an evaluation that a kill has cost is simply due again after the restart.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence

from areal_hpc.config.schema import EvaluationConfig
from areal_hpc.errors import ConfigError, GenerationError
from areal_hpc.fs import publish_json
from areal_hpc.protocols import Episode
from areal_hpc.roles.process import EXIT_DONE, EXIT_STOPPED, RoleProcess
from areal_hpc.roles.wiring.episodes import EvaluationParts, make_evaluation
from areal_hpc.rollout.episodes import SAMPLE_FAILURES
from areal_hpc.types import Prompt, Sampling, Trajectory

log = logging.getLogger(__name__)

POLL_S = 0.2
NICENESS = 5


def due(version: int, config: EvaluationConfig, total_steps: int, done: set[int]) -> int | None:
    """The step whose evaluation is due when ``version`` is the newest, or None.

    Steps between two polls are not caught up one by one: the newest due step stands for them.
    """
    steps = {0} if config.at_start else set()
    steps |= set(range(config.every_steps, total_steps + 1, config.every_steps)) | {total_steps}
    reached = max((step for step in steps if step <= version), default=None)
    return None if reached is None or (done and max(done) >= reached) else reached


def main(process: RoleProcess) -> int:
    os.nice(NICENESS)
    finished = asyncio.run(_watch(process))
    return EXIT_DONE if finished else EXIT_STOPPED


async def _watch(process: RoleProcess) -> bool:
    """Evaluate what is due until the last step has its result (True) or a stop request comes (False)."""
    async with make_evaluation(process) as parts:
        working = asyncio.create_task(_evaluate_all(process, parts))
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
    while (version := parts.newest_version()) is None:  # noqa: ASYNC110  the trainer says it, in a file
        await asyncio.sleep(POLL_S)
    done = parts.evaluated()
    while True:
        if (step := due(version, config, total, done)) is not None:
            await _evaluate(process, parts, step)
            done.add(step)
        elif version >= total:
            return
        else:
            await asyncio.sleep(POLL_S)
        version = parts.newest_version() or version


async def _evaluate(process: RoleProcess, parts: EvaluationParts, step: int) -> None:
    began = time.monotonic()
    prompts = [prompt for prompt in parts.prompts for _ in range(process.config.evaluation.samples)]
    answers: list[Sequence[Trajectory]] = [()] * len(prompts)
    for attempt in range(process.config.rollout.attempts):
        missing = [n for n, answer in enumerate(answers) if not answer]
        again = (_answer(parts, f"eval-{step}-{n}-{attempt}", prompts[n], parts.sampling(n, attempt)) for n in missing)
        for n, answer in zip(missing, await asyncio.gather(*again), strict=True):
            answers[n] = answer
    result = _result(step, answers, time.monotonic() - began, len(parts.prompts))
    publish_json(process.run.evaluation(step), {"epoch": process.epoch, **result})
    process.recorder.record("evaluation", result)


async def _answer(parts: EvaluationParts, name: str, prompt: Prompt, sampling: Sampling) -> Sequence[Trajectory]:
    """One answer; nothing where the engine or the reward failed, which is tried again and never scored 0."""
    episode = Episode(
        id=f"{parts.prefix}-{name}",
        generator=parts.generator,
        renderer=parts.renderer,
        score=parts.score,
        sampling=sampling,
        max_tokens=parts.max_tokens,
    )
    try:
        async with asyncio.timeout(parts.timeout_s):
            return await parts.workflow.run(prompt, episode)
    except ConfigError:
        raise
    except SAMPLE_FAILURES as error:
        log.warning("evaluation sample %s failed: %s: %s", name, type(error).__name__, error)
        return ()


def _result(step: int, answers: Sequence[Sequence[Trajectory]], seconds: float, num_prompts: int) -> dict[str, float]:
    """The evaluation's record; raises GenerationError when not one sample succeeded."""
    trajectories = [trajectory for answer in answers for trajectory in answer]
    if not trajectories:
        raise GenerationError(f"evaluation at step {step}: all {len(answers)} samples failed; see the log above")
    versions = [int(v) for t in trajectories for v in t.versions[t.loss_mask]]
    return {
        "step": step,
        "reward_mean": sum(t.reward for t in trajectories) / len(trajectories),
        "prompts": num_prompts,
        "samples": len(trajectories),
        "failed": sum(1 for answer in answers if not answer),
        "version_min": min(versions, default=step),
        "version_max": max(versions, default=step),
        "seconds": seconds,
    }

"""The episodes of one prompt: run together, each behind a time limit, the failed ones again."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from areal_hpc.config.schema import RolloutConfig, SamplingConfig
from areal_hpc.errors import AgentError, ConfigError, DataError, GenerationError, RewardError, RewardRaised
from areal_hpc.protocols import Episode, Generator, Renderer, Workflow
from areal_hpc.rollout.rendering import RenderedOnce
from areal_hpc.types import Prompt, Sampling, Trajectory
from areal_hpc.waits import advance, waiting

RETRY_PAUSE_S = 1.0
"""Pause before the second attempt; doubled before each further one, so that an engine can come back."""
SAMPLE_FAILURES = (GenerationError, RewardError, AgentError, TimeoutError, ValueError)
"""What fails a sample and not the run; ValueError is what the carriers raise for a broken engine's answer."""

WOULD_FAIL_AGAIN = (RewardRaised, ValueError)
"""Those among them that follow from the sample alone; the others had a time limit or a process behind them."""

Record = Callable[[str, Mapping[str, Any]], None]
T = TypeVar("T")


@dataclass(slots=True)
class Running:
    """A group in flight: since when, and what each open episode is doing.

    ``name`` and the prompt's position are together unique in the run; the ids of the episodes begin with them.
    """

    prompt: Prompt
    name: str
    began: float = field(default_factory=time.monotonic)
    attempt: int = 0
    stages: dict[int, str] = field(default_factory=dict)


class EpisodeRunner:
    """``trajectories, failure = await episodes.run(running)``, for training and evaluation alike.

    Each failed sample is recorded as a "failure". Whatever is not in SAMPLE_FAILURES is raised, the others cancelled.

    Args:
        score: ``await score(text, prompt)``, usually ``RewardPool.score``.
        max_tokens: longest sequence, prompt and answer together.
        record: takes ``("failure", values)`` for each failed sample.
        seed: of the sampling; the seed of a sample follows from it, the prompt's position, its number and the attempt.
        deterministic: every attempt at a sample has the same seed, and a failure that might not come again is raised.
    """

    def __init__(
        self,
        *,
        workflow: Workflow,
        generator: Generator,
        renderer: Renderer,
        score: Callable[[str, Prompt], Awaitable[float]],
        config: RolloutConfig,
        max_tokens: int,
        record: Record,
        seed: int,
        deterministic: bool = False,
        retry_pause_s: float = RETRY_PAUSE_S,
    ) -> None:
        self._workflow, self._generator, self._renderer, self._score = workflow, generator, renderer, score
        self._config, self._max_tokens, self._record, self._seed = config, max_tokens, record, seed
        self._deterministic, self._retry_pause_s = deterministic, retry_pause_s
        self._clocks = set[asyncio.Timeout]()  # of the episodes that run

    async def run(self, running: Running) -> tuple[list[Trajectory], Exception | None]:
        """The trajectories of the episodes that succeeded, and a failure where some did not in the last attempt."""
        finished: dict[int, Sequence[Trajectory]] = {}
        failures: list[Exception] = []
        renderer = RenderedOnce(self._renderer, running.prompt.messages)
        for attempt in range(self._config.attempts):
            if attempt:
                pause_s = self._retry_pause_s * 2 ** (attempt - 1)
                with waiting("pausing before another attempt", limit_s=pause_s):
                    await asyncio.sleep(pause_s)
            running.attempt = attempt
            missing = [number for number in range(self._config.group_size) if number not in finished]
            episodes = await together(self._episode(running, number, renderer) for number in missing)
            outcomes = dict(zip(missing, episodes, strict=True))
            failures = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
            finished |= {n: outcome for n, outcome in outcomes.items() if not isinstance(outcome, Exception)}
            if not failures or isinstance(failures[0], DataError):  # a prompt that cannot be used stays so
                break
        if self._deterministic:
            _raise_chance(failures)
        trajectories = [trajectory for number in sorted(finished) for trajectory in finished[number]]
        return trajectories, failures[0] if failures else None

    def postpone(self, seconds: float) -> None:
        """Give every episode that runs so much more time: it could do nothing with what has passed."""
        for clock in self._clocks:
            if (end := clock.when()) is not None and not clock.expired():
                clock.reschedule(end + seconds)

    async def _episode(self, running: Running, number: int, renderer: Renderer) -> Sequence[Trajectory] | Exception:
        """One episode's trajectories, or what failed it."""
        clock = asyncio.timeout(self._config.timeout_s)
        try:
            async with clock:
                self._clocks.add(clock)
                trajectories = await self._workflow.run(running.prompt, self._context(running, number, renderer))
        except ConfigError:
            raise
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            return self._failed(running, number, GenerationError("something that the episode awaited was cancelled"))
        except SAMPLE_FAILURES as error:
            return self._failed(running, number, error)
        finally:
            self._clocks.discard(clock)
            del running.stages[number]
        advance("episodes finished")
        return [replace(trajectory, episode=number) for trajectory in trajectories]

    def _context(self, running: Running, number: int, renderer: Renderer) -> Episode:
        """What the workflow may use. Its id names group, sample and attempt, so none is used twice in a run."""
        position, attempt = running.prompt.position, running.attempt
        running.stages[number] = "generating"
        seed = derive_seed(self._seed, position, number, 0 if self._deterministic else attempt)

        async def score(text: str, prompt: Prompt) -> float:
            running.stages[number] = "scoring"
            reward = await self._score(text, prompt)
            running.stages[number] = "generating"
            return reward

        return Episode(
            id=f"{running.name}.p{position}.s{number}.a{attempt}",
            generator=self._generator,
            renderer=renderer,
            score=score,
            sampling=sampling(self._config.sampling, seed),
            max_tokens=self._max_tokens,
        )

    def _failed(self, running: Running, number: int, error: Exception) -> Exception:
        values = {
            "position": running.prompt.position,
            "prompt_id": running.prompt.id,
            "sample": number,
            "attempt": running.attempt,
            "stage": running.stages[number],
            "error": type(error).__name__,
            "message": str(error) or f"not finished within {self._config.timeout_s:g} s",
        }
        self._record("failure", values)
        return error


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each returned, in their order; the first exception cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise first(failures) from None
    return [task.result() for task in tasks]


def first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that came first, out of nested groups."""
    earliest = failures.exceptions[0]
    return first(earliest) if isinstance(earliest, BaseExceptionGroup) else earliest


def _is_being_cancelled() -> bool:
    """Whether somebody cancelled this very task, rather than something that it awaits."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling() > 0


def _raise_chance(failures: Sequence[Exception]) -> None:
    """Raise the first failure that the same sample might not have the next time, with what to do."""
    for failure in failures:
        if not isinstance(failure, WOULD_FAIL_AGAIN):
            failure.add_note(
                "deterministic training cannot drop this sample, since it might not fail again: resume the run, with "
                "larger rollout.timeout_s or rollout.reward_timeout_s if a time limit was the cause"
            )
            raise failure


def derive_seed(seed: int, position: int, number: int, attempt: int) -> int:
    """The sampling seed of one episode: the same in every run with this seed, another for every sample; 31 bits."""
    digest = hashlib.blake2b(f"{seed}/{position}/{number}/{attempt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling(config: SamplingConfig, seed: int) -> Sampling:
    """The knobs of the configuration as what an engine is asked for."""
    return Sampling(**{knob.name: getattr(config, knob.name) for knob in fields(config)}, seed=seed)

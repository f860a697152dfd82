"""What runs episodes: the rollout worker's runner, and the parts of an evaluation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import cast

from areal_hpc.buffer.control import NewestWeights
from areal_hpc.buffer.order import fixed_order
from areal_hpc.buffer.writer import RingWriter
from areal_hpc.config.derived import awaits_satellites, queue_s, ring_capacity
from areal_hpc.config.schema import Config, RolloutConfig
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.fs import wait_for
from areal_hpc.generation.router import Router
from areal_hpc.prompts import PromptStream, first_prompts, open_dataset
from areal_hpc.protocols import Generator, Workflow
from areal_hpc.roles.process import RoleProcess, StopRequested
from areal_hpc.roles.wiring.agents import make_workflow
from areal_hpc.roles.wiring.carried import agenda_of
from areal_hpc.roles.wiring.engines import make_router
from areal_hpc.roles.wiring.evaluations import Agenda, results
from areal_hpc.roles.wiring.online import make_online
from areal_hpc.rollout.episodes import EpisodeRunner, Record
from areal_hpc.rollout.online import OnlineRunner
from areal_hpc.rollout.reward_pool import RewardPool
from areal_hpc.rollout.runner import Runner
from areal_hpc.types import Completion, GenerationRequest, Prompt
from areal_hpc.waits import LEADER
from areal_hpc.watermark import Watermark

ROUTING_S = 2.0
DESERTED_S = 1.0
"""How often it is asked whether any engine is there."""


class Pinned:
    """A ``Generator`` that pins the newest published version before a request is sent: no engine behind it answers."""

    def __init__(self, router: Router, published: Callable[[], int]) -> None:
        self._router, self._published, self._pinned = router, published, 0
        self._pinning = asyncio.Lock()

    async def generate(self, request: GenerationRequest) -> Completion:
        async with self._pinning:
            if (version := self._published()) > self._pinned:
                await self._router.expect(version)
                self._pinned = version
        return await self._router.generate(request)

    async def close(self) -> None:
        await self._router.close()


def engines_text(router: Router) -> str:
    """How each engine stands, as the end of a sentence."""
    out = {name: f" and out: {trouble}" for name, trouble in router.out().items()}
    parts = [f"{name} with {tokens:,} tokens{out.get(name, '')}" for name, tokens in router.outstanding().items()]
    return f"; the engines: {', '.join(parts)}"


async def record_routing(router: Router, record: Record) -> None:
    """Record how each engine stands as this worker's router has it, every ``ROUTING_S``: its outstanding tokens, or why
    it is out."""
    while True:
        record("routing", {**router.outstanding(), **router.out()})
        await asyncio.sleep(ROUTING_S)


async def postpone_while_deserted(router: Router, postpone: Callable[[float], None], every_s: float) -> None:
    """Extend the time limits of running episodes by the time in which no engine was there: satellites may be in Slurm's
    queue for hours.

    Args:
        postpone: extends them by so many seconds.
        every_s: how often, in seconds, it is asked whether any engine is there.
    """
    while True:
        was_deserted, began = router.is_deserted(), time.monotonic()
        await asyncio.sleep(every_s)
        if was_deserted and router.is_deserted():
            postpone(time.monotonic() - began)


@asynccontextmanager
async def patiently(config: Config, router: Router, postpone: Callable[[float], None]) -> AsyncIterator[None]:
    """``postpone_while_deserted`` as long as this lasts; nothing where no satellites are awaited."""
    if not awaits_satellites(config):
        yield
        return
    task = asyncio.create_task(postpone_while_deserted(router, postpone, DESERTED_S))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def make_reward_pool(config: Config) -> RewardPool:
    rollout = config.rollout
    return RewardPool(rollout.reward, workers=rollout.reward_workers, timeout_s=rollout.reward_timeout_s)


@asynccontextmanager
async def make_rollout(process: RoleProcess) -> AsyncIterator[Runner | OnlineRunner]:
    """This worker's runner, once the trainer has said where its prompts begin."""
    config = process.config
    dataset = open_dataset(config.prompts, "train", config.seed)
    renderer = ChatRenderer(config.model.path)
    pool = make_reward_pool(config)
    router = await asyncio.to_thread(make_router, process)
    writer = RingWriter(
        process.run,
        process.epoch,
        slot=process.index,
        num_slots=config.rollout.workers,
        config=config.buffer,
        capacity=ring_capacity(config),
        order=fixed_order(config),
    )
    generator = Pinned(router, lambda: writer.version.step)
    recording = asyncio.create_task(record_routing(router, process.recorder.record))
    try:
        if config.rollout.reward:
            await pool.start()
        stream = PromptStream(
            dataset,
            config.prompts,
            seed=config.seed,
            shard=process.index,
            num_shards=config.rollout.workers,
            consumed=await asyncio.to_thread(_wait_until_followed, process, writer),
        )
        if config.agent.online.enabled:
            score = pool.score if config.rollout.reward else None
            async with make_online(process, renderer, generator, writer=writer, stream=stream, score=score) as online:
                yield online
            return
        async with make_workflow(process, renderer, generator) as workflow:
            episodes = _make_episodes(
                process, workflow, generator, renderer, pool, rollout=config.rollout, deterministic=config.deterministic
            )
            async with patiently(config, router, episodes.postpone):
                yield Runner(
                    episodes=episodes,
                    stream=stream,
                    writer=writer,
                    config=config.rollout,
                    record=process.recorder.record,
                    engines=lambda: engines_text(router),
                )
    finally:
        recording.cancel()
        await asyncio.wait({recording})
        writer.close()
        await pool.close()
        await router.close()


def _wait_until_followed(process: RoleProcess, writer: RingWriter) -> Watermark:
    """The positions this worker need not come to, as soon as the trainer knows of the worker.

    Raises:
        WaitTimeout: the trainer did not open the ring; it may start, wait for a first engine, and then evaluate, before
            it does.
    """
    config = process.config

    def followed() -> tuple[Watermark] | None:
        if process.stopping():
            raise StopRequested
        issued = writer.issued()
        return None if issued is None else (issued,)

    (issued,) = wait_for(
        "trainer-0 to open the ring",
        followed,
        2 * config.limits.start_s + queue_s(config),
        party=LEADER,
        hint=f"look into {process.attempt.log('trainer', 0)}",
    )
    return cast(Watermark, issued)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationParts:
    """What an evaluation works with."""

    prompts: list[Prompt]
    episodes: EpisodeRunner
    newest_version: Callable[[], int | None]
    """Optimizer steps behind the weights that this attempt's engines serve; None before the first."""
    agenda: Callable[[], Agenda]
    """What was owed as the attempt began; asked once there is a version."""
    evaluated: Callable[[], set[int]]
    """Steps that need no evaluation any more; asked once there is a version."""


@asynccontextmanager
async def make_evaluation(process: RoleProcess) -> AsyncIterator[EvaluationParts]:
    config = process.config
    dataset = open_dataset(config.prompts, "eval", config.seed)
    pool = make_reward_pool(config)
    router = await asyncio.to_thread(make_router, process)
    newest_version = NewestWeights(process.run, process.epoch, config.buffer.commit_s)
    renderer, generator = ChatRenderer(config.model.path), Pinned(router, lambda: newest_version() or 0)
    try:
        await pool.start()
        async with make_workflow(process, renderer, generator) as workflow:
            episodes = _make_episodes(process, workflow, generator, renderer, pool, rollout=evaluation_rollout(config))
            async with patiently(config, router, episodes.postpone):
                yield EvaluationParts(
                    prompts=first_prompts(dataset, config.prompts, config.evaluation.num_prompts),
                    episodes=episodes,
                    newest_version=newest_version,
                    agenda=lambda: agenda_of(process.run, process.epoch),
                    evaluated=lambda: set(results(process.run, process.epoch)),
                )
    finally:
        await pool.close()
        await router.close()


def _make_episodes(
    process: RoleProcess,
    workflow: Workflow,
    generator: Generator,
    renderer: ChatRenderer,
    pool: RewardPool,
    *,
    rollout: RolloutConfig,
    deterministic: bool = False,
) -> EpisodeRunner:
    return EpisodeRunner(
        workflow=workflow,
        generator=generator,
        renderer=renderer,
        score=pool.score,
        config=rollout,
        max_tokens=process.config.model.max_tokens,
        record=process.recorder.record,
        seed=process.config.seed,
        deterministic=deterministic,
    )


def evaluation_rollout(config: Config) -> RolloutConfig:
    """How an evaluation's episodes run: as in training, but for their number and temperature."""
    sampling = replace(config.rollout.sampling, temperature=config.evaluation.temperature)
    return replace(config.rollout, group_size=config.evaluation.samples, sampling=sampling)

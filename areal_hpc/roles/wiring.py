"""Which implementation is used where: the only module that knows all the wings.

Each function turns the configuration and a process's place in the run into ready objects behind the protocols.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.buffer.control import read_control
from areal_hpc.buffer.reader import RingReader
from areal_hpc.buffer.writer import RingWriter
from areal_hpc.checkpoint import Checkpoint
from areal_hpc.config.checks import ring_capacity
from areal_hpc.config.schema import Config, EngineName, SamplingConfig, TrainerBackendName, TransportName
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.errors import ConfigError, DataError
from areal_hpc.generation.client import EngineClient
from areal_hpc.generation.connection import Limits
from areal_hpc.generation.router import Router
from areal_hpc.prompts import PromptStream, check_identity, first_prompts, open_dataset, stream_identity
from areal_hpc.protocols import Generator, Renderer, RolloutReader, TrainerBackend, WeightTransport, Workflow
from areal_hpc.roles.process import RoleProcess, StopRequested
from areal_hpc.rollout.reward_pool import RewardPool
from areal_hpc.rollout.runner import Runner
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import GroupAddress, Prompt, Sampling
from areal_hpc.weights.broadcast import BroadcastTransport
from areal_hpc.weights.disk import DiskTransport

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
RANKS_GROUP = "trainer"
MIB = 1 << 20


def dotted(path: str, key: str) -> Any:
    """The object that ``module:name`` names.

    Raises:
        ConfigError: there is no such module or name; says which key asked for it.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{key} = {path!r} cannot be imported: {error}; give module:name on the Python path"
        ) from error


def make_model(config: Config) -> None:
    """Write the model directory if it is not there and the configuration says how.

    Raises:
        DataError: it is not there, and nothing says how to make it.
    """
    path = Path(config.model.path)
    if path.is_dir():
        return
    if not config.model.maker:
        raise DataError(f"model.path: there is no directory {path}; give the path of a Hugging Face checkpoint")
    log.info("making the model %s (this happens once)", path)
    dotted(config.model.maker, "model.maker")(path, config.seed)


def sampling_of(config: SamplingConfig, temperature: float | None = None) -> Sampling:
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature if temperature is None else temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
    )


# Engines and their clients


def make_engine(process: RoleProcess) -> Any:
    """This replica's engine.

    Raises:
        ConfigError: the engine is not one that this version starts.
    """
    config = process.config
    if config.generation.backend is not EngineName.EMBEDDED:
        raise ConfigError(f"generation.backend: {config.generation.backend} cannot be started yet; use embedded")
    from areal_hpc.generation.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(
        config.model.path,
        dtype=config.model.dtype,
        max_running=config.generation.max_running,
        max_tokens=config.model.max_tokens,
        threads=config.generation.threads,
        seed=config.seed * 1009 + process.index,
        version="0",
        update_timeout_s=config.limits.weight_update_s,
    )


def make_clients(process: RoleProcess) -> list[EngineClient]:
    """A client for every engine of the attempt, once they are up."""
    config = process.config
    limits = Limits(
        generate_s=config.rollout.timeout_s, admin_s=config.limits.weight_update_s, load_s=config.limits.weight_update_s
    )
    names = [("generator", index) for index in range(config.generation.replicas)]
    return [
        EngineClient(
            f"{role}-{index}",
            process.endpoint_of(role, index)["url"],
            num_ranks=config.generation.tensor_parallel * config.generation.pipeline_parallel,
            token=process.token,
            limits=limits,
        )
        for role, index in names
    ]


# Rollout


@asynccontextmanager
async def make_rollout(process: RoleProcess) -> AsyncIterator[Runner]:
    """This worker's runner, once the trainer has said where its prompts begin."""
    config = process.config
    dataset = open_dataset(config.prompts, "train", config.seed)
    renderer = ChatRenderer(config.model.path)
    workflow: Workflow = dotted(config.rollout.workflow, "rollout.workflow")()
    pool = RewardPool(
        config.rollout.reward, workers=config.rollout.reward_workers, timeout_s=config.rollout.reward_timeout_s
    )
    router = Router(await asyncio.to_thread(make_clients, process))
    writer = RingWriter(
        process.run,
        process.epoch,
        slot=process.index,
        num_slots=config.rollout.workers,
        config=config.buffer,
        capacity=ring_capacity(config),
    )
    try:
        await pool.start()
        stream = PromptStream(
            dataset,
            config.prompts,
            seed=config.seed,
            shard=process.index,
            num_shards=config.rollout.workers,
            consumed=await _issued(process, writer),
        )
        yield Runner(
            stream=stream,
            writer=writer,
            workflow=workflow,
            generator=router,
            renderer=renderer,
            score=pool.score,
            config=config.rollout,
            max_tokens=config.model.max_tokens,
            record=process.recorder.record,
            seed=config.seed,
        )
    finally:
        writer.close()
        await pool.close()
        await router.close()


async def _issued(process: RoleProcess, writer: RingWriter) -> Any:
    """The positions this worker need not come to, as soon as the trainer knows of the worker."""
    deadline = asyncio.get_running_loop().time() + process.config.limits.start_s + process.config.limits.starve_s
    while (issued := writer.issued()) is None:
        if process.stopping():
            raise StopRequested
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError(f"{process.name} waited for the trainer to open the ring; look into its log")
        await asyncio.sleep(0.05)
    return issued


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationParts:
    """What an evaluation works with."""

    prompts: list[Prompt]
    generator: Generator
    renderer: Renderer
    score: Callable[[str, Prompt], Awaitable[float]]
    workflow: Workflow
    sampling: Sampling
    max_tokens: int
    prefix: str
    newest_version: Callable[[], int | None]


@asynccontextmanager
async def make_evaluation(process: RoleProcess) -> AsyncIterator[EvaluationParts]:
    config = process.config
    dataset = open_dataset(config.prompts, "eval", config.seed)
    pool = RewardPool(
        config.rollout.reward, workers=config.rollout.reward_workers, timeout_s=config.rollout.reward_timeout_s
    )
    router = Router(await asyncio.to_thread(make_clients, process))
    try:
        await pool.start()
        yield EvaluationParts(
            prompts=first_prompts(dataset, config.prompts, config.evaluation.num_prompts),
            generator=router,
            renderer=ChatRenderer(config.model.path),
            score=pool.score,
            workflow=dotted(config.rollout.workflow, "rollout.workflow")(),
            sampling=sampling_of(config.rollout.sampling, config.evaluation.temperature),
            max_tokens=config.model.max_tokens,
            prefix=f"a{process.epoch}",
            newest_version=lambda: _newest_version(process),
        )
    finally:
        await pool.close()
        await router.close()


def _newest_version(process: RoleProcess) -> int | None:
    """The step of the weights that this attempt's engines serve; None before the first."""
    control = read_control(process.run, known=False)
    return None if control is None or control.epoch != process.epoch else control.version.step


# Training


def join_ranks(process: RoleProcess) -> Ranks:
    """The trainer's ranks as one, found by the address that rank 0 publishes."""
    config = process.config
    if config.trainer.ranks == 1:
        return Ranks()
    from areal_hpc import accelerator
    from areal_hpc.collective import host_store, join_group

    device = accelerator.detect()
    timeout_s = config.limits.start_s + config.limits.starve_s
    store = None
    if process.index == 0:
        store = host_store(LOOPBACK, timeout_s=timeout_s)
        process.publish_endpoint({"host": LOOPBACK, "port": store.port})
    endpoint = process.endpoint_of("trainer", 0)
    address = GroupAddress(
        host=endpoint["host"],
        port=endpoint["port"],
        name=f"{RANKS_GROUP}-{process.epoch}",
        world_size=config.trainer.ranks,
        backend=device.collective,
    )
    return Ranks(join_group(address, process.index, timeout_s, store), device.device)


def make_backend(process: RoleProcess, ranks: Ranks) -> TrainerBackend:
    """
    Raises:
        ConfigError: the backend is not one that this version has.
    """
    config = process.config
    if config.trainer.backend is not TrainerBackendName.REFERENCE:
        raise ConfigError(f"trainer.backend: {config.trainer.backend} is not there yet; use reference")
    from areal_hpc.training.reference import ReferenceBackend

    return ReferenceBackend(
        model_path=config.model.path,
        dtype=config.model.dtype,
        algorithm=config.algorithm,
        trainer=config.trainer,
        temperature=config.rollout.sampling.temperature,
        seed=config.seed,
        group=ranks.group,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSide:
    """What only rank 0 has."""

    reader: RolloutReader
    transport: WeightTransport
    identity: Mapping[str, Any]
    """What decides which prompt a position means; a checkpoint carries it."""


def make_trainer_side(process: RoleProcess, parent: Checkpoint | None) -> TrainerSide:
    """Rank 0's ring and transport; the ring has read what earlier attempts left."""
    config = process.config
    identity = stream_identity(open_dataset(config.prompts, "train", config.seed), config.prompts, config.seed)
    if parent is not None:
        check_identity(parent.state["prompts"], identity)
    reader = RingReader(
        process.run,
        process.epoch,
        num_slots=config.rollout.workers,
        config=config.buffer,
        capacity=ring_capacity(config),
        state=None if parent is None else parent.state["ring"],
        parent=None if parent is None else parent.version,
    )
    return TrainerSide(reader=reader, transport=make_transport(process), identity=identity)


def make_transport(process: RoleProcess) -> WeightTransport:
    config = process.config
    targets = make_clients(process)
    if config.weights.transport is TransportName.DISK:
        return DiskTransport(process.run.weights, targets, timeout_s=config.limits.weight_update_s)
    from areal_hpc import accelerator

    return BroadcastTransport(
        targets,
        epoch=process.epoch,
        backend=accelerator.detect().collective,
        bucket_bytes=int(config.weights.bucket_mb * MIB),
        timeout_s=config.limits.weight_update_s,
    )

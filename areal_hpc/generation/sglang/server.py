"""SGLang's server as a subprocess.

    async with serving(spec, python=..., log=..., start_s=300) as server:     it has generated a token by then
        server.url; server.alive(); await load(server)

SGLang looks after itself while it runs: a child that dies takes the server down, and so does a forward pass that hangs,
after its ``watchdog_timeout``. Here ``load`` gives up on a server that does not answer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from areal_hpc.errors import ConfigError
from areal_hpc.generation.capabilities import Capabilities
from areal_hpc.generation.counters import counted
from areal_hpc.generation.external.process import ServerProcess, reserved_port, started, url_of
from areal_hpc.generation.external.spec import ServerSpec
from areal_hpc.generation.sglang.arguments import server_arguments, server_environment, weights_environment

DECODED = "sglang:realtime_tokens_total"
FINISHED = "sglang:num_requests_total"
OLD_S = 10.0
"""Loads that were published so long ago are of an SGLang that is paused, for all that is known without our code."""


async def load(server: ServerProcess) -> Mapping[str, Any]:
    """The version that it serves, sequences running and queued, the tokens that it has sampled since its start, and
    whether sequences are held, which is in a pause.

    The rate that SGLang tells itself is that of 40 decoding steps, and a pause sets it to 0: with a weight update
    every few seconds it is nearly always 0. What it counts is right at any time: the tokens of decoding steps, and
    an answer's first, which comes from its prompt's pass, once the answer is finished.

    Raises:
        GenerationError: it did not answer, or refused.
    """
    loads, model = await server.get("/v1/loads?include=core,queues"), await server.get("/model_info")
    metrics = await server.get("/metrics")
    return {
        **_standing(loads),
        "version": int(model["weight_version"]),
        "tokens": int(counted(metrics, DECODED, mode="decode") + counted(metrics, FINISHED)),
    }


def _standing(loads: Mapping[str, Any]) -> dict[str, Any]:
    """Sequences running and queued, from the answer of ``/v1/loads``. In a pause its loads are old, and what ran then
    is back in the queue."""
    ranks, now = loads["loads"], datetime.fromisoformat(loads["timestamp"]).timestamp()
    running, queued = (sum(rank[f"num_{of}_reqs"] for rank in ranks) for of in ("running", "waiting"))
    held = any(_is_paused(rank, now) for rank in ranks)
    return {"running": 0 if held else running, "queued": queued + (running if held else 0), "held": held}


def _is_paused(rank: Mapping[str, Any], now: float) -> bool:
    """Whether a rank is paused: as ``pauses.py`` tells or, without our code in SGLang, since its last load is old."""
    told = rank["queues"]["paused"]
    return told if isinstance(told, bool) else now - rank["timestamp"] > OLD_S


@asynccontextmanager
async def serving(spec: ServerSpec, *, python: str, log: Path, start_s: float) -> AsyncIterator[ServerProcess]:
    """A server that is up, or a node's share of one: SGLang answers there for its health, and no requests. See
    ``started`` and ``_require_our_code``."""
    with (
        reserved_port(spec.host) as port,
        reserved_port(spec.host) as internal_port,
        tempfile.TemporaryDirectory(prefix="areal_hpc-") as temporary,
    ):
        async with started(
            "SGLang",
            python=python,
            module="sglang.launch_server",
            arguments=server_arguments(spec, port=port, internal_port=internal_port),
            environment=server_environment(
                os.environ, spec.accelerator, Path(temporary), spec.tensor_parallel * spec.pipeline_parallel
            )
            | weights_environment(spec),
            url=url_of(spec.host, port),
            key=spec.key,
            log=log,
            start_s=start_s,
        ) as server:
            await _require_our_code(server, spec)
            yield server


async def _require_our_code(server: ServerProcess, spec: ServerSpec) -> None:
    """See to it that SGLang has taken in what the trainer relies on. Of several nodes the first answers for all.

    Raises:
        ConfigError: it has not, and would refuse each update that needs it.
        GenerationError: it did not answer, or refused.
    """
    needs = [
        key for key, needed in (("weights.delta", spec.keeps_weights), ("model.lora", bool(spec.lora.rank))) if needed
    ]
    if not needs or (spec.share is not None and spec.share.node > 0):
        return
    if not Capabilities.read(await server.get("/server_info")).manifests:
        raise ConfigError(
            f"generation.python: this SGLang does not let weights be taken as {' and '.join(needs)} "
            f"need{'s' if len(needs) == 1 else ''} it; its log says which place of its own it lacks. Take one that "
            "examples/sglang_environment installs, or leave that out"
        )

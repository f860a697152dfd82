"""vLLM's server as a subprocess.

async with serving(spec, python=..., log=..., start_s=300) as server:     it has generated a token by then
    server.url; server.alive(); await load(server)
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal_hpc.generation.external.process import ServerProcess, reserved_port, started, url_of
from areal_hpc.generation.external.spec import ServerSpec
from areal_hpc.generation.served.merging import order
from areal_hpc.generation.vllm.arguments import engine_arguments, server_environment


async def load(server: ServerProcess) -> Mapping[str, Any]:
    """The version that it serves, sequences running and queued, the tokens that it has sampled since its start, whether
    sequences are held, and something that changes as long as new weights are loaded.

    Raises:
        GenerationError: it did not answer, or refused.
    """
    info = await server.get("/server_info")
    return {
        "version": int(info["weight_version"]),
        "running": info["num_running"],
        "queued": info["num_waiting"],
        "tokens": info["num_generated_tokens"],
        "held": info["paused"],
        "loading": info["loaded"],
    }


@asynccontextmanager
async def serving(spec: ServerSpec, *, python: str, log: Path, start_s: float) -> AsyncIterator[ServerProcess]:
    """A server that is up; see ``started``."""
    with reserved_port(spec.host) as port, tempfile.TemporaryDirectory(prefix="areal_hpc-") as temporary:
        ours = {
            "host": spec.host,
            "port": port,
            "key": spec.key,
            "version": spec.version,
            "update_timeout_s": spec.update_timeout_s,
            "keeps_weights": spec.keeps_weights,
            "adapters": order(spec.model_path, spec.dtype, spec.lora),
        }
        async with started(
            "vLLM",
            python=python,
            module="areal_hpc.generation.vllm.server",
            arguments=[json.dumps(ours), *engine_arguments(spec)],
            environment=server_environment(os.environ, spec.accelerator, Path(temporary)),
            url=url_of(spec.host, port),
            key=spec.key,
            log=log,
            start_s=start_s,
        ) as server:
            yield server

"""What SGLang's server is started with: its arguments and its environment, as pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.accelerator import CPU, Accelerator
from areal_hpc.generation.sglang.plugin import PLATFORM, SELECTED_BY

SPARE_TOKENS = 8
"""By how much SGLang's own context length exceeds ours: it keeps the last few positions for itself."""
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that would bring modules of this process's environment into SGLang's."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
"""SGLang asks itself over HTTP while it starts, and fetches nothing: its model is a directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """One SGLang server."""

    model_path: str
    dtype: str
    host: str
    key: str = field(repr=False)
    """What every request must bring as ``Authorization: Bearer``."""
    accelerator: Accelerator
    max_running: int
    """Sequences decoded at once."""
    max_tokens: int
    """Longest sequence, prompt and answer together."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    seed: int = 0
    version: str = "0"
    """Version of the weights in ``model_path``."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by SGLang's names, which win over what is chosen here."""


def server_arguments(spec: ServerSpec, *, port: int, internal_port: int) -> list[str]:
    """The command line behind ``sglang.launch_server``; of an argument given twice SGLang takes the last.

    Args:
        port: where it answers HTTP.
        internal_port: where the ranks of the server find each other.
    """
    arguments: dict[str, Any] = {
        "model_path": spec.model_path,
        "dtype": spec.dtype,
        "host": spec.host,
        "port": port,
        "nccl_port": internal_port,
        "api_key": spec.key,
        "weight_version": spec.version,
        "context_length": spec.max_tokens + SPARE_TOKENS,
        "max_running_requests": spec.max_running,
        "tp_size": spec.tensor_parallel,
        "pp_size": spec.pipeline_parallel,
        "random_seed": spec.seed,
        "log_level_http": "warning",  # else a line for each request
        "enable_metrics": True,  # what it has sampled is counted nowhere else
        "device": spec.accelerator.device,
    }
    if spec.accelerator is CPU:
        # Its default takes most of the machine's memory, which it shares with everything else.
        arguments |= {"max_total_tokens": spec.max_running * (spec.max_tokens + SPARE_TOKENS)}
        arguments |= {"mem_fraction_static": 0.1, "disable_overlap_schedule": True}
    return [word for name, value in (arguments | named(spec.extra)).items() for word in argument(name, value)]


def named(extra: Mapping[str, Any]) -> dict[str, Any]:
    """``extra`` by names with underscores, however a person wrote them."""
    return {name.lstrip("-").replace("-", "_"): value for name, value in extra.items()}


def argument(name: str, value: Any) -> list[str]:
    """One argument as words: a flag for true, nothing for false and null, JSON for a mapping, a list word by word."""
    option = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    if isinstance(value, Mapping):
        return [option, json.dumps(dict(value))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [option, *map(str, value)]
    return [option, str(value)]


def server_environment(inherited: Mapping[str, str], accelerator: Accelerator, temporary: Path) -> dict[str, str]:
    """The server's environment, devices included: whoever started this process has chosen them.

    Args:
        temporary: a directory of its own, for the sockets between its processes.
    """
    dropped = {*FOREIGN, *PROXIES, *(name.upper() for name in PROXIES), SELECTED_BY}
    environment = {name: value for name, value in inherited.items() if name not in dropped}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",  # it is run by path, and must not take the files beside it for modules
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health must answer while generation is paused
        "TMPDIR": str(temporary),
    }
    return environment | ({SELECTED_BY: PLATFORM} if accelerator is CPU else {})

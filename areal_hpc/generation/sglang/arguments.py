"""What SGLang's server is started with: its arguments and its environment, as pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_hpc.accelerator import CPU, Accelerator
from areal_hpc.generation.external.spec import ServerSpec, named, own_environment, words
from areal_hpc.generation.served.merging import order
from areal_hpc.generation.sglang.plugin import ORDER, PLATFORM, SELECTED_BY

BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
ORDERED = ("fcfs", "lof")
"""SGLang's scheduling policies that go by the priorities of requests first."""
MEMORY_OF_NCCL = {"NCCL_CUMEM_ENABLE": "-2"}
"""How NCCL gets the memory that its ranks show each other: as it thinks best, which is what the trainer's does. SGLang
has it otherwise unless it is told, and ranks of one node that differ cannot meet in a weight group: NCCL compares
nothing, and one opens what the other cannot have meant. What the environment says holds for both."""
SPARE_TOKENS = 8
"""By how much SGLang's own context length exceeds ours: it keeps the last few positions for itself."""


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
        "enable_return_routed_experts": spec.tells_experts,
        "log_level_http": "warning",  # else a line for each request
        "enable_metrics": True,  # what it has sampled is counted nowhere else
        "device": spec.accelerator.device,
    }
    if named(spec.extra).get("schedule_policy", "fcfs") in ORDERED:
        # So that an evaluation yields; what runs is not begun anew for what has just come.
        arguments |= {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}
        arguments |= {"default_priority_value": 0, "disable_priority_preemption": True}
    if spec.share is not None:
        arguments |= {"nnodes": spec.share.num_nodes, "node_rank": spec.share.node}
        arguments |= {"dist_init_addr": spec.share.address}
    if spec.accelerator is CPU:
        # Its default takes most of the machine's memory, which it shares with everything else.
        arguments |= {"max_total_tokens": spec.max_running * (spec.max_tokens + SPARE_TOKENS)}
        arguments |= {"mem_fraction_static": 0.1, "disable_overlap_schedule": True}
    return words(arguments, spec.extra)


def server_environment(
    inherited: Mapping[str, str], accelerator: Accelerator, temporary: Path, ranks: int = 1
) -> dict[str, str]:
    """The server's environment, devices included: whoever started this process has chosen them.

    Args:
        temporary: a directory of its own, for the sockets between its processes.
        ranks: of the server. On a CPU SGLang refuses more of them than there are NUMA nodes, unless it is told which
            processors each of them has; it binds none to them on this platform.
    """
    unbound = {BINDING: "|".join(["0"] * ranks)} if accelerator is CPU and ranks > 1 else {}
    chosen = unbound if accelerator is CPU else MEMORY_OF_NCCL
    environment = {**chosen, **own_environment(inherited, (SELECTED_BY,))} | {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health must answer while generation is paused
        "TMPDIR": str(temporary),
    }
    return environment | ({SELECTED_BY: PLATFORM} if accelerator is CPU else {})


def weights_environment(spec: ServerSpec) -> dict[str, str]:
    """How it is told to take weights. They are received beside sampling on CPUs, and wherever a copy of the weights is
    kept anyway; not in stages of a pipeline, whose ranks have no vote together."""
    adapters = order(spec.model_path, spec.dtype, spec.lora)
    needed = spec.accelerator is CPU or spec.keeps_weights or adapters is not None
    stages = needed and spec.pipeline_parallel == 1
    told: dict[str, Any] = {"limit_s": spec.update_timeout_s, "stages": stages}
    told |= {"keeps": spec.keeps_weights, "adapters": adapters} if stages else {}
    return {ORDER: json.dumps(told)}

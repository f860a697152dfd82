"""What vLLM is started with: its arguments and its environment, as pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_hpc.accelerator import CPU, Accelerator
from areal_hpc.generation.external.launch import TIED
from areal_hpc.generation.external.spec import ServerSpec, own_environment, words

WORKER = "areal_hpc.generation.vllm.worker.Receiver"
CACHE_GIB = 1
"""The key-value cache on a CPU: a whole number, since vLLM takes no other. Its default is half of the memory."""


def engine_arguments(spec: ServerSpec) -> list[str]:
    """The words that vLLM's own parser of engine arguments reads; of one given twice it takes the last."""
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "max_model_len": spec.max_tokens,
        "max_num_seqs": spec.max_running,
        "tensor_parallel_size": spec.tensor_parallel,
        "pipeline_parallel_size": spec.pipeline_parallel,
        "seed": spec.seed,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from, temperature and all
        "scheduling_policy": "priority",
        "structured_outputs_config": {"backend": "guidance"},  # which is ours, too, so that grammars mean the same
        "worker_extension_cls": WORKER,
        "disable_log_stats": True,
    }
    if spec.accelerator is CPU:
        arguments |= {"enforce_eager": True}
    return words(arguments, spec.extra)


def server_environment(inherited: Mapping[str, str], accelerator: Accelerator, temporary: Path) -> dict[str, str]:
    """The server's environment.

    Args:
        temporary: a directory of its own, for the sockets between its processes.
    """
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HOST_IP": "127.0.0.1",  # its processes are all on this machine
    }
    if accelerator is CPU:
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine of a machine takes the same processors
        }
    chosen = own_environment(inherited)  # who sets one of vLLM's variables means it
    return environment | chosen | {TIED: "1", "TMPDIR": str(temporary)}

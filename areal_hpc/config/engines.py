"""The sections of the engines: which serve, and how new weights reach them. ``schema`` puts them into the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class EngineName(StrEnum):
    EMBEDDED = "embedded"
    SGLANG = "sglang"
    VLLM = "vllm"


class TransportName(StrEnum):
    BROADCAST = "broadcast"
    DISK = "disk"


OWN_ARGUMENTS: Mapping[str, str] = {
    "admin_api_key": "the run makes its keys itself",
    "api_key": "the run makes its keys itself",
    "config": "write its arguments here instead",
    "context_length": "set model.max_tokens",
    "dtype": "set model.dtype",
    "enable_metrics": "the run reads its load there, so it is always on",
    "data_parallel_size": "set generation.replicas",
    "dist_init_addr": "the run publishes where the nodes of an engine meet",
    "enable_return_routed_experts": "set model.routing_replay",
    "host": "the run listens where its processes find it",
    "logprobs_mode": "training needs log-probs of the distribution that was sampled from",
    "max_model_len": "set model.max_tokens",
    "max_num_seqs": "set generation.max_running",
    "max_running_requests": "set generation.max_running",
    "model": "set model.path",
    "model_path": "set model.path",
    "master_addr": "the run publishes where the nodes of an engine meet",
    "nccl_port": "the run takes ports from the kernel",
    "nnodes": "set generation.tensor_parallel, and the GPUs of a node in cluster.generation",
    "node_rank": "set generation.tensor_parallel, and the GPUs of a node in cluster.generation",
    "port": "the run takes ports from the kernel",
    "pp_size": "set generation.pipeline_parallel",
    "pipeline_parallel_size": "set generation.pipeline_parallel",
    "scheduling_policy": "the run orders requests, so that training goes before evaluation",
    "structured_outputs_config": "grammars mean the same on every engine",
    "tensor_parallel_size": "set generation.tensor_parallel",
    "tp": "set generation.tensor_parallel",
    "tp_size": "set generation.tensor_parallel",
    "weight_version": "the trainer names the weights",
    "worker_extension_cls": "the run's own takes the weights",
}
"""Arguments of the engine's server that the run gives itself, and what to do instead of giving them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    backend: EngineName = EngineName.EMBEDDED
    """Engine: the embedded CPU engine, SGLang or vLLM."""
    replicas: int = 1
    """Engines of the run's own processes, each with the whole model; 0 leaves generation to satellites that join."""
    tensor_parallel: int = 1
    """GPUs of one engine, or of one of its pipeline stages. Where an engine needs more than a node of
    cluster.generation has, it spans as many nodes as it takes, all of their GPUs."""
    pipeline_parallel: int = 1
    """Pipeline stages of one engine. SGLang lets their ranks enter no weight group, so it needs
    weights.transport=disk."""
    max_running: int = 64
    """Sequences an engine decodes at once; more wait in its queue."""
    max_requests: int = 0
    """Requests that one process (a rollout worker, the evaluator) gives an engine at once; others wait there. 0 is any
    number."""
    max_outstanding_tokens: int = 0
    """The same in tokens, prompts and `max_new_tokens` together; a request longer than that goes alone. 0 is any
    number."""
    threads: int = 1
    """CPU threads of one embedded engine."""
    python: str = ""
    """Python of the environment that SGLang or vLLM is installed in, such as `examples/sglang_environment` or
    `examples/vllm_environment` makes; empty is the run's own."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments handed to the engine's own server untouched, by its names: `{mem_fraction_static: 0.8}`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsConfig:
    transport: TransportName = TransportName.BROADCAST
    """How new weights reach the engines: a collective broadcast, or safetensors on the shared disk."""
    bucket_mb: float = 256.0
    """Size of one flat transfer buffer, in MiB."""
    delta: bool = False
    """Send only the elements that have changed, exactly, wherever that is shorter: worth it where weights are bfloat16
    and steps small. Costs a copy of the weights in rank 0's host memory, and with SGLang and vLLM one in that of each
    rank of an engine, whole."""
    whole_every: int = 32
    """With `delta`, one of so many updates in a row is whole; so is each after an engine failed or came back."""
    min_mb_per_s: float = 50.0
    """A weight update slower than this, in MiB/s to each engine, is warned of: it may go over the wrong network. 0 is
    off."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    backend: EngineName = EngineName.EMBEDDED
    """Engine: the embedded CPU engine, SGLang or vLLM."""
    replicas: int = 1
    """Engines, each with the whole model."""
    tensor_parallel: int = 1
    """GPUs of one engine."""
    pipeline_parallel: int = 1
    """Pipeline stages of one engine."""
    max_running: int = 64
    """Sequences an engine decodes at once; more wait in its queue."""
    threads: int = 1
    """CPU threads of one embedded engine."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments handed to the engine's own server untouched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsConfig:
    transport: TransportName = TransportName.BROADCAST
    """How new weights reach the engines: a collective broadcast, or safetensors on the shared disk."""
    bucket_mb: float = 256.0
    """Size of one flat transfer buffer, in MiB."""
    min_mb_per_s: float = 50.0
    """A weight update slower than this, in MiB/s to each engine, is warned of: it may go over the wrong network. 0 is
    off."""

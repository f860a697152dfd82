"""What trainer and engines tell each other of weights that are to travel: where they meet, and what comes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor on its way to an engine, in Hugging Face names."""

    name: str
    dtype: str  # as torch prints it, without the module: "float32", "bfloat16"
    shape: tuple[int, ...]
    checksum: int  # CRC-32C of its bytes, contiguous, little-endian
    num_changed: int | None = None  # elements that travel, where the rest is what the engine holds; None: all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddress:
    """A process group of one trainer (rank 0) and all engine ranks, before it exists."""

    host: str
    port: int
    name: str
    world_size: int
    backend: str  # gloo, nccl, hccl


@dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """How an engine takes an update that comes in buckets."""

    stages: bool
    """Whether buckets are put beside the weights that it samples with, so that it is paused only after the last one."""
    proves: bool
    """Whether the engine proves what comes, by the checksums in the specs."""

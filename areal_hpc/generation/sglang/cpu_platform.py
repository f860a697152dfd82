"""SGLang on a CPU in plain PyTorch, through its interface for platforms of others: no kernels of its own are needed.

Imported by SGLang alone, in the environment that SGLang is installed in. Every fused operator runs its ``native``
branch, attention is torch's own, and collectives are gloo: slow, and the same server, scheduler, cache and weight
update code that runs on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """What SGLang asks a platform for; names and signatures are SGLang's."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def init_backend(self) -> None:
        """SGLang registers with CUDA what it keeps on the host, such as the choice of experts, unless told not to."""
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        ALLOC_MEMORY_FUNCS[self.device_type] = _host_memory

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool  # type: ignore[no-any-return]

    def get_paged_allocator_cls(self) -> Callable[..., Any]:
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

        def allocator(size: int, *, page_size: int, **pool: Any) -> Any:
            if page_size != 1:
                raise ValueError(f"page_size {page_size} needs kernels that a CPU lacks; leave it out, or set it to 1")
            return TokenToKVPoolAllocator(size, **pool)

        return allocator


def _host_memory(shape: tuple[int, ...], *, dtype: Any, device: str, allocator: Any, **_: Any) -> Any:
    return allocator.allocate(shape, dtype=dtype, device=device)

"""A server of SGLang as a run would ask for it."""

from __future__ import annotations

from areal_hpc.accelerator import CPU
from areal_hpc.config.lora import LoraConfig
from areal_hpc.generation.external.spec import ServerSpec

KEY = "a-key-that-must-not-leak"
SPEC = ServerSpec(
    model_path="/m", dtype="float32", host="127.0.0.1", key=KEY, accelerator=CPU, max_running=4, max_tokens=100
)
LORA = LoraConfig(rank=4, target_modules=("q_proj",))

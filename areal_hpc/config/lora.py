"""The section `model.lora`: small matrices beside the model's own, which are trained in their place.

Hu et al. 2021, arXiv:2106.09685. There is no dropout: current, proximal and behaviour policy must be the same function
of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    rank: int = 0
    """Width of the adapters that are trained while the model itself is frozen; 0 trains the model. A critic is always
    trained whole. Engines are sent adapters alone; with SGLang and vLLM they are merged there, which costs a copy of
    the frozen weights in the host memory of each rank of an engine, whole. The stages of a pipeline are sent the model
    with the adapters in it."""
    alpha: float = 32.0
    """What an adapter computes counts `alpha / rank` times; with it grows how far a step of the optimizer goes."""
    target_modules: tuple[str, ...] = (*ATTENTION, *FEED_FORWARD)
    """Layers that get an adapter, by the last word of their names; by default all matrices of a Llama or Qwen."""

    @property
    def scale(self) -> float:
        """By which the product of an adapter's two matrices is multiplied; of a ``rank`` above 0."""
        return self.alpha / self.rank


NO_LORA = LoraConfig()
"""The model itself is trained."""

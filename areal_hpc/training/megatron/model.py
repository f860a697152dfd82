"""Megatron's GPT in the shape of a Hugging Face checkpoint, its head left to whoever wants log-probs.

    chunks = build(architecture, trainer, dtype)            this rank's layers; several with virtual pipeline stages
    hidden = chunks[-1](token_ids, positions, None, packed_seq_params=...)      both [1, T]

Ours are, on every device: attention over packed sequences with their rotary positions, RMSNorm as transformers computes
it, and the gate of a feed-forward layer. Weights are left as memory was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from areal_hpc import accelerator
from areal_hpc.config.schema import Attention, Recompute, TrainerConfig
from areal_hpc.pretrained.architecture import Architecture
from areal_hpc.pretrained.rope import amplitude, inverse_frequencies
from areal_hpc.training.megatron.attention import PackedAttention
from areal_hpc.training.megatron.fused import gated, rms_norm
from areal_hpc.training.megatron.kernels import transformer_engine
from areal_hpc.training.megatron.names import Split, first_layer, weight_of
from areal_hpc.training.megatron.rotary import turns_of

RECOMPUTED: Mapping[Recompute, Mapping[str, Any]] = {
    Recompute.NONE: {},
    Recompute.ATTENTION: {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    Recompute.LAYERS: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Recomputation in Megatron's words."""
FP8: Mapping[str, Any] = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
"""FP8 in Megatron's words. Scales follow from the tensors at hand: nothing is remembered of earlier steps, so no
checkpoint need hold it."""


class RMSNorm(torch.nn.Module):
    """``fused.rms_norm``; Megatron's own needs Transformer Engine for sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=_device()))
        # Each rank sees its own tokens only: Megatron then sums this weight's gradient over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)


def _device() -> str:
    return accelerator.detect().device


def build(
    architecture: Architecture, trainer: TrainerConfig, dtype: torch.dtype, *, number_head: str = ""
) -> list[Any]:
    """This rank's chunks of the model, weights unset.

    Args:
        number_head: name of a layer that makes one number of each state and stands in the place of the words; such a
            layer called ``score`` has no bias, as transformers' sequence classifiers have none.
    """
    config = transformer_config(architecture, trainer, dtype)
    chunks = trainer.parallel.virtual_pipeline
    numbers = range(chunks) if chunks > 1 else [None]
    return [_build_chunk(architecture, config, number, number_head, trainer.attention) for number in numbers]


def transformer_config(architecture: Architecture, trainer: TrainerConfig, dtype: torch.dtype) -> Any:
    """What Megatron calls the model."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel = trainer.parallel
    interleaved = parallel.virtual_pipeline > 1
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.intermediate_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        layernorm_epsilon=architecture.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.tensor > 1,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        # Interleaved, the same two ranks exchange several tensors at a time: batched, they would meet in wrong pairs.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=_device() == accelerator.CPU.device,
        perform_initialization=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # noqa: S106 (asked for by variable lengths, also of dense models)
        **_mixture(architecture),
        **(FP8 if trainer.fp8 else {}),
        **RECOMPUTED[trainer.recompute],
    )


def _mixture(architecture: Architecture) -> dict[str, Any]:
    experts = architecture.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_per_token,
        "moe_ffn_hidden_size": experts.intermediate_size,
        # Softmax over the chosen ones alone is softmax over all, renormalised.
        "moe_router_pre_softmax": not experts.renormalised,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }


def _build_chunk(
    architecture: Architecture, config: Any, number: int | None, number_head: str, attention: Attention
) -> Any:
    from megatron.core import parallel_state

    stage = {"ignore_virtual": number is None, "vp_stage": number}
    model = _policy_class()(
        config=config,
        transformer_layer_spec=_block(config, number, attention),
        vocab_size=padded_vocabulary(architecture, config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=architecture.tied and not number_head,
        position_embedding_type="none",  # which tells its layers nothing: ours find it with the lengths
        vp_stage=number,
    )
    model.frequencies = inverse_frequencies(architecture.rope, architecture.head_dim).to(_device())
    model.amplitude = amplitude(architecture.rope)
    model.number_head = number_head
    if number_head and model.post_process:
        del model.output_layer
        layer = torch.nn.Linear(
            architecture.hidden_size, 1, bias=number_head != "score", dtype=config.params_dtype, device=_device()
        )
        model.add_module(number_head, layer)
    if architecture.experts is None:
        for layer in model.decoder.layers:
            layer.mlp.forward = partial(_feed_forward, layer.mlp)
    # A router's weight is in host memory until it first computes, and a frozen one may have to travel before that.
    model.to(_device())
    _mark_split_weights(model)
    return model


def padded_vocabulary(architecture: Architecture, tensor: int) -> int:
    """Words with as many added as make equal shares."""
    return -(-architecture.vocab_size // tensor) * tensor


def _policy_class() -> Any:
    from megatron.core.models.gpt import GPTModel

    class Policy(GPTModel):  # type: ignore[misc]
        """GPT that answers with its last hidden states [T, 1, H], not with logits of every word."""

        def forward(
            self, token_ids: Tensor, positions: Tensor, *given: Any, packed_seq_params: Any, **named: Any
        ) -> Tensor:
            packed_seq_params.turns = turns_of(self.frequencies, self.amplitude, positions[0], self.config.params_dtype)
            hidden: Tensor = super().forward(token_ids, positions, *given, packed_seq_params=packed_seq_params, **named)
            return hidden

        def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            return hidden_states

    assert hasattr(GPTModel, "_postprocess"), "this Megatron computes its logits elsewhere"
    return Policy


def _feed_forward(layer: Any, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Forward of Megatron's ``MLP`` without a bias; that of an expert, which weighs its tokens, stays as it is."""
    both, _no_bias = layer.linear_fc1(hidden)
    out, _no_bias = layer.linear_fc2(gated(both))
    return out, None


def _block(config: Any, number: int | None, kernel: Attention) -> Any:
    """The specification of this chunk's layers, with our attention and norms in it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention.core_attention = ModuleSpec(module=PackedAttention, params={"attention": kernel})
    if config.fp8:
        linear = transformer_engine("trainer.fp8")
        # Newer Megatrons specify this layer by a function with its arguments.
        feed_forward = parts.mlp.keywords["submodules"] if isinstance(parts.mlp, partial) else parts.mlp.submodules
        attention.linear_qkv = feed_forward.linear_fc1 = linear.TEColumnParallelLinear
        attention.linear_proj = feed_forward.linear_fc2 = linear.TERowParallelLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    num_layers = get_num_layers_to_build(config, vp_stage=number)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def _mark_split_weights(model: Any) -> None:
    """Say which weights tensor-parallel ranks hold parts of: where Megatron does not initialise, it does not mark.

    Unmarked, the parts of all but the first rank would be missing from the gradient's norm, and clipping be wrong.
    """
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    for name, parameter in model.named_parameters():
        split = weight_of(name, first_layer(model)).split
        if split is not Split.WHOLE and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, int(split is Split.INPUTS), 1)

"""Latent attention around Megatron-Core's `Attention` and parallel linear layers.

Megatron-Core 0.19.2 has `MLASelfAttention`. It makes angles from places in a row, also in packed rows; drops the batch
dimension with any packed row (multi_latent_attention.py:760); accepts four classes of projections to latents, none with
adapters (:535); gathers these over the global tensor-parallel group (:695); and gives the norms of latents the epsilon
of the layer's. Here projections to latents are whole on every rank, and queries, keys and values go through `Attention`
as any others: packed rows, context parallelism, recomputation and caches are those of all models.

Shape suffixes: S sequence (this tensor-parallel rank's part under sequence parallelism), B batch, H hidden, N heads of
this rank, D channels.
"""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.utils import skip_init

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.models.attention import SdpaAttention
from mimo_train.models.blocks.module import BlockModule
from mimo_train.models.lora.linear import linear_classes
from mimo_train.models.norms import TorchNorm
from mimo_train.models.parameters import mark
from mimo_train.models.rotary import attention_factor

EPSILON = 1e-6
"""Of the norms of latents, as in `transformers`, whatever that of the other norms is."""


def build(config: TransformerConfig, te: bool) -> BlockModule:
    """Return the classes of the block, which are torch's."""
    column, row = linear_classes(adapted=config.lora.rank > 0)
    parts = SelfAttentionSubmodules(linear_qkv=column, core_attention=SdpaAttention, linear_proj=row)
    module = ModuleSpec(LatentAttention, {"attn_mask_type": AttnMaskType.causal}, parts)
    return BlockModule(TorchNorm, module, {})


class LatentAttention(Attention):
    """Attention whose keys and values are projected from latents; `config.llm` is the `LlmSpec`, `config.kv_channels`
    the width of a value. Keys and queries have their rotating channels first."""

    k_layernorm = None

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        *,
        pg_collection: ProcessGroupCollection,
        **options: Any,
    ):
        super().__init__(
            config, submodules, layer_number, attn_mask_type, "self", pg_collection=pg_collection, **options
        )
        llm: LlmSpec = config.llm
        hidden, heads, queries = llm.hidden_size, llm.num_attention_heads, llm.q_lora_rank or llm.hidden_size
        self._yarn_concentration_factor = attention_factor(llm.rope_scaling)
        self.key_hidden_size, self.val_hidden_size = llm.head_width, llm.v_head_dim

        def column(inputs: int, outputs: int) -> torch.nn.Module:
            return submodules.linear_qkv(
                inputs,
                outputs,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_group=pg_collection.tp,
            )

        def norm(width: int) -> torch.nn.Module:
            return TorchNorm(config=config, hidden_size=width, eps=EPSILON)

        self.q_layernorm = norm(llm.q_lora_rank) if llm.q_lora_rank else None
        if llm.q_lora_rank:
            self.linear_q_down_proj = whole_linear(hidden, llm.q_lora_rank, config)
            self.linear_q_up_proj = column(queries, heads * llm.head_width)
        else:
            self.linear_q_proj = column(queries, heads * llm.head_width)
        self.linear_kv_down_proj = whole_linear(hidden, llm.kv_lora_rank + llm.qk_rope_head_dim, config)
        self.kv_layernorm = norm(llm.kv_lora_rank)
        self.linear_kv_up_proj = column(llm.kv_lora_rank, heads * (llm.qk_nope_head_dim + llm.v_head_dim))

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        split_qkv: bool = True,
        output_gate: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys [S, B, N, D], not yet rotated, and values, of hidden states [S, B, H]."""
        assert key_value_states is None and split_qkv and not output_gate, "self-attention alone"
        llm: LlmSpec = self.config.llm
        nope, rope, value = llm.qk_nope_head_dim, llm.qk_rope_head_dim, llm.v_head_dim
        if self.q_layernorm is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        query_nope, query_rope = query.unflatten(-1, (-1, nope + rope)).split([nope, rope], dim=-1)
        latent, key_rope = self.linear_kv_down_proj(hidden_states).split([llm.kv_lora_rank, rope], dim=-1)
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        key_nope, values = both.unflatten(-1, (-1, nope + value)).split([nope, value], dim=-1)
        # All heads use this key: gradients of the heads of all ranks add up.
        if self.config.sequence_parallel:
            key_rope = gather_from_sequence_parallel_region(key_rope, group=self.tp_group)
        else:
            key_rope = copy_to_tensor_model_parallel_region(key_rope, group=self.tp_group)
        key_rope = _halves(key_rope).unsqueeze(2).expand(-1, -1, key_nope.size(2), -1)
        query = torch.cat([_halves(query_rope), query_nope], dim=-1)
        return query, torch.cat([key_rope, key_nope], dim=-1), values


def whole_linear(inputs: int, outputs: int, config: TransformerConfig) -> torch.nn.Linear:
    """Return a linear layer without a bias that every tensor-parallel rank has."""
    linear = skip_init(torch.nn.Linear, inputs, outputs, bias=False, dtype=config.params_dtype)
    if config.perform_initialization:
        config.init_method(linear.weight)
    # Each rank sees its part of the tokens: `finalize_model_grads` then sums over the tensor-parallel ranks.
    mark(linear.weight, sequence_parallel=config.sequence_parallel)
    return linear


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """Return channels [..., D] with the first ones of all pairs before the second ones. Directories have pairs of
    channels that rotate together next to each other."""
    return pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

"""Core attention on `torch.nn.functional.scaled_dot_product_attention`.

A drop-in for Megatron-Core's `DotProductAttention`, which materialises the score matrix. Torch picks the kernel: flash
attention on a GPU, a fused one on a CPU.

Shape suffixes: S sequence, B batch, N heads, D head dimension, C positions of one context-parallel rank.
"""

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.bias import causal_lower_right

from mimo_train.config.fault import UserError
from mimo_train.parallel.context import chunks_of, gather_sequence


class SdpaAttention(MegatronModule):
    """softmax(Q K^T * scale) V, causal or unmasked, with grouped queries.

    With context parallelism each rank gathers keys and values of the whole sequence, and its two chunks of queries
    attend to all positions up to their own (see `context`).

    Raises:
        UserError: for a mask type other than causal and no_mask, or context parallelism without a causal mask.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        *,
        pg_collection: ProcessGroupCollection,
        **_unused_by_this_backend: object,
    ):
        super().__init__(config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise UserError(f"SdpaAttention masks causally or not at all, mask type is {attn_mask_type}")
        self.is_causal = attn_mask_type is AttnMaskType.causal
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        if self.cp_group and not self.is_causal:
            raise UserError(f"SdpaAttention cuts causal sequences only, cp is {config.context_parallel_size}")
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBND: torch.Tensor,
        value_SBND: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend; keys and values may have fewer heads than queries. Returns [S, B, heads * D].

        `attention_mask` is ignored: padding is at the end, where the causal mask already hides it.
        """
        assert packed_seq_params is None, "packed sequences need the te layer spec"
        if self.cp_group:
            return self._attend_to_all_parts(query_SBND, key_SBND, value_SBND, self.cp_group)
        return self._attend(query_SBND, key_SBND, value_SBND, attention_bias, self.is_causal)

    def _attend_to_all_parts(
        self,
        query_CBND: torch.Tensor,
        key_CBND: torch.Tensor,
        value_CBND: torch.Tensor,
        cp_group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Attention of this rank's query chunks over keys and values of all ranks, gathered in one message."""
        head = key_CBND.size(-1)
        keys_values = gather_sequence(torch.cat([key_CBND, value_CBND], dim=-1), cp_group)
        key_SBND, value_SBND = keys_values[..., :head], keys_values[..., head:]
        own = chunks_of(cp_group.rank(), cp_group.size())
        attended = []
        for chunk, query in zip(own, query_CBND.chunk(2), strict=True):
            seen = (chunk + 1) * len(query)
            mask = causal_lower_right(len(query), seen)
            attended.append(self._attend(query, key_SBND[:seen], value_SBND[:seen], mask, False))
        return torch.cat(attended)

    def _attend(
        self,
        query_SBND: torch.Tensor,
        key_SBND: torch.Tensor,
        value_SBND: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        context_BNSD = torch.nn.functional.scaled_dot_product_attention(
            query_SBND.permute(1, 2, 0, 3),
            key_SBND.permute(1, 2, 0, 3),
            value_SBND.permute(1, 2, 0, 3),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            scale=self.softmax_scale,
            enable_gqa=key_SBND.size(2) != query_SBND.size(2),
        )
        return context_BNSD.permute(2, 0, 1, 3).flatten(2)

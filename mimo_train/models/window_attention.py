"""Core attention inside windows of neighbouring tokens, for encoders whose layers have some."""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.models.attention import SdpaAttention
from mimo_train.models.documents import Documents


class WindowAttention(SdpaAttention):
    """`SdpaAttention` of a packed row inside the windows of its `Documents`, but in the layers of
    `config.full_attention` (numbers from 0) inside the documents themselves."""

    def __init__(self, config: TransformerConfig, layer_number: int, *arguments: object, **options: object):
        super().__init__(config, layer_number, *arguments, **options)  # type: ignore[arg-type]
        assert not self.is_causal, "windows of an encoder see both ways"
        self.everywhere = layer_number - 1 in config.full_attention

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
        """As `SdpaAttention.forward`; B is 1."""
        assert isinstance(packed_seq_params, Documents) and packed_seq_params.windows, packed_seq_params
        inside = packed_seq_params if self.everywhere else packed_seq_params.windows
        return super().forward(query_SBND, key_SBND, value_SBND, packed_seq_params=inside)

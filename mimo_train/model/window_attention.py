"""Core attention inside windows of neighbouring tokens, for encoders whose layers have some.

Shape suffixes: S sequence, B batch, N heads, D head dimension, W windows of one length, L tokens of each.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.model.attention import SdpaAttention
from mimo_train.parallel.device import to_device


class WindowAttention(SdpaAttention):
    """`SdpaAttention` inside windows, but in the layers of `config.full_attention` (numbers from 0).

    `attention_mask` has the lengths of the windows, on the CPU; together they are the sequence. Windows of equal length
    are computed together, without a mask.
    """

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
        """As `SdpaAttention.forward`."""
        if self.everywhere:
            return super().forward(query_SBND, key_SBND, value_SBND)
        assert attention_mask is not None, "the lengths of the windows"
        lengths = attention_mask.tolist()
        assert sum(lengths) == len(query_SBND), (sum(lengths), len(query_SBND))
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        rows, attended = [], []
        for length in sorted(set(lengths)):
            own_WL = starts[attention_mask == length][:, None] + torch.arange(length)
            rows.append(own_WL.flatten())
            place = to_device(rows[-1], query_SBND.device)
            # [L, W * B, N, D]: windows are one more batch.
            query, key, value = (
                tensor[place].unflatten(0, own_WL.shape).transpose(0, 1).flatten(1, 2)
                for tensor in (query_SBND, key_SBND, value_SBND)
            )
            context = self._attend(query, key, value, None, False)
            attended.append(context.unflatten(1, (len(own_WL), -1)).transpose(0, 1).flatten(0, 1))
        back = torch.argsort(torch.cat(rows))
        return torch.cat(attended)[to_device(back, query_SBND.device)]

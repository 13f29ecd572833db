"""Rotary embeddings that turn by time, row and column.

Shape suffixes: S sequence, B batch, F frequencies (half a head).
"""

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import get_pos_emb_on_this_cp_rank

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.models.rope import inverse_frequencies


class AxisRotaryEmbedding(torch.nn.Module):
    """Angles of tokens with positions on three axes, each of which turns its own frequencies (M-RoPE; Wang et al. 2024,
    arXiv 2409.12191, section 2.1).

    Megatron-Core 0.19.2 has them in three sections, one behind the other (rotary_pos_embedding.py:356), and not
    interleaved; nor does it take positions without axes, of a batch without pictures.
    """

    def __init__(self, llm: LlmSpec, cp_group: dist.ProcessGroup):
        super().__init__()
        # Plain attributes, as Megatron-Core has them: of no checkpoint, and in fp32 in a model of bf16.
        self.inv_freq = inverse_frequencies(llm)
        self._axes = torch.tensor(axes_of_frequencies(llm.mrope_section, llm.mrope_interleaved))
        self._sections, self._cp_group = list(llm.mrope_section), cp_group

    def forward(
        self, position_ids: torch.Tensor, sections: list[int], cp_group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """Angles [S, B, 1, 2 F] of this context-parallel rank's tokens, from the positions of all, [3, B, S] or
        [B, S].

        Args:
            sections: frequencies of each axis, those that this was built with.
        """
        assert list(sections) == self._sections, (sections, self._sections)
        if self.inv_freq.device != position_ids.device:
            self.inv_freq, self._axes = (each.to(position_ids.device) for each in (self.inv_freq, self._axes))
        positions_3BS = position_ids.expand(3, *position_ids.shape[-2:])
        angles_SBF = positions_3BS[self._axes].permute(2, 1, 0).to(self.inv_freq.dtype) * self.inv_freq
        angles = torch.cat([angles_SBF, angles_SBF], dim=-1)[:, :, None]
        group = cp_group or self._cp_group
        return angles if group.size() == 1 else get_pos_emb_on_this_cp_rank(angles, 0, group)


def axes_of_frequencies(section: list[int], interleaved: bool) -> list[int]:
    """The axis that turns each frequency: 0 time, 1 row, 2 column.

    Args:
        section: frequencies of each axis.
        interleaved: time, row, column, time, ... until an axis has all of its own, and time behind them, instead of one
            axis behind the other.
    """
    if not interleaved:
        return [axis for axis, count in enumerate(section) for _ in range(count)]
    return [number % 3 if number < 3 * section[number % 3] else 0 for number in range(sum(section))]

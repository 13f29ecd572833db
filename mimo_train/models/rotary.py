"""Rotary position embeddings: frequencies of all kinds of `RopeScaling`, angles on three axes, per-layer angles.

Megatron-Core 0.19.2 has llama3 scaling with fixed numbers (rotary_pos_embedding.py:92), and yarn without its own
attention factor. Its `RotaryEmbedding` reads `inv_freq`, which is set here.

Shape suffixes: S sequence, B batch, F frequencies (half a head).
"""

import math

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import get_pos_emb_on_this_cp_rank

from mimo_train.config.llm_spec import LlmSpec, RopeScaling


def inverse_frequencies(llm: LlmSpec) -> torch.Tensor:
    """Return [rotary_width / 2] angles per position, fp32. With a `local_rope_base` return [rotary_width]: those of
    layers that attend to all tokens, then those of layers with a window."""
    frequencies = _scaled(_frequencies(llm.rope_base, llm.rotary_width), llm.rope_scaling, llm.rope_base)
    if not llm.local_rope_base:
        return frequencies
    return torch.cat([frequencies, _frequencies(llm.local_rope_base, llm.rotary_width)])


def angles_of_layer(angles: torch.Tensor, local: bool) -> torch.Tensor:
    """Return the angles [..., rotary_width] of one kind of layers, from both kinds' [..., 2 rotary_width]. Both halves
    of a head turn alike, so the embedding contains each kind twice."""
    return angles.unflatten(-1, (2, 2, -1))[..., int(local), :].flatten(-2)


def attention_factor(scaling: RopeScaling) -> float:
    """Return the factor of rotated queries and keys (Peng et al. 2023, arXiv 2309.00071, section 3.4)."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _temperature(scaling.factor, scaling.mscale) / _temperature(scaling.factor, scaling.mscale_all_dim)
    return _temperature(scaling.factor, 1.0)


def _temperature(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _frequencies(base: float, width: int) -> torch.Tensor:
    return 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling, base: float) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, base)
    return frequencies  # `dynamic` changes nothing within `max_positions`


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Stretch long waves, keep short ones, and interpolate between the two bounds."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wave = 2 * math.pi / frequencies
    longest, shortest = scaling.original_positions / low, scaling.original_positions / high
    share = (scaling.original_positions / wave - low) / (high - low)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    stretched = torch.where(wave > longest, frequencies / scaling.factor, frequencies)
    return torch.where((wave >= shortest) & (wave <= longest), between, stretched)


def _yarn(frequencies: torch.Tensor, scaling: RopeScaling, base: float) -> torch.Tensor:
    """Scale as `_llama3`, with bounds in turns within the original positions and a ramp over frequency numbers."""
    width = 2 * len(frequencies)

    def number_of(turns: float) -> float:
        return width * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = number_of(scaling.beta_fast), number_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # avoids division by zero
    ramp = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


class AxisRotaryEmbedding(torch.nn.Module):
    """Angles of tokens with positions on three axes, each with its own frequencies (M-RoPE; Wang et al. 2024, arXiv
    2409.12191, section 2.1). Megatron-Core 0.19.2 supports only three consecutive sections
    (rotary_pos_embedding.py:356), not interleaved ones. It does not take positions without axes, which a batch without
    images has."""

    def __init__(self, llm: LlmSpec, cp_group: dist.ProcessGroup):
        super().__init__()
        # Plain attributes as in Megatron-Core: not in checkpoints, and fp32 in a bf16 model.
        self.inv_freq = inverse_frequencies(llm)
        self._axes = torch.tensor(axes_of_frequencies(llm.mrope_section, llm.mrope_interleaved))
        self._sections, self._cp_group = list(llm.mrope_section), cp_group
        self._neighbours = llm.rope_interleaved

    def forward(
        self, position_ids: torch.Tensor, sections: list[int], cp_group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """Return angles [S, B, 1, 2 F] of this context-parallel rank's tokens, from all positions, [3, B, S] or [B, S].
        `sections` must equal the spec's frequencies of each axis."""
        assert list(sections) == self._sections, (sections, self._sections)
        if self.inv_freq.device != position_ids.device:
            self.inv_freq, self._axes = (each.to(position_ids.device) for each in (self.inv_freq, self._axes))
        positions_3BS = position_ids.expand(3, *position_ids.shape[-2:])
        angles_SBF = positions_3BS[self._axes].permute(2, 1, 0).to(self.inv_freq.dtype) * self.inv_freq
        # Both channels of a pair turn alike: they are neighbours, or half a head apart.
        pairs = torch.stack([angles_SBF, angles_SBF], dim=-1 if self._neighbours else -2)
        angles = pairs.flatten(-2)[:, :, None]
        group = cp_group or self._cp_group
        return angles if group.size() == 1 else get_pos_emb_on_this_cp_rank(angles, 0, group)


def axes_of_frequencies(section: list[int], interleaved: bool) -> list[int]:
    """Return the axis of each frequency: 0 time, 1 row, 2 column.

    Args:
        section: frequencies of each axis.
        interleaved: time, row, column, time, ... until an axis is complete, then time, instead of one axis after the
            other.
    """
    if not interleaved:
        return [axis for axis, count in enumerate(section) for _ in range(count)]
    return [number % 3 if number < 3 * section[number % 3] else 0 for number in range(sum(section))]

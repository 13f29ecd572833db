"""Frequencies of rotary position embeddings, in all kinds of `RopeScaling`.

Megatron-Core 0.19.2 has llama3's with fixed numbers (rotary_pos_embedding.py:92), and yarn's without an attention
factor of its own; its `RotaryEmbedding` reads `inv_freq`, which is set here.
"""

import math

import torch

from mimo_train.config.llm_spec import LlmSpec, RopeScaling


def inverse_frequencies(llm: LlmSpec) -> torch.Tensor:
    """[head_width / 2] angles by which a position turns, fp32; with a `local_rope_base` [head_width]: those of layers
    that attend to all tokens, then those of layers with a window."""
    frequencies = _scaled(_frequencies(llm.rope_base, llm.head_width), llm.rope_scaling, llm.rope_base)
    if not llm.local_rope_base:
        return frequencies
    return torch.cat([frequencies, _frequencies(llm.local_rope_base, llm.head_width)])


def angles_of_layer(angles: torch.Tensor, local: bool) -> torch.Tensor:
    """The angles [..., head_width] of one kind of layers, from those of both that an embedding with the frequencies of
    `inverse_frequencies` gives, [..., 2 head_width]: both halves of a head turn alike, so that each kind is there
    twice."""
    return angles.unflatten(-1, (2, 2, -1))[..., int(local), :].flatten(-2)


def attention_factor(scaling: RopeScaling) -> float:
    """What rotated queries and keys are multiplied by (Peng et al. 2023, arXiv 2309.00071, section 3.4)."""
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
    """Long waves are stretched, short ones are not, between the two bounds in part."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wave = 2 * math.pi / frequencies
    longest, shortest = scaling.original_positions / low, scaling.original_positions / high
    share = (scaling.original_positions / wave - low) / (high - low)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    stretched = torch.where(wave > longest, frequencies / scaling.factor, frequencies)
    return torch.where((wave >= shortest) & (wave <= longest), between, stretched)


def _yarn(frequencies: torch.Tensor, scaling: RopeScaling, base: float) -> torch.Tensor:
    """As `_llama3`, with bounds in turns within the first training's positions and a ramp over frequency numbers."""
    width = 2 * len(frequencies)

    def number_of(turns: float) -> float:
        return width * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = number_of(scaling.beta_fast), number_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # no ramp, but no division by zero either
    ramp = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)

"""Initial weights outside of transformer layers: drawn, or not where they are read from a directory afterwards."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.utils import skip_init


def bare_layer(kind: type, *sizes: int, config: TransformerConfig, **options: Any) -> Any:
    """A linear layer or convolution of torch. With `config.perform_initialization` it has drawn the weights that torch
    draws, for `draw_weights` to draw anew; without it its memory is as it was."""
    return kind(*sizes, **options) if config.perform_initialization else skip_init(kind, *sizes, **options)


def draw_weights(layer: Any, std: float, config: TransformerConfig) -> None:
    """Weights of a normal distribution, biases of 0; nothing without `config.perform_initialization`."""
    if config.perform_initialization:
        torch.nn.init.normal_(layer.weight, std=std)
        if layer.bias is not None:
            torch.nn.init.zeros_(layer.bias)


def drawn(shape: tuple[int, ...], std: float, config: TransformerConfig) -> torch.nn.Parameter:
    """A parameter of a normal distribution; without `config.perform_initialization` its memory is as it was."""
    if not config.perform_initialization:
        return torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
    return torch.nn.Parameter(torch.randn(shape).mul_(std).to(config.params_dtype))

"""Initial weights outside of transformer layers: drawn, or not where they are read from a directory afterwards."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.utils import skip_init

from encoders.normal import Normal


def bare_layer(kind: type, *sizes: int, **options: Any) -> Any:
    """A linear layer or convolution of torch, whose memory is as it was, for `draw_weights`."""
    return skip_init(kind, *sizes, **options)


def draw_weights(layer: Any, std: float, config: TransformerConfig) -> None:
    """Weights of a normal distribution, biases of 0; nothing without `config.perform_initialization`."""
    if config.perform_initialization:
        Normal(std)(layer.weight)
        if layer.bias is not None:
            torch.nn.init.zeros_(layer.bias)


def drawn(shape: tuple[int, ...], std: float, config: TransformerConfig) -> torch.nn.Parameter:
    """A parameter of a normal distribution; without `config.perform_initialization` its memory is as it was."""
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
    if config.perform_initialization:
        Normal(std)(parameter)
    return parameter

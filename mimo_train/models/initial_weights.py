"""Parallel layers of Megatron-Core draw only this rank's part of their weight.

With `use_cpu_initialization` Megatron-Core 0.19.2 draws every weight whole on every rank and cuts it
(tensor_parallel/layers.py:184), at the time and memory of the whole model. The numbers are the same here (see
`encoders.initial_weights`). Layers built outside of `own_parts` draw whole weights.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from encoders.errors import EncoderError
from encoders.initial_weights import Normal
from encoders.plain.model import PlainEncoder
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.models.parameters import modules_of

_TRANSFORMER_ENGINE = "megatron.core.extensions.transformer_engine"
_whole = layers._initialize_affine_weight_cpu


def draw_by(config: TransformerConfig) -> None:
    """Let the layers of a config draw their weights from `Normal`, with Megatron-Core's deviations."""
    config.init_method = config.embedding_init_method = Normal(config.init_method_std)
    config.output_layer_init_method = Normal(config.init_method_std / (2 * config.num_layers) ** 0.5)


@contextmanager
def own_parts() -> Iterator[None]:
    """Let layers built in the block draw only their own parts, or nothing without `config.perform_initialization`."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(layers, _whole.__name__, _draw_part))
        if engine := sys.modules.get(_TRANSFORMER_ENGINE):
            stack.enter_context(patch.object(engine, _whole.__name__, _draw_part))
            stack.enter_context(patch.object(engine, "condition_init_method", _if_drawn))
        yield


def _draw_part(
    weight: torch.Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: Callable[[torch.Tensor], Any],
    stride: int = 1,
    return_master_weight: bool = False,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    skip_set_tensor_parallel_attributes: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """Replace `_initialize_affine_weight_cpu`; `stride` is a number of pieces that are each cut."""
    own = isinstance(init_method, Normal) and not return_master_weight
    if init_method is not _nothing and not (own and rank is not None):
        options = {"rank": rank, "world_size": world_size, **others}
        options["skip_set_tensor_parallel_attributes"] = skip_set_tensor_parallel_attributes
        sizes = (output_size, input_size, per_partition_size)
        return _whole(weight, *sizes, partition_dim, init_method, stride, return_master_weight, **options)
    if not skip_set_tensor_parallel_attributes:
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=partition_dim, stride=stride)
    if isinstance(init_method, Normal):
        assert rank is not None and world_size is not None
        init_method.draw_part(weight, partition_dim, rank, world_size, stride)
    return None


def _if_drawn(config: TransformerConfig, init_method: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Replace `condition_init_method` in layers of Transformer Engine."""
    return init_method if config.perform_initialization else _nothing


def _nothing(weight: torch.Tensor) -> None:
    """Leave a weight as it is."""


def load_start_weights(model: list[MegatronModule]) -> bool:
    """Let every plain encoder of this rank load its weights. Return True if there is any: an optimizer with master
    copies must read the weights again.

    Raises:
        UserError: an encoder's weights cannot be loaded.
    """
    plain = [
        encoder
        for name, (module, *_) in modules_of(model).items()
        if name != LANGUAGE
        for encoder in unwrap_model(module).encoders.values()
        if isinstance(encoder, PlainEncoder)
    ]
    try:
        for encoder in plain:
            encoder.load_weights()
    except EncoderError as error:
        raise UserError(str(error)) from error
    return bool(plain)

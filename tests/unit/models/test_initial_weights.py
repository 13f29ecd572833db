"""Parallel layers draw their own parts: the bits that Megatron-Core cuts out of the whole weight."""

import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import layers

from encoders.initial_weights import Normal
from mimo_train.models.parameters import draw_by, drawn_in_parts

ROWS, COLUMNS = 24, 80


def _initialised(rank: int, ranks: int, dim: int, stride: int, dtype: torch.dtype, method=None) -> torch.Tensor:
    sizes = [ROWS, COLUMNS]
    sizes[dim] //= ranks
    weight = torch.full(sizes, math.nan, dtype=dtype)
    torch.manual_seed(3)
    layers._initialize_affine_weight_cpu(
        weight, ROWS, COLUMNS, sizes[dim], dim, method or Normal(0.02), stride, params_dtype=dtype, rank=rank,
        world_size=ranks,
    )  # fmt: skip
    assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, dim, stride)
    return weight


def test_what_is_not_ours_goes_its_way():
    with drawn_in_parts():
        weight = _initialised(1, 2, 1, 1, torch.float32, lambda whole: whole.copy_(torch.arange(80.0).expand(24, 80)))
    assert torch.equal(weight, torch.arange(40.0, 80.0).expand(24, 40))


@pytest.mark.parametrize("drawn", [True, False])
def test_layers_of_transformer_engine_leave_what_is_loaded_as_it_was(drawn):
    config = SimpleNamespace(perform_initialization=drawn)
    weight = torch.full((4, 8), math.nan)
    with drawn_in_parts():
        method = transformer_engine.condition_init_method(config, Normal(0.02))
        transformer_engine._initialize_affine_weight_cpu(weight, 8, 8, 4, 0, method, rank=1, world_size=2)
    assert weight.isfinite().all() == drawn
    assert weight.tensor_model_parallel


def test_nothing_of_megatron_core_stays_changed():
    before = layers._initialize_affine_weight_cpu, transformer_engine.condition_init_method
    with pytest.raises(RuntimeError), drawn_in_parts():
        assert layers._initialize_affine_weight_cpu is not before[0]
        assert transformer_engine._initialize_affine_weight_cpu is layers._initialize_affine_weight_cpu
        raise RuntimeError
    assert (layers._initialize_affine_weight_cpu, transformer_engine.condition_init_method) == before


def test_deviations_are_those_of_megatron_core():
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=8, hidden_size=8, num_attention_heads=1, init_method_std=0.05)
    theirs = [method.keywords["std"] for method in (config.init_method, config.embedding_init_method)]
    theirs.append(config.output_layer_init_method.keywords["std"])
    draw_by(config)
    ours = [config.init_method.std, config.embedding_init_method.std, config.output_layer_init_method.std]
    assert ours == pytest.approx(theirs, rel=1e-12)

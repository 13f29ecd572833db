"""Bytes of weights in fp8 and in NF4."""

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import BLOCK
from mimo_train.layout.kernels import layers_in_fp8
from mimo_train.layout.ranks import stage_layers
from mimo_train.models.blocks.encoder_layer import encoder_layer

FP8_BYTES = 2
"""Bytes of the fp8 copies of a weight: by rows for forward, by columns for the gradient of the input."""


def quantized_bytes(weights: int) -> int:
    """Return the bytes of weights in NF4: two in a byte, and a scale in fp32 for each block."""
    return weights // 2 + weights // BLOCK * 4


def fp8_weight_bytes(
    cfg: ConfigContainer, name: str, stage: int, *, tp: int, stages: int, vpp: int = 1, ep: int = 1, etp: int = 1
) -> int:
    """Return the bytes of the fp8 copies of a module's weights on one rank of a pipeline stage, kept between steps."""
    if cfg.fp8_of(name) == "none":
        return 0
    if name == LANGUAGE:
        llm = cfg.llm
        numbers = stage_layers(llm.num_layers, stage, stages, vpp if stages > 1 else 1)
        layers = [llm.layer(layer) for layer in layers_in_fp8(cfg, numbers, llm.num_layers)]
        return FP8_BYTES * sum(block.matrices(tp, ep, etp) for layer in layers for block in layer.blocks)
    total = 0
    for spec in cfg.modules[name].encoder.parts.values():
        numbers = layers_in_fp8(cfg, stage_layers(spec.built_layers, stage, stages), spec.built_layers)
        total += FP8_BYTES * len(numbers) * sum(block.matrices(tp, 1, 1) for block in encoder_layer(spec).blocks)
    return total

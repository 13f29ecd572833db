"""Memory of a module whose parameters are sharded over data-parallel ranks (`modules.NAME.layout.fsdp`)."""

import re
from dataclasses import dataclass
from math import ceil, prod

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.transformers_llm import TransformersSizes, parameters_of
from mimo_train.estimate.activations import BYTES
from mimo_train.estimate.parameters import ParameterCount

_ENTRY = re.compile(r"(.*?\.\d+)\.")
"""Matches the names of parameters in an entry of a list of modules."""
_FP32 = 4


@dataclass(frozen=True)
class Units:
    """The parameters that are gathered together."""

    largest: int
    """Parameters of the largest layer; 0 if the module is one unit."""
    rest: int
    """Parameters outside of layers, which a language model holds whole from forward to backward."""

    @classmethod
    def of_module(cls, cfg: ConfigContainer, name: str, total: int) -> "Units":
        """Return the units of a module of `total` parameters, as `models.sharding.ShardedModule` chooses them."""
        if name != LANGUAGE:
            return cls(0, total)
        assert isinstance(cfg.llm, TransformersSizes)
        layers: dict[str, int] = {}
        for parameter, shape in parameters_of(cfg.llm.model_config).shapes.items():
            if entry := _ENTRY.match(parameter):
                layers[entry[1]] = layers.get(entry[1], 0) + prod(shape)
        return cls(max(layers.values(), default=0), max(0, total - sum(layers.values())))


@dataclass(frozen=True)
class ShardedBytes:
    """Bytes of a sharded module on one rank."""

    weights: int
    """Shards: fp32 of trained parameters, which are the optimizer's master copies; others as computed. Of a language
    model also the whole tables of the vocabulary."""
    gradients: int
    gathered: int
    """Whole units while they compute: two layers, since the next one is gathered ahead, and the gradient of one, in the
    type of the layer and in fp32."""
    reduces_once: bool
    """True if ranks reduce gradients once a step; False: in every microbatch, which needs no whole gradients."""


def sharded_bytes(cfg: ConfigContainer, name: str, count: ParameterCount, dp: int) -> ShardedBytes:
    """Return the bytes of a module's parameters and gradients over `dp` ranks."""
    size, units = BYTES[cfg.train.precision], Units.of_module(cfg, name, count.total)
    trained, share = count.trainable, count.trainable / max(1, count.total)
    once = trained < units.largest
    weights = ceil((trained * _FP32 + (count.total - trained) * size) / dp)
    gradients = ceil(trained * _FP32 / dp) + (trained * _FP32 if once else 0)
    largest = units.largest or units.rest
    gathered = size * largest * (2 if units.largest else 1) + ceil(share * largest * (size + _FP32))
    if units.largest:
        weights += size * units.rest
    return ShardedBytes(weights, gradients, gathered, once)

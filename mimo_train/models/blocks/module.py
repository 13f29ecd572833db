"""A block as a transformer layer builds it: the interface of `NAME/module.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass(frozen=True)
class BlockModule:
    """The classes of a block in a layer."""

    norm: type
    """Builder of the norm in front of it; `IdentityOp` if its first linear layer has the norm."""
    module: ModuleSpec | partial
    """Builder of the block, as Megatron-Core's `TransformerLayerSubmodules` has it."""
    names: Mapping[str, str]
    """Prefixes of parameters in a layer -> in checkpoints, which name norms as Transformer Engine does, so that either
    kind of layers reads the other's."""

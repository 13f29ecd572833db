"""Padding of texts (`data.pad`) and packing (`data.pack`)."""

import math

from data.order.packing import Packing
from data.order.step_plan import Padding
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.matmuls import language_matmuls
from mimo_train.layout.batch import has_balancing_loss, pack_length
from mimo_train.layout.kernels import row_unit

UNIT = 8
"""Row lengths are multiples of it, which gives few shapes that suit matrix units."""

EQUAL_UNIT = 64
"""The same for rows of equal length: parallel ranks can split them into up to 64 parts."""


def padding_of(cfg: ConfigContainer) -> Padding | Packing | None:
    """Return how microbatches are padded or packed; None: samples in order, in rows of `data.sequence_length`.

    Router losses are means over the positions of sequences or microbatches, padding included. With them all rows of a
    step have the same length at every layout. So such a mean depends neither on the grouping into microbatches nor on
    the number of replicas.
    """
    if cfg.data.pack:
        return _packing(cfg, pack_length(cfg))
    if cfg.data.pad == "sequence":
        return None
    equal = _has_router_losses(cfg.llm)
    return Padding(math.lcm(EQUAL_UNIT if equal else UNIT, _parts(cfg)), equal)


def padding_of_documents(cfg: ConfigContainer) -> Packing:
    """Return a packing of one sample per row, with document ends, for held-out samples."""
    return _packing(cfg, cfg.data.sequence_length)


def _packing(cfg: ConfigContainer, budget: int) -> Packing:
    layout = cfg.language.layout
    # Interleaved stages take microbatches in groups; a group has as many as there are stages.
    groups = layout.pp if layout.vpp > 1 else 1
    pair = _pair(cfg.llm, cfg.data.sequence_length)
    return Packing(budget, math.lcm(UNIT, _parts(cfg)), groups, equal=_has_router_losses(cfg.llm), pair=pair)


def _pair(llm: LlmSpec, length: int) -> float:
    """Return (attention FLOPs of a sample of `length` tokens / length^2) / (other FLOPs of one token). The output layer
    is left out, because it runs only at learned positions."""
    matmuls = language_matmuls(llm, length, vocab=0)
    others = sum(matmul.forward for matmul in matmuls)
    return sum(matmul.attention for matmul in matmuls) / length / others


def _parts(cfg: ConfigContainer) -> int:
    """Return the divisor of row lengths: parallel parts of a sequence x the unit of each part."""
    layout = cfg.language.layout
    return (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1) * row_unit(cfg)


def _has_router_losses(llm: LlmSpec) -> bool:
    return has_balancing_loss(llm) or (llm.num_experts > 0 and llm.router_z_loss > 0)

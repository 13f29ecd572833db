"""How a run pads its texts (`data.pad`), or packs them (`data.pack`)."""

import math

from data.order.packing import Packing
from data.order.step_plan import Padding
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.matmuls import language_matmuls
from mimo_train.layout.batch import has_balancing_loss, pack_length
from mimo_train.layout.kernels import row_unit

UNIT = 8
"""Rows are multiples of it: few shapes, and those that matrix units like."""

EQUAL_UNIT = 64
"""The same of rows that are all as long: what parallel ranks split divides it, up to 64 parts."""


def padding_of(cfg: ConfigContainer) -> Padding | Packing | None:
    """How microbatches of similar lengths are made, or rows of several samples; None: rows of `data.sequence_length`,
    samples in their order.

    Losses of routers are means over the positions of sequences or microbatches, padding included. There all rows of a
    step are as long, and one layout's as another's: neither which samples make a microbatch nor the number of replicas
    has a part in such a mean.
    """
    if cfg.data.pack:
        return _packing(cfg, pack_length(cfg))
    if cfg.data.pad == "sequence":
        return None
    equal = _has_router_losses(cfg.llm)
    return Padding(math.lcm(EQUAL_UNIT if equal else UNIT, _parts(cfg)), equal)


def padding_of_documents(cfg: ConfigContainer) -> Packing:
    """One sample in each row, which says where its documents end: how held-out samples of several documents are read
    (`data.separate_documents`)."""
    return _packing(cfg, cfg.data.sequence_length)


def _packing(cfg: ConfigContainer, budget: int) -> Packing:
    layout = cfg.language.layout
    # Interleaved stages take microbatches in groups of as many as there are stages.
    groups = layout.pp if layout.vpp > 1 else 1
    pair = _pair(cfg.llm, cfg.data.sequence_length)
    return Packing(budget, math.lcm(UNIT, _parts(cfg)), groups, equal=_has_router_losses(cfg.llm), pair=pair)


def _pair(llm: LlmSpec, length: int) -> float:
    """FLOPs of attention in a sample of `length` tokens, over its square and over those of one token in all else but
    the output layer, whose positions are those that learn."""
    matmuls = language_matmuls(llm, length, vocab=0)
    others = sum(matmul.forward for matmul in matmuls)
    return sum(matmul.attention for matmul in matmuls) / length / others


def _parts(cfg: ConfigContainer) -> int:
    """In how many parts a sequence is split by parallel ranks, times what each part must be a multiple of."""
    layout = cfg.language.layout
    return (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1) * row_unit(cfg)


def _has_router_losses(llm: LlmSpec) -> bool:
    """Whether there is a load-balancing loss or a z-loss of experts."""
    return has_balancing_loss(llm) or (llm.num_experts > 0 and llm.router_z_loss > 0)

"""How a run pads its texts (`data.pad`). Imports no torch."""

import math

from data.step_plan import Padding
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema import ConfigContainer

UNIT = 8
"""Rows are multiples of it: few shapes, and those that matrix units like."""

EQUAL_UNIT = 64
"""The same of rows that are all as long: what parallel ranks split divides it, up to 64 parts."""


def padding_of(cfg: ConfigContainer) -> Padding | None:
    """How microbatches of similar lengths are made; None: rows of `data.sequence_length`, samples in their order.

    Losses of routers are means over the positions of sequences or microbatches, padding included. There all rows of a
    step are as long, and one layout's as another's: neither which samples make a microbatch nor the number of replicas
    has a part in such a mean.
    """
    if cfg.data.pad == "sequence":
        return None
    layout, equal = cfg.language.layout, _has_router_losses(cfg.llm)
    parts = (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1)
    return Padding(math.lcm(EQUAL_UNIT if equal else UNIT, parts), equal)


def _has_router_losses(llm: LlmSpec) -> bool:
    """Whether there is a load-balancing loss or a z-loss of experts."""
    balances = llm.router_balancing != "none" and llm.router_aux_loss > 0
    return llm.num_experts > 0 and (balances or llm.router_z_loss > 0)

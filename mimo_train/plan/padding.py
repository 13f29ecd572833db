"""How a run pads its texts (`data.pad`). Imports no torch."""

import math

from data.step_plan import Padding
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema import ConfigContainer

UNIT = 8
"""Rows are multiples of it: few shapes, and those that matrix units like."""


def padding_of(cfg: ConfigContainer) -> Padding | None:
    """How microbatches of similar lengths are made; None: rows of `data.sequence_length`, samples in their order.

    Losses of routers are means over positions, padding included: there every replica of a microbatch has as many, so
    that they do not depend on the number of replicas.
    """
    if cfg.data.pad == "sequence":
        return None
    layout = cfg.language.layout
    parts = (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1)
    return Padding(math.lcm(UNIT, parts), equal=has_router_losses(cfg.llm))


def has_router_losses(llm: LlmSpec) -> bool:
    """Whether there is a load-balancing loss or a z-loss of experts."""
    balances = llm.router_balancing != "none" and llm.router_aux_loss > 0
    return bool(llm.num_experts) and (balances or llm.router_z_loss > 0)

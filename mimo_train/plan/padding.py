"""How a run pads its texts (`data.pad`). Imports no torch."""

import math
from typing import Literal

from data.step_plan import Padding
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema import ConfigContainer

UNIT = 8
"""Rows are multiples of it: few shapes, and those that matrix units like."""


def padding_of(cfg: ConfigContainer) -> Padding | None:
    """How microbatches of similar lengths are made; None: rows of `data.sequence_length`, samples in their order.

    Losses of routers are means over positions, padding included: there every replica of a microbatch has as many, so
    that they do not depend on the number of replicas. One that is balanced over all replicas takes the mean of the
    microbatches so far for each of them (router.py:526 in Megatron-Core 0.19.2): all of a step have as many.
    """
    if cfg.data.pad == "sequence":
        return None
    layout = cfg.language.layout
    parts = (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1)
    return Padding(math.lcm(UNIT, parts), _alike(cfg.llm))


def _alike(llm: LlmSpec) -> Literal["rank", "microbatch", "step"]:
    balances = llm.num_experts > 0 and llm.router_balancing != "none" and llm.router_aux_loss > 0
    if balances and llm.router_balancing == "global_aux_loss":
        return "step"
    return "microbatch" if balances or (llm.num_experts and llm.router_z_loss > 0) else "rank"

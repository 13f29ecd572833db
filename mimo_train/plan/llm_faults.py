"""What is wrong with a language model's sizes, and with its parallel sizes over them. Imports no torch."""

from collections.abc import Iterator

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema import Fault, LayoutConfig

CHOICES = {
    "normalization": ("RMSNorm", "LayerNorm"),
    "activation": ("swiglu", "gelu", "silu"),
    "position": ("rope", "learned"),
    "router_balancing": ("seq_aux_loss", "aux_loss", "global_aux_loss", "none"),
}
"""Values that a key takes."""


def llm_faults(llm: LlmSpec, layout: LayoutConfig, key: str) -> Iterator[Fault]:
    """What is wrong with a language model and the parallel sizes it is given.

    Args:
        key: config key of its module.
    """
    groups = llm.num_query_groups or llm.num_attention_heads
    if llm.hidden_size % llm.num_attention_heads:
        yield Fault(
            f"{key}.llm.num_attention_heads", f"{llm.num_attention_heads} does not divide hidden_size {llm.hidden_size}"
        )
    if llm.num_attention_heads % groups:
        yield Fault(
            f"{key}.llm.num_query_groups", f"{groups} does not divide num_attention_heads {llm.num_attention_heads}"
        )
    widths = {} if llm.num_experts else {"ffn_hidden_size": llm.ffn_hidden_size}
    if llm.num_experts and llm.shared_expert_ffn_hidden_size:
        widths["shared_expert_ffn_hidden_size"] = llm.shared_expert_ffn_hidden_size
    heads = {"num_attention_heads": llm.num_attention_heads, "num_query_groups": groups}
    yield from tp_faults(layout.tp, key, **heads, **widths)
    if layout.vpp > 1:
        yield from _interleaving_faults(llm, layout, key)
    elif layout.pp > llm.num_layers:
        yield Fault(
            f"{key}.layout.pp",
            f"pp {layout.pp} is more than the {llm.num_layers} layers of {key}.llm.num_layers: each stage needs one",
        )
    for field, choices in CHOICES.items():
        if getattr(llm, field) not in choices:
            yield Fault(f"{key}.llm.{field}", f"must be one of {', '.join(choices)}, is {getattr(llm, field)!r}")
    yield from _expert_faults(llm, layout, key)


def _expert_faults(llm: LlmSpec, layout: LayoutConfig, key: str) -> Iterator[Fault]:
    for field in ("num_experts", "expert_ffn_hidden_size", "shared_expert_ffn_hidden_size", "router_aux_loss"):
        if getattr(llm, field) < 0:
            yield Fault(f"{key}.llm.{field}", f"must be at least 0, is {getattr(llm, field)}")
            return
    if not llm.num_experts:
        for axis in ("ep", "etp"):
            if getattr(layout, axis) > 1:
                yield Fault(
                    f"{key}.layout.{axis}",
                    f"{axis} is {getattr(layout, axis)}, but the model has no experts ({key}.llm.num_experts is 0): "
                    "set it to 1, or pick a mixture of experts such as llm@modules.language.llm=gpt_tiny_moe",
                )
        return
    experts, width = llm.num_experts, llm.expert_ffn_hidden_size or llm.ffn_hidden_size
    if not 1 <= llm.experts_per_token <= experts:
        yield Fault(
            f"{key}.llm.experts_per_token",
            f"must be from 1 to {key}.llm.num_experts {experts}, is {llm.experts_per_token}",
        )
    if llm.bias:
        yield Fault(f"{key}.llm.bias", f"the {experts} experts of a layer have no biases: set it to false")
    if llm.shared_expert_gate and not llm.shared_expert_ffn_hidden_size:
        yield Fault(
            f"{key}.llm.shared_expert_gate",
            f"there is no shared expert to scale, {key}.llm.shared_expert_ffn_hidden_size is 0: set it, or the gate to "
            "false",
        )
    if experts % layout.ep:
        yield Fault(
            f"{key}.layout.ep",
            f"ep {layout.ep} does not divide num_experts {experts}: use a divisor of {experts}, or change num_experts",
        )
    if width % layout.etp:
        yield Fault(
            f"{key}.layout.etp",
            f"etp {layout.etp} does not divide the width {width} of an expert: use a divisor of {width}, or change "
            f"{key}.llm.expert_ffn_hidden_size",
        )
    ranks = layout.tp * layout.cp * layout.dp
    if ranks % (layout.ep * layout.etp):
        axis = "ep" if layout.ep > 1 else "etp"
        yield Fault(
            f"{key}.layout.{axis}",
            f"ep {layout.ep} x etp {layout.etp} does not divide the {ranks} ranks of a stage (tp {layout.tp} x cp "
            f"{layout.cp} x dp {layout.dp}): experts are dealt to these; use a divisor of {ranks}, or raise dp",
        )
    if layout.tp > 1 and not layout.sp:
        yield Fault(
            f"{key}.layout.sp",
            f"experts with tp {layout.tp} need sequence parallel, so that each rank routes its own tokens: set sp to "
            "true, or tp to 1",
        )


def _interleaving_faults(llm: LlmSpec, layout: LayoutConfig, key: str) -> Iterator[Fault]:
    if layout.pp == 1:
        yield Fault(
            f"{key}.layout.vpp",
            f"vpp {layout.vpp} interleaves the stages of a pipeline, and pp is 1: set vpp to 1, or raise pp",
        )
    chunks = layout.pp * layout.vpp
    if llm.num_layers % chunks:
        yield Fault(
            f"{key}.layout.vpp",
            f"{llm.num_layers} layers ({key}.llm.num_layers) are not equal parts of pp {layout.pp} x vpp {layout.vpp} "
            f"= {chunks} chunks: use a divisor of the layers of a stage, or a number of layers that {chunks} divides",
        )


def tp_faults(tp: int, key: str, **sizes: int) -> Iterator[Fault]:
    """Sizes that tensor parallel does not divide."""
    for name, size in sizes.items():
        if size % tp:
            yield Fault(
                f"{key}.layout.tp",
                f"tp {tp} does not divide {name} {size}: use a divisor of {size}, or change {name}",
            )

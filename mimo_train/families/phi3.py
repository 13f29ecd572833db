"""Phi-3 and Phi-4: queries, keys and values in one tensor, as gate and up; a part of each head rotates."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.families.base import NAMES, Config, Family, fault
from mimo_train.families.rope import Rope
from mimo_train.families.windows import Windows, every_layer


@dataclass(frozen=True)
class UnscaledRope(Rope):
    """Rotary positions whose class reads every scaling but `longrope` as `longrope`, which cannot be built here."""

    def faults(self, config: Config) -> Iterator[Fault]:
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            yield fault("rope_type", kind, "rotary positions of this family can be built without scaling only")


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    (Windows(every_layer), UnscaledRope(partial=1.0)),
    names={
        **NAMES,
        "attention": {"fused": "self_attn.qkv_proj", "out": "self_attn.o_proj"},
        "mlp": {"fused": "mlp.gate_up_proj", "down": "mlp.down_proj"},
    },
    never=dict.fromkeys(("resid_pdrop", "embd_pdrop"), (None, 0)),
)

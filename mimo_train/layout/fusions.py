"""Fused kernels of the layers of a run (`train.fusions`): which layers have which, and why not."""

import os
import shutil
from functools import cache

from encoders.plain.spec import PlainSpec
from mimo_train.config.keys import is_installed
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_fusions import FUSIONS, WITH_TRANSFORMER_ENGINE
from mimo_train.config.transformers_llm import TransformersSizes

OFF = "off"
"""The reason of a fusion that its key switches off."""
NO_COMPILER = "Triton or a C compiler is not installed here"
"""The reason of a fusion that torch.compile cannot make a kernel of on this machine."""
COMPILED = ("activation", "bias_dropout", "cross_entropy")
"""Fusions that torch.compile makes kernels of."""

_DENSE = {"swiglu": True, "geglu": True, "gelu_tanh": False}
"""Activations that Megatron-Core 0.19.2 fuses in a dense layer (transformer/mlp.py:297), and True if they are gated."""


def fusions_of(cfg: ConfigContainer, name: str, kind: str) -> dict[str, str]:
    """Return for each fusion the reason why a module does not have it; empty if it does.

    Args:
        name: of the module.
        kind: cuda or cpu.
    """
    return {fusion: _reason(cfg, name, fusion, kind) for fusion in FUSIONS}


@cache  # a search of layouts asks thousands of times
def _missing_here(fusion: str, setting: str, kind: str) -> str:
    """Return what the kernel of a fusion lacks on this machine; empty if nothing, or if its key requires the kernel."""
    if setting == "always" or kind == "cpu":
        return ""
    if fusion in WITH_TRANSFORMER_ENGINE:
        return "" if is_installed("transformer_engine") else "Transformer Engine is not installed here"
    has_compiler = os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))
    return "" if fusion not in COMPILED or (is_installed("triton") and has_compiler) else NO_COMPILER


def module_fuses(cfg: ConfigContainer, name: str, fusion: str, kind: str) -> bool:
    """True if a module may have a fusion, whatever its sizes are."""
    return not _module_reason(cfg, name, fusion, kind)


def _reason(cfg: ConfigContainer, name: str, fusion: str, kind: str) -> str:
    reason = _module_reason(cfg, name, fusion, kind)
    reason = reason or (_REASONS[fusion](cfg, name) if fusion in _REASONS else "")
    return reason or _missing_here(fusion, getattr(cfg.train.fusions, fusion), kind)


def _module_reason(cfg: ConfigContainer, name: str, fusion: str, kind: str) -> str:
    setting, module = getattr(cfg.train.fusions, fusion), cfg.modules[name]
    if setting == "never" or (setting == "auto" and kind == "cpu"):
        return OFF
    if isinstance(module.encoder, PlainSpec) or isinstance(cfg.llm if name == LANGUAGE else None, TransformersSizes):
        return "not Megatron-Core's layers"
    if fusion != "cross_entropy" and (cfg.compile_of(name) == "layers" or (kind == "cpu" and cfg.run.cpu_kernels)):
        return "compiled layers" if cfg.compile_of(name) == "layers" else "run.cpu_kernels"
    return ""


def activation_reason(activation: str, *, bias: bool, experts: str = "", clamped: bool = False) -> str:
    """Return why Megatron-Core has no fused kernel of an activation; empty if it has.

    Args:
        bias: True if the first linear layer has a bias.
        experts: `all` if only experts use the activation, `some` if dense layers or shared experts do too.
        clamped: True if the halves are clamped or shifted (`activation_clamp`, `glu_offset`).
    """
    if activation == "quick_geglu" and experts == "all":
        # Megatron-Core 0.19.2 bounds the inputs before it adds the bias (fused_bias_geglu.py:427).
        return "a bias in front of bounds" if bias and clamped else ""
    if activation not in _DENSE or clamped:
        return f"no kernel of {activation}{' with bounds' if clamped and activation in _DENSE else ''}"
    if experts and (bias or activation != "swiglu"):
        return f"no kernel of {activation}{' with a bias' if bias else ''} in experts"
    # Without a bias Megatron-Core fuses gated activations only.
    return "" if bias or _DENSE[activation] else f"no kernel of {activation} without a bias"


def _activation(cfg: ConfigContainer, name: str) -> str:
    if name == LANGUAGE:
        return language_activation_reason(cfg)
    parts = cfg.modules[name].encoder.parts.values()
    return next((reason for part in parts if (reason := activation_reason(part.activation, bias=True))), "")


def language_activation_reason(cfg: ConfigContainer) -> str:
    """Return why the language model's activation is not fused; empty if it is."""
    llm = cfg.llm
    some = bool(llm.dense_layers) or llm.shared_expert_ffn_hidden_size > 0
    experts = ("some" if some else "all") if llm.num_experts else ""
    clamped = bool(llm.activation_clamp or llm.glu_offset)
    return activation_reason(llm.activation, bias=llm.bias, experts=experts, clamped=clamped)


def _bias_dropout(cfg: ConfigContainer, name: str) -> str:
    if name == LANGUAGE:
        llm = cfg.llm
        if llm.post_norms or llm.residual_multiplier != 1:
            return "a norm or a factor in front of the residual stream"
        if llm.num_experts and llm.bias:
            return "experts with biases"  # transformer/moe/experts.py:205
        return "" if llm.bias or llm.dropout else "no bias and no dropout"
    scaled = any(part.layer_scale for part in cfg.modules[name].encoder.parts.values())
    return "a scale in front of the residual stream" if scaled else ""


def _rotary(cfg: ConfigContainer, name: str) -> str:
    if name != LANGUAGE:
        parts = cfg.modules[name].encoder.parts.values()
        return "" if any(part.rotary_positions for part in parts) else "no rotary positions"
    llm = cfg.llm
    if llm.position != "rope":
        return "no rotary positions"
    if llm.kv_lora_rank:
        return "latent attention"
    if llm.rope_scaling.kind == "yarn":
        return "yarn's factor of queries and keys"
    # rope_utils.py:296: a kernel takes one table of angles for all rows of a microbatch.
    per_row = llm.mrope_section and cfg.encoders and not cfg.data.pack and cfg.train.micro_batch_size > 1
    return "positions on three axes in several rows of a microbatch" if per_row else ""


def _cross_entropy(cfg: ConfigContainer, name: str) -> str:
    if name != LANGUAGE:
        return "no loss"
    # Megatron-Core's kernel rounds the gradient of the logits to bf16 (fused_cross_entropy.py:82).
    return "" if cfg.train.precision == "bf16" else f"only in bf16, and train.precision is {cfg.train.precision}"


def _experts(cfg: ConfigContainer, name: str) -> str:
    return "" if name == LANGUAGE and cfg.llm.num_experts else "no experts"


_REASONS = {
    "activation": _activation,
    "bias_dropout": _bias_dropout,
    "rotary": _rotary,
    "cross_entropy": _cross_entropy,
    "moe_permute": _experts,
    "moe_router": _experts,
}
"""Functions of the reasons of fusions that not every layer can have."""


def fusions_text(cfg: ConfigContainer, name: str, kind: str) -> str:
    """Return the fusions of a module in one line, and the reasons of those that its layers cannot have."""
    reasons = fusions_of(cfg, name, kind)
    on = [fusion for fusion, reason in reasons.items() if not reason]
    off = [f"{fusion} ({reason})" for fusion, reason in reasons.items() if reason not in ("", OFF)]
    return f"{', '.join(on) or 'none'}{f'; not {", ".join(off)}' if off else ''}"

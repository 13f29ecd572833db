"""Which fusions a module has, parts of layers that can be recomputed, and what both save."""

import pytest

from mimo_train.estimate.flops import count
from mimo_train.estimate.memory import memory_of_stage
from mimo_train.layout.fusions import OFF, fusions_of, fusions_text
from mimo_train.layout.run import config_faults, resolve
from mimo_train.models.blocks.base import Matmul
from tests.unit.configs import load

LLM = "modules.language.llm."
ALWAYS, BF16 = (
    tuple(f"train.fusions.{name}=always" for name in ("activation", "bias_dropout", "rotary")),
    "train.precision=bf16",
)
EXPERTS = ("llm@modules.language.llm=gpt_tiny_moe",)
REASONS = {
    "swiglu": ((), "language", "activation", ""),
    "gelu, whose kernel is of the tanh form": ((f"{LLM}activation=gelu", f"{LLM}bias=true"), "language", "activation",
                                               "no kernel of gelu"),
    "bounds": ((f"{LLM}activation_clamp=2",), "language", "activation", "no kernel of swiglu with bounds"),
    "quick_geglu of experts alone": ((*EXPERTS, f"{LLM}activation=quick_geglu", f"{LLM}activation_clamp=2"),
                                     "language", "activation", ""),
    "quick_geglu of gpt-oss": ((*EXPERTS, f"{LLM}activation=quick_geglu", f"{LLM}activation_clamp=2",
                                f"{LLM}bias=true"), "language", "activation", "a bias in front of bounds"),
    "quick_geglu of a shared expert": ((*EXPERTS, f"{LLM}activation=quick_geglu",
                                        f"{LLM}shared_expert_ffn_hidden_size=64"), "language", "activation",
                                       "no kernel of quick_geglu"),
    "geglu of experts": ((*EXPERTS, f"{LLM}activation=geglu"), "language", "activation",
                         "no kernel of geglu in experts"),
    "swiglu of experts with biases": ((*EXPERTS, f"{LLM}bias=true"), "language", "activation",
                                      "no kernel of swiglu with a bias in experts"),
    "compiled": (("train.compile=layers",), "language", "activation", "compiled layers"),
    "switched off": (("train.fusions.activation=never",), "language", "activation", OFF),
    "the CPU": (("run.device=cpu", "train.fusions.activation=auto"), "language", "activation", OFF),
    "biases": ((f"{LLM}bias=true",), "language", "bias_dropout", ""),
    "no biases": ((), "language", "bias_dropout", "no bias and no dropout"),
    "rotary": ((), "language", "rotary", ""),
    "yarn": ((f"{LLM}rope_scaling.kind=yarn", f"{LLM}rope_scaling.factor=2",
              f"{LLM}rope_scaling.original_positions=32"), "language", "rotary", "yarn's factor of queries and keys"),
    "an encoder with a table": ((), "images", "rotary", "no rotary positions"),
    "fp32": ((), "language", "cross_entropy", "only in bf16, and train.precision is fp32"),
    "bf16": ((BF16, "train.fusions.cross_entropy=always"), "language", "cross_entropy", ""),
    "no experts": ((), "language", "moe_router", "no experts"),
    "weight gradients": ((), "images", "gradient_accumulation", ""),
}  # fmt: skip
FAULTS = {
    "rotary on a CPU": (("run.device=cpu", "train.fusions.rotary=always"),
                        "train.fusions.rotary: always requires Transformer Engine on CUDA (run.device is cpu)"),
    "cross-entropy in fp32": (("train.fusions.cross_entropy=always",), "requires train.precision=bf16 (is fp32)"),
    "an unknown part": (("train.recompute=attn",), "train.recompute: must be none, selective, full, or parts of"),
    "a part twice": (("modules.images.recompute=mlp+mlp",), "modules.images.recompute: must be none,"),
    "no experts": (("train.recompute=experts",), "train.recompute: experts: modules.language.llm.num_experts is 0"),
    "no dense layer": ((*EXPERTS, "modules.language.recompute=mlp"),
                       "modules.language.recompute: mlp: all layers have experts"),
    "no norms": ((f"{LLM}pre_norms=false", f"{LLM}post_norms=true", "train.recompute=norms"),
                 "train.recompute: norms: modules.language.llm.pre_norms is false"),
    "parts in fp8": (("train.fp8=tensorwise", BF16, "train.recompute=mlp"), "mlp is not supported with fp8"),
    "compiled": (("train.compile=layers", "train.recompute=mlp"), "recompute=mlp (of modules."),
    "offloaded and recomputed": (("train.offload_activations=layers", "train.recompute=full"),
                                 "train.offload_activations: layers is not supported with recompute=full of images"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_a_fusion_that_a_module_does_not_have_has_a_reason(name):
    overrides, module, fusion, reason = REASONS[name]
    cfg = load("vlm_digits", "run.device=cuda", "run.cpu_kernels=false", *ALWAYS, *overrides)
    assert fusions_of(cfg, module, "cpu" if cfg.run.device == "cpu" else "cuda")[fusion] == reason


def test_check_lists_what_is_on_and_why_others_are_not():
    text = fusions_text(load("vlm_digits", *ALWAYS), "language", "cuda")
    assert text.startswith("activation, rotary, gradient_accumulation; not bias_dropout (no bias and no dropout)"), text
    assert fusions_text(load("vlm_digits", "run.cpu_kernels=false"), "language", "cpu") == "none"


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_is_refused_with_the_key(name):
    overrides, words = FAULTS[name]
    faults = [str(fault) for fault in config_faults(load("vlm_digits", *overrides))]
    assert any(words in fault for fault in faults), faults


def test_parts_cost_what_they_compute_again_and_save_what_they_keep():
    layer = [
        Matmul("decoder.layers.0.self_attention.linear_qkv.weight", 1.0, 10.0, True),
        Matmul("decoder.layers.0.mlp.linear_fc1.weight", 100.0, in_layer=True),
        Matmul("decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", 1000.0, in_layer=True),
    ]
    again = {
        "none": 0,
        "selective": 10,
        "attention": 11,
        "norms": 0,
        "mlp": 100,
        "experts": 1000,
        "attention+mlp": 111,
        "full": 1111,
    }
    for recompute, flops in again.items():
        counted = count(layer, upstream=True, recompute=recompute)
        assert counted.hardware - counted.model == flops, recompute

    def kept(*overrides: str) -> int:
        run = resolve(load("gpt_tiny", "run.device=cuda", "run.cpu_kernels=false", *overrides))
        return memory_of_stage(run, "language", 0, 256).activations

    in_order = [
        *("offload_activations=layers", "recompute=full", "recompute=attention+mlp+norms", "recompute=attention+mlp"),
        *("recompute=mlp", "recompute=norms", "recompute=none", "fusions.activation=never"),
    ]
    sizes = [kept(f"train.{override}") for override in in_order]
    assert sizes == sorted(set(sizes)), dict(zip(in_order, sizes, strict=True))

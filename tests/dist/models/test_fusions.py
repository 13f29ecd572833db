"""Fused kernels: the numbers of the same operations one by one, and that they run at all."""

from collections import Counter

import pytest
import torch

from tests.dist.ranks import run_ranks
from tests.dist.runs import config, largest_difference
from tests.dist.steps import Steps, whole

LLM = "modules.language.llm."
FUSED = tuple(f"train.fusions.{name}=always" for name in ("activation", "bias_dropout", "gradient_accumulation"))
EXPERTS = tuple(f"{LLM}{key}" for key in ("num_experts=4", "experts_per_token=2", "expert_ffn_hidden_size=24"))
OSS = tuple(f"{LLM}{key}" for key in ("activation=quick_geglu", "activation_clamp=0.3", "glu_offset=1"))
GATED, BIASED = "SwiGLUFunction", "GeLUFunction"
RUNS = {
    "swiglu, tied, several microbatches": ("gpt_tiny", 1, (), {GATED, "accumulated"}),
    "geglu with biases and dropout, tp2 sp": (
        *("gpt_tiny", 2),
        (f"{LLM}activation=geglu", f"{LLM}bias=true", "layout=language_tp2", "modules.language.layout.sp=true"),
        {"BiasGeGLUFunction", "accumulated", "bias_dropout"},
    ),
    "vlm, gelu of the encoder, frozen embedding, recomputed": (
        *("vlm_digits", 1),
        ("layout=one_process", "modules.images.encoder.activation=gelu_tanh", "train.recompute=full"),
        {GATED, BIASED, "accumulated", "bias_dropout"},
    ),
    "experts": ("gpt_tiny", 1, EXPERTS, {"WeightedSwiGLUFunction", "accumulated"}),
    "experts with bounds": ("gpt_tiny", 1, (*EXPERTS, *OSS), {"WeightedQuickGeGLUFunction", "accumulated"}),
    "bf16": (
        *("gpt_tiny", 1),
        ("train.precision=bf16", "train.fusions.cross_entropy=always"),
        {GATED, "accumulated", "_VocabParallelCrossEntropy"},
    ),
}
"""(config, ranks, overrides, what has to run) by name."""


def _curve(cfg, fused: bool) -> tuple[list[tuple], set[str]]:
    """Return the curve of four steps, and the fused functions that ran."""
    from megatron.core.fusions import (
        fused_bias_dropout,
        fused_bias_geglu,
        fused_bias_gelu,
        fused_bias_swiglu,
        fused_cross_entropy,
    )

    from mimo_train.models.fusions import WeightGradients

    ran: Counter[str] = Counter()

    def counted(name, function):
        return lambda *values: (ran.update([name]), function(*values))[1]

    for module in (fused_bias_geglu, fused_bias_gelu, fused_bias_swiglu, fused_cross_entropy):
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                value.forward = staticmethod(counted(name, value.forward))
    accumulate = WeightGradients.wgrad_gemm_accum_fp32
    WeightGradients.wgrad_gemm_accum_fp32 = staticmethod(counted("accumulated", accumulate))
    add = fused_bias_dropout.bias_dropout_add_fused_train
    fused_bias_dropout.bias_dropout_add_fused_train = counted("bias_dropout", add)
    curve = Steps(cfg).train(4)
    assert bool(ran) == fused, ran
    return curve, set(ran)


@pytest.mark.parametrize("name", RUNS)
def test_numbers_are_those_of_single_operations(name, digits, prose, tmp_path):
    model, ranks, overrides, expected = RUNS[name]
    demo = prose if model == "gpt_tiny" else digits
    changes = ("train.global_batch_size=16", "train.micro_batch_size=4", *overrides)

    def curve(folder: str, fused: bool, *more: str):
        return run_ranks(_curve, ranks, config(model, tmp_path / folder, demo, *changes, *more), fused)

    off = [f"train.fusions.{key.split('.')[-1].split('=')[0]}=never" for key in (*FUSED, "x.cross_entropy=")]
    fused, single = curve("fused", True, *FUSED), curve("single", False, *off)
    assert fused[0][1] >= expected, fused[0][1]
    difference = largest_difference(whole([each for each, _ in single]), whole([each for each, _ in fused]))
    assert max(difference) < (5e-3 if name == "bf16" else 2e-6), difference

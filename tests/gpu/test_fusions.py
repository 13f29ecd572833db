"""Fused kernels and activations on the host, on a GPU. Skipped where there is no CUDA device."""

import pytest
import torch

from tests.dist.runs import TOLERANCE, largest_difference
from tests.gpu.test_cuda import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NEVER = tuple(
    f"train.fusions.{name}=never"
    for name in ("activation", "bias_dropout", "rotary", "gradient_accumulation", "cross_entropy")
)
CUDA = ("run.device=cuda", "modules.language.llm.activation=swiglu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fused_layers_follow_single_operations(precision, tmp_path):
    single = run(tmp_path, "single", *CUDA, f"train.precision={precision}", *NEVER)
    fused = run(tmp_path, "fused", *CUDA, f"train.precision={precision}")
    assert largest_difference(single, fused)[0] < (1e-4 if precision == "fp32" else 5e-2)


def test_activations_on_the_host_change_nothing(tmp_path):
    # Wide enough that tensors of a layer are above the least size of a copy.
    wide = (*CUDA, *(f"modules.language.llm.{name}" for name in ("hidden_size=512", "ffn_hidden_size=2048")))
    kept = run(tmp_path, "kept", *wide)
    offloaded = run(tmp_path, "host", *wide, "train.offload_activations=layers")
    assert max(largest_difference(kept, offloaded)) < TOLERANCE


def test_a_weight_gradient_is_added_in_fp32():
    from mimo_train.models.fusions import WeightGradients

    torch.manual_seed(0)
    inputs, gradient = (torch.randn(300, width, device="cuda", dtype=torch.bfloat16) for width in (64, 96))
    total = torch.ones(96, 64, device="cuda")
    expected = total.double() + gradient.double().t() @ inputs.double()
    WeightGradients.wgrad_gemm_accum_fp32(inputs, gradient, total)
    assert (total - expected).abs().max() < 1e-3 * expected.abs().max()

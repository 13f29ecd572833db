"""Models compute on a GPU what transformers computes on the CPU, in fp32. Skipped where there is no CUDA device."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mimo_train.models.blocks.delta import module as delta
from mimo_train.models.documents import Documents
from tests.dist.models.families import FAMILIES, SIZES, make
from tests.dist.models.media_models import AS_IS, STEPS
from tests.dist.models.media_models import make as make_media
from tests.dist.models.test_composites import composed
from tests.dist.models.test_language_families import PROMPT, RUN, compute
from tests.dist.models.test_media_half import LAYOUTS
from tests.dist.ranks import run_ranks
from tests.dist.runs import config
from tests.dist.steps import whole

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
BOUND = 1e-4
"""Largest difference, of the largest expected value."""
KERNEL_BOUND = 1e-2
"""The kernels of `fla` round products of fp32 to TF32."""


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def test_language_models_follow_transformers(tmp_path):
    (expected,) = run_ranks(make, 1, tmp_path, list(FAMILIES))
    layout = ("layout=language_one", "run.device=cuda")
    cfg = config("gpt_tiny", tmp_path / "run", Path("nowhere"), *layout, *RUN)
    (computed,) = run_ranks(compute, 1, cfg, tmp_path, list(FAMILIES), "cuda")
    wrong = {}
    for name, ours in computed.items():
        theirs, vocabulary = expected[name], SIZES["vocab_size"]
        differences = {
            "logits": difference(ours["logits"][..., :vocabulary], theirs["logits"]),
            "documents": difference(ours["row"][1][:, :vocabulary], theirs["documents"]),
            "cache": difference(ours["continued"][:, :vocabulary], theirs["logits"][0, PROMPT - 1 :]),
            "loss": abs(ours["loss"] / theirs["loss"] - 1),
        }
        bound = KERNEL_BOUND if "linear_num_key_heads" in FAMILIES[name] else BOUND
        wrong |= {(name, what): value for what, value in differences.items() if not value < bound}
    assert len(computed) == len(FAMILIES) and not wrong


@pytest.mark.skipif(bool(CUDA and delta.fallback_reason()), reason="needs kernels of fla that are right here")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, KERNEL_BOUND), (torch.bfloat16, 3e-2)])
def test_kernels_of_the_delta_rule_follow_torch(dtype, bound):
    draw = torch.Generator("cuda").manual_seed(1)
    documents = Documents((5, 80, 155, 156, 170))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(1, 170, *shape, generator=draw, device="cuda").to(dtype).requires_grad_()

    decay = -torch.rand(1, 170, 4, generator=draw, device="cuda")
    rule = (*(drawn(4, 64) for _ in range(3)), decay.requires_grad_(), drawn(4).detach().sigmoid().requires_grad_())
    for at in (None, documents):
        outputs = [delta.apply_rule(rule, at), delta._by_document(lambda *parts: delta.torch_rule(*parts)[0], rule, at)]
        gradients = [torch.autograd.grad(output.float().square().sum(), rule) for output in outputs]
        for ours, theirs in zip((outputs[0], *gradients[0]), (outputs[1], *gradients[1]), strict=True):
            assert difference(ours.float().numpy(force=True), theirs.float().numpy(force=True)) < bound


@pytest.mark.skipif(delta.common.causal_conv1d is None, reason="needs fla")
def test_the_kernel_of_the_convolution_follows_torch():
    draw = torch.Generator("cuda").manual_seed(1)
    inputs = torch.randn(1, 170, 96, generator=draw, device="cuda").requires_grad_()
    weight = torch.randn(96, 4, generator=draw, device="cuda").requires_grad_()
    for documents in (None, Documents((5, 80, 155, 156, 170))):
        outputs = [
            delta.convolve(inputs, weight, documents),
            delta._by_document(lambda rows: delta.torch_convolution(rows, weight), (inputs,), documents),
        ]
        gradients = [torch.autograd.grad(output.square().sum(), (inputs, weight)) for output in outputs]
        for ours, theirs in zip((outputs[0], *gradients[0]), (outputs[1], *gradients[1]), strict=True):
            assert difference(ours.numpy(force=True), theirs.numpy(force=True)) < BOUND


@pytest.mark.parametrize("kind", ["internvl", "qwen3_vl", "audioflamingo3", AS_IS])
def test_a_media_half_follows_transformers(kind, tmp_path):
    (expected,) = run_ranks(make_media, 1, tmp_path, kind)
    overrides = ["layout=one_process", "run.device=cuda", f"train.iters={STEPS}", "data.sequence_length=300"]
    overrides += {
        "audioflamingo3": ["modules.images.encoder.max_seconds=2"],
        "qwen3_vl": ["modules.images.implementation=transformers"],
    }.get(kind, [])
    (curve,) = run_ranks(losses_and_norms, 1, composed(tmp_path, tmp_path / "run", *overrides))
    assert np.array(curve) == pytest.approx(np.array(expected["curve"]), rel=1e-3)


def losses_and_norms(cfg) -> list[tuple]:
    """On a rank: those of all steps, with a checkpoint behind them."""
    from tests.dist.steps import Steps

    steps = Steps(cfg)
    curve = steps.train(cfg.train.iters)
    steps.save()
    return curve


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_shards_on_two_devices_learn_as_in_transformers(tmp_path):
    (expected,) = run_ranks(make_media, 1, tmp_path, AS_IS)
    overrides = [f"train.iters={STEPS}", "data.sequence_length=300", *LAYOUTS["fsdp2"]]
    ranks = run_ranks(losses_and_norms, 2, composed(tmp_path, tmp_path / "run", *overrides))
    curve = [(loss, norm) for _, loss, norm in whole(ranks)]
    assert np.array(curve) == pytest.approx(np.array(expected["curve"]), rel=1e-3)

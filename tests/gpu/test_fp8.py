"""Steps in fp8 on a GPU that has it. Skipped without CUDA, Transformer Engine, or the recipe."""

from importlib.util import find_spec

import pytest
import torch

from data.demo.make import make_demo
from tests.dist.runs import USUAL_ADAM, config, curve, largest_difference, train_on_ranks

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
CAPABILITY = {"tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
ODD = ("train.micro_batch_size=3", "train.global_batch_size=9")
"""Rows of a product that are no multiple of 16."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Curve of 20 steps on one process, with evaluations in between."""
    folder = tmp_path_factory.mktemp("fp8")
    make_demo(folder / "digits", train_samples=480, held_out_samples=40, shards=2)

    def train(name: str, *overrides: str) -> list[tuple]:
        fixed = ("layout=one_process", "run.device=cuda", "train.precision=bf16", "train.iters=20", *USUAL_ADAM, *ODD)
        held_out = (f"data.validation_shards={folder}/digits/held_out", "train.eval_interval=5", "train.eval_samples=9")
        cfg = config("vlm_digits", folder / name, folder / "digits", *fixed, *held_out, *overrides)
        return curve(train_on_ranks(cfg))

    return train


@pytest.fixture(scope="module")
def bf16(run):
    """Without fp8."""
    return run("bf16")


@pytest.mark.parametrize("recipe", CAPABILITY)
def test_fp8_follows_bf16(run, bf16, recipe):
    if torch.cuda.get_device_capability() < CAPABILITY[recipe]:
        pytest.skip(f"{recipe} needs compute capability {CAPABILITY[recipe]}")
    assert 0 < largest_difference(bf16, run(recipe, f"train.fp8={recipe}"))[0] < 0.1


def test_an_encoder_alone_in_fp8_follows_bf16_too(run, bf16):
    """Its copies of weights are renewed though the language model has none."""
    own = ("modules.images.fp8=tensorwise", "train.recompute=full")
    assert 0 < largest_difference(bf16, run("images", *own))[0] < 0.1


def test_a_run_in_fp8_continues_from_its_checkpoint(run):
    fp8 = ("train.fp8=tensorwise", "train.num_layers_at_end_in_bf16=1", "optim.decay=constant")
    whole = run("whole", *fp8)
    run("half", *fp8, "train.iters=10")
    assert largest_difference(whole, run("half", *fp8))[0] < 1e-2

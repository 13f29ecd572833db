"""Gradients that are reduced during backward on some ranks, and at the end of the step on others."""

import random

import pytest

from mimo_train.layout.run import resolve
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import config

LAYERS, STEPS, MICROBATCHES = 6, 40, 2


def _wrapped(cfg):
    """A chain of linear layers with a bucket for each, which two ranks replicate."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mimo_train.parallel.grad_reduction import InOrderReduction
    from mimo_train.parallel.groups import build_groups
    from mimo_train.training.step.pipeline import start_processes

    start_processes(cfg)
    return InOrderReduction(
        TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1),
        DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True, bucket_size=16),
        torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(LAYERS)),
        pg_collection=build_groups(resolve(cfg).layout, 5).collections["images"],
    )


def _random_steps(cfg) -> tuple[int, int]:
    """Make steps in which each rank uses other layers. Return how many buckets were reduced in backward, and how many
    were not."""
    import contextlib

    import torch
    import torch.distributed as dist

    chunk, early, late = _wrapped(cfg), 0, 0
    weights = [layer.weight for layer in chunk.module]
    for step in range(STEPS):
        chunk.zero_grad_buffer()
        expected = [torch.zeros(4, 4) for _ in weights]
        for microbatch in range(MICROBATCHES):
            draw = random.Random(f"{step} {microbatch} {dist.get_rank()}")
            used = [step == 0 or draw.random() < 0.8 for _ in weights]
            is_last = microbatch == MICROBATCHES - 1
            with contextlib.nullcontext() if is_last else chunk.no_sync():
                if any(used):
                    hidden = torch.full((1, 4), draw.random())
                    (
                        torch.stack([layer(hidden).sum() for layer, on in zip(chunk.module, used, strict=True) if on])
                    ).sum().backward()
                    for gradient, on in zip(expected, used, strict=True):
                        gradient += hidden.expand(4, 4) if on else 0
        started = sum(group.grad_reduce_handle is not None for group in chunk.bucket_groups)
        early, late = early + started, late + len(chunk.bucket_groups) - started
        chunk.finish_grad_sync()
        for weight, gradient in zip(weights, expected, strict=True):
            dist.all_reduce(gradient)
            torch.testing.assert_close(weight.main_grad, gradient / 2)
    return early, late


def _late_gradient(cfg) -> None:
    chunk = _wrapped(cfg)
    for _ in range(2):
        chunk.zero_grad_buffer()
        sum(layer.weight.sum() for layer in chunk.module).backward()
    chunk.module[LAYERS - 1].weight.sum().backward()


@pytest.fixture
def replicas(digits, tmp_path):
    two = ("modules.images.layout.dp=2", "modules.language.layout.dp=2")
    return config("vlm_digits", tmp_path, digits, "layout=one_process", *two)


def test_ranks_reduce_buckets_in_one_order_whatever_gradients_each_has(replicas):
    ranks = run_ranks(_random_steps, 2, replicas)
    assert all(early > STEPS and late > STEPS for early, late in ranks) and ranks[0] != ranks[1], ranks


def test_a_gradient_after_the_reduction_is_an_error(replicas):
    with pytest.raises(RankFailure, match=r"optim\.overlap_grad_reduce: .* got 2 gradients in a microbatch, and 1 in"):
        run_ranks(_late_gradient, 2, replicas)

"""Losses without logits on a GPU: the numbers of the CPU, in a fraction of the memory of logits. Skipped where there is
no CUDA device."""

from types import SimpleNamespace

import pytest
import torch

from mimo_train.models.output.token_losses import token_losses
from mimo_train.models.output.vocabulary import Logits, Vocabulary

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TOKENS, ROWS, WIDTH = 4096, 32768, 512
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def results(device: str, dtype: torch.dtype, frozen: bool, tokens: int, rows: int) -> list[torch.Tensor]:
    """Losses and gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(rows, WIDTH, generator=generator) * 0.1).to(device, dtype).requires_grad_(not frozen)
    labels = torch.randint(rows, (tokens,), generator=generator).to(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    (losses,) = token_losses(hidden, weight, labels, Vocabulary(ALONE, rows, Logits(softcap=5.0)))
    losses.sum().backward()
    return [each.detach().cpu() for each in (losses, hidden.grad, weight.grad) if each is not None]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_gpu_computes_the_losses_and_gradients_of_the_cpu(frozen):
    sizes = torch.float32, frozen, 300, 5000
    for ours, theirs in zip(results("cuda", *sizes), results("cpu", *sizes), strict=True):
        assert (ours - theirs).norm() < 1e-4 * theirs.norm()


def test_the_peak_is_a_fraction_of_the_logits():
    results("cuda", torch.bfloat16, False, TOKENS, ROWS)
    before = 2 * (TOKENS + ROWS) * WIDTH
    assert torch.cuda.max_memory_allocated() - before < 100 * 2**20 < 4 * TOKENS * ROWS / 5

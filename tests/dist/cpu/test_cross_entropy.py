"""Losses of tokens on a rank that has the whole vocabulary: the numbers of Megatron-Core's, in the memory of the
logits."""

import pytest
import torch

from mimo_train.cpu.kernels import cross_entropy
from tests.dist.ranks import run_ranks

TOKENS, VOCAB = 12, 50
LABELS = torch.tensor([0, 49, 7, 7, -100, 50, -1, 3, 2, 1, 48, 20])
"""Three are none of the vocabulary, as a forward step of a user's own may give them where no loss counts."""


def _given(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, of which the last column is padding's, by a leaf of autograd and as losses may change them; gradients."""
    torch.manual_seed(5)
    leaf = (20 * torch.randn(TOKENS, VOCAB)).to(dtype)
    leaf[:, -1] = torch.finfo(dtype).min
    leaf.requires_grad_()
    return leaf, leaf * 1, torch.randn(TOKENS)


def _differences(dtype: torch.dtype) -> list[float]:
    """Of losses and of gradients, to those of Megatron-Core."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    leaf, logits, gradients = _given(dtype)
    ours = cross_entropy(logits, LABELS)
    ours.backward(gradients)
    own, leaf.grad = leaf.grad, None
    leaf, logits, _ = _given(dtype)
    theirs = vocab_parallel_cross_entropy(logits.unsqueeze(1), LABELS.unsqueeze(1), tp_group=dist.group.WORLD)
    theirs.squeeze(1).backward(gradients)
    scale = theirs.abs().max().item()
    return [(ours - theirs.squeeze(1)).abs().max().item() / scale, (own - leaf.grad).abs().max().item()]


@pytest.mark.parametrize(("dtype", "of_gradients"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_losses_and_gradients_are_megatron_cores(dtype, of_gradients):
    ((losses, gradients),) = run_ranks(_differences, 1, dtype)
    assert losses < 1e-6 and gradients < of_gradients


def test_the_gradient_is_in_the_memory_of_the_logits():
    leaf, logits, gradients = _given(torch.float32)
    made = []
    logits.register_hook(lambda gradient: made.append(gradient.data_ptr()))
    losses = cross_entropy(logits, LABELS.clamp(0, VOCAB - 2))
    losses.backward(gradients, retain_graph=True)
    assert made == [logits.data_ptr()] and torch.isfinite(leaf.grad).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.backward(gradients)

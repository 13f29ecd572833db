"""The loss of tokens on a CPU whose rank has the whole vocabulary, in half of the passes over the logits.

Megatron-Core 0.19.2 (tensor_parallel/cross_entropy.py) finds the largest logit, takes it away, makes exponentials, sums
and divides, each in a pass of its own, since ranks may have parts of the vocabulary: 3 % of a step of a small model on
text. Here a kernel of torch makes logarithms of probabilities at once, in the same memory.

Shape suffixes: N tokens, V vocabulary.
"""

from typing import Any

import torch


def cross_entropy(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Losses [N] in nats, fp32; where a label is none of the vocabulary, that of the most likely token, with the
    gradient of its normalisation alone, as Megatron-Core has it.

    The memory of logits in fp32 is used for the gradient. Backward runs once.
    """
    losses: torch.Tensor = _CrossEntropy.apply(logits_NV, labels_N)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        logits_NV = logits_NV.float()
        known_N = (labels_N >= 0) & (labels_N < logits_NV.size(1))
        # Of each row the kernel reads all before it writes.
        log_p_NV = torch.log_softmax(logits_NV, -1, out=logits_NV)
        labels_N1 = labels_N.where(known_N, 0).unsqueeze(1)
        losses_N = -log_p_NV.gather(1, labels_N1).squeeze(1).where(known_N, log_p_NV.amax(1))
        ctx.save_for_backward(log_p_NV, labels_N1, known_N)
        return losses_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        log_p_NV, labels_N1, known_N = ctx.saved_tensors
        p_NV = torch.softmax(log_p_NV, -1, out=log_p_NV)
        p_NV.scatter_add_(1, labels_N1, -known_N.to(p_NV.dtype).unsqueeze(1))
        return p_NV.mul_(gradients[0].unsqueeze(1)), None

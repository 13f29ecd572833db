"""Distillation: the divergence between the next tokens of a teacher and of a student, cut over tensor-parallel ranks.

KL(teacher || student) of both softmaxes at temperature T (Hinton, Vinyals, Dean 2015, arXiv 1503.02531, section 2).
With top-k, the tokens outside of the teacher's k most likely ones count as one token (the "ghost token" of Anshumann et
al. 2025, arXiv 2503.16870): a lower bound of the full divergence, and equal to it if k is the vocabulary.

Logits exist for one chunk of tokens at a time, of both models, in forward and in backward.

Shape suffixes: N tokens, V vocabulary part of this tensor-parallel rank, H hidden size, L losses of a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK = 2**26
"""Logits of a chunk on one rank: 256 MiB in fp32."""

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [N, H] -> logits [N, V]."""

TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(labels [N], logits [N, V], which it may change) -> losses [N] in nats."""


@dataclass(frozen=True)
class TeacherHead:
    """This rank's part of a teacher's output layer, cut as the student's is."""

    weight_VH: torch.Tensor
    """Rows of the tokens that both models have; fewer than the student's at the end of the vocabulary."""
    columns: int
    """Rows of the student's part, the same on every rank."""
    softcap: float
    divisor: float
    tp_group: dist.ProcessGroup
    """The student's."""
    temperature: float
    top_k: int

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return the teacher's logits [N, V], fp32."""
        logits_NV = F.linear(hidden_NH, self.weight_VH)
        if self.softcap:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        return logits_NV.float() / self.divisor

    def divergence(self, student_NV: torch.Tensor, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return KL(teacher || student) [N] in nats, from the student's logits and the teacher's hidden states."""
        student_NV = student_NV[:, : len(self.weight_VH)].float()
        divergence_N: torch.Tensor = _Divergence.apply(student_NV, self.logits(hidden_NH), self)
        return divergence_N


@dataclass(frozen=True)
class Lesson:
    """What a teacher says of the learned tokens of one microbatch, for a language model's next pass."""

    head: TeacherHead
    hidden_NH: torch.Tensor
    """The teacher's hidden states of these tokens, before its output layer."""

    def losses(
        self, hidden_NH: torch.Tensor, logits: Logits, labels_N: torch.Tensor, token_loss: TokenLoss
    ) -> torch.Tensor:
        """Return the losses of every token, [2, N] in nats: cross entropy and divergence.

        Args:
            hidden_NH: the student's hidden states.
            logits: computes the student's logits.
            token_loss: cross entropy of logits.
        """

        def of_chunk(hidden: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            student = logits(hidden)
            divergence = self.head.divergence(student, teacher)  # first: the other one may change the logits
            return torch.stack([token_loss(labels, student), divergence])

        size = max(1, CHUNK // self.head.columns)  # equal on all ranks, which sum over chunks
        chunks = list(zip(hidden_NH.split(size), self.hidden_NH.split(size), labels_N.split(size), strict=True))
        if len(chunks) == 1 or not torch.is_grad_enabled():
            return torch.cat([of_chunk(*chunk) for chunk in chunks], dim=1)
        # Backward computes the logits of a chunk again, instead of keeping those of all.
        parts = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        return torch.cat(parts, dim=1)


class _Divergence(torch.autograd.Function):
    """KL(teacher || student) over parts of the vocabulary; the gradient is known in forward."""

    @staticmethod
    def forward(ctx: Any, student_NV: torch.Tensor, teacher_NV: torch.Tensor, head: TeacherHead) -> torch.Tensor:
        group, temperature = head.tp_group, head.temperature
        log_s_NV, log_t_NV = (_log_softmax(logits / temperature, group) for logits in (student_NV, teacher_NV))
        s_NV, t_NV = log_s_NV.exp(), log_t_NV.exp()
        terms_NV = t_NV * (log_t_NV - log_s_NV)
        if not head.top_k:
            ctx.save_for_backward((s_NV - t_NV) / temperature)
            return _summed(terms_NV.sum(-1), group)
        inside_NV = log_t_NV >= _threshold(log_t_NV, head.top_k, group)
        outside = [values.masked_fill(inside_NV, 0).sum(-1) for values in (t_NV, s_NV)]
        sums = _summed(torch.stack([terms_NV.masked_fill(~inside_NV, 0).sum(-1), *outside]), group)
        divergence_N, rest_t_N, rest_s_N = sums
        rest_s_N = rest_s_N.clamp(min=torch.finfo(rest_s_N.dtype).tiny)
        ratio_N = rest_t_N / rest_s_N
        divergence_N = divergence_N + torch.xlogy(rest_t_N, ratio_N)
        ctx.save_for_backward((s_NV - torch.where(inside_NV, t_NV, ratio_N[:, None] * s_NV)) / temperature)
        return divergence_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient_NV,) = ctx.saved_tensors
        return gradient_NV * gradients[0][:, None], None, None


def _log_softmax(logits_NV: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    most_N = logits_NV.amax(-1) if logits_NV.size(-1) else logits_NV.new_full((len(logits_NV),), -torch.inf)
    if group.size() > 1:
        dist.all_reduce(most_N, op=dist.ReduceOp.MAX, group=group)
    shifted_NV = logits_NV - most_N[:, None]
    return shifted_NV - _summed(shifted_NV.exp().sum(-1), group).log()[:, None]


def _threshold(values_NV: torch.Tensor, most: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the `most`-th largest value of each row over all ranks, [N, 1]. Equal values all count, so that the choice
    does not depend on the layout."""
    local = values_NV.topk(min(most, values_NV.size(1))).values
    local = F.pad(local, (0, most - local.size(1)), value=-torch.inf)
    if group.size() == 1:
        return local[:, -1:]
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts, dim=1).topk(most).values[:, -1:]


def _summed(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values

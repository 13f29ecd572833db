"""Distillation: the divergence between the next tokens of a teacher and of a student, by blocks of the vocabulary.

KL(teacher || student) of both softmaxes at temperature T (Hinton, Vinyals, Dean 2015, arXiv 1503.02531, section 2).
With top-k, the tokens outside of the teacher's k most likely ones count as one token (the "ghost token" of Anshumann et
al. 2025, arXiv 2503.16870): a lower bound of the full divergence, and equal to it if k is the vocabulary.

Shape suffixes: N tokens, V vocabulary part of this tensor-parallel rank, C rows of a block, H hidden size.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from mimo_train.models.output.vocabulary import ExponentialSum, Logits, add_up, blocks_of


@dataclass(frozen=True)
class TeacherHead:
    """This rank's part of a teacher's output layer, cut as the student's is."""

    weight_VH: torch.Tensor
    """Rows of the tokens that both models have; fewer than the student's at the end of the vocabulary."""
    logits: Logits
    tp_group: dist.ProcessGroup
    """The student's."""
    temperature: float
    top_k: int
    """0: all tokens."""


@dataclass(frozen=True)
class Lesson:
    """What a teacher says of the learned tokens of one microbatch, for a language model's next pass."""

    head: TeacherHead
    hidden_NH: torch.Tensor
    """The teacher's hidden states of these tokens, before its output layer."""


class Taught:
    """Sums the divergence of a lesson over blocks of the vocabulary, and gives its gradient. Softmaxes are over the
    tokens that both models have."""

    def __init__(self, lesson: Lesson):
        """Sum up the teacher's softmax. Collective over tensor-parallel ranks."""
        self._lesson, self._head = lesson, lesson.head
        tokens, device = len(lesson.hidden_NH), lesson.hidden_NH.device
        teacher = ExponentialSum(tokens, device)
        self._student = ExponentialSum(tokens, device, sums=2 if self._head.top_k else 1)
        most = self._head.top_k
        likeliest_NK = torch.full((tokens, most), -torch.inf, device=device)
        for begin, end in blocks_of(tokens, len(self._head.weight_VH)):
            logits_NC = self._teacher(begin, end)
            if most:
                block_NK = logits_NC.topk(min(most, end - begin)).values
                likeliest_NK = torch.cat([likeliest_NK, block_NK], 1).topk(most).values
            teacher.add(logits_NC)
        add_up(self._head.tp_group, [teacher])
        self._teacher_log_N1 = teacher.log().unsqueeze(1)
        self._threshold_N1 = _last_of_ranks(likeliest_NK, self._head.tp_group) if most else None
        self._difference_N, self._rest_N = torch.zeros(2, tokens, device=device)

    def add(self, student_NC: torch.Tensor, begin: int) -> None:
        """Add a block of the student's logits, whose first row is `begin`."""
        end = min(begin + student_NC.size(1), len(self._head.weight_VH))
        if end <= begin:
            return
        student_NC, teacher_NC = self._scaled(student_NC[:, : end - begin]), self._teacher(begin, end)
        outside_NC = None if self._threshold_N1 is None else teacher_NC < self._threshold_N1
        differences_NC = teacher_NC - student_NC
        probabilities_NC = teacher_NC.sub_(self._teacher_log_N1).exp_()
        if outside_NC is not None:
            self._rest_N = self._rest_N + (probabilities_NC * outside_NC).sum(1)
            probabilities_NC.masked_fill_(outside_NC, 0)
        self._difference_N = self._difference_N + differences_NC.mul_(probabilities_NC).sum(1)
        self._student.add(student_NC, outside_NC)

    def divergence(self) -> torch.Tensor:
        """Return the divergence [N] in nats, fp32, after all blocks. Collective over tensor-parallel ranks."""
        group = self._head.tp_group
        difference_N, rest_N = add_up(group, [self._student], self._difference_N, self._rest_N).double()
        student_log_N = self._student.log()
        # The sum of t (log t - log s) is that of t (teacher - student), plus the difference of both normalizations.
        result_N = difference_N + (1 - rest_N) * (student_log_N.double() - self._teacher_log_N1.squeeze(1).double())
        if self._threshold_N1 is not None:
            total_N, outside_N = self._student.sums_KN
            student_rest_N = (outside_N / total_N).clamp(min=torch.finfo(torch.float32).tiny).double()
            ratio_N = rest_N / student_rest_N
            result_N = result_N + torch.xlogy(rest_N, ratio_N)
            self._ratio_N1 = ratio_N.float().unsqueeze(1)
        self._student_log_N1 = student_log_N.unsqueeze(1)
        return result_N.float()

    def gradient(self, student_NC: torch.Tensor, begin: int) -> torch.Tensor:
        """Return the gradient of the divergence in a block of the student's logits, for the tokens that both models
        have: a new tensor with C columns at most."""
        end = min(begin + student_NC.size(1), max(begin, len(self._head.weight_VH)))
        student_NC, teacher_NC = self._scaled(student_NC[:, : end - begin]), self._teacher(begin, end)
        outside_NC = None if self._threshold_N1 is None else teacher_NC < self._threshold_N1
        student_NC.sub_(self._student_log_N1).exp_()
        teacher_NC.sub_(self._teacher_log_N1).exp_()
        if outside_NC is not None:
            teacher_NC = torch.where(outside_NC, self._ratio_N1 * student_NC, teacher_NC)
        return student_NC.sub_(teacher_NC).div_(self._head.temperature)

    def _teacher(self, begin: int, end: int) -> torch.Tensor:
        logits_NC = self._head.logits(self._lesson.hidden_NH, self._head.weight_VH[begin:end])
        return logits_NC.div_(self._head.temperature)

    def _scaled(self, student_NC: torch.Tensor) -> torch.Tensor:
        return student_NC / self._head.temperature


def _last_of_ranks(likeliest_NK: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the K-th largest value of each row over all ranks, [N, 1]. Equal values all count, so that the choice does
    not depend on the layout."""
    if group.size() == 1:
        return likeliest_NK[:, -1:]
    parts = [torch.empty_like(likeliest_NK) for _ in range(group.size())]
    dist.all_gather(parts, likeliest_NK.contiguous(), group=group)
    return torch.cat(parts, dim=1).topk(likeliest_NK.size(1)).values[:, -1:]

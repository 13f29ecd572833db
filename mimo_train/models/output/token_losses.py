"""Losses of tokens from hidden states and the weight of the output layer, without a tensor of tokens times vocabulary.

Both passes go over blocks of the vocabulary. Forward keeps the logarithm of the sum of exponentials of each token;
backward computes the logits of a block again. So the weight gradient of a block of rows is one product. If the weight
is frozen, blocks are of tokens: forward computes the gradient of the hidden states, and no logit is computed twice.

The gradient of the hidden states is this rank's part of a sum over tensor-parallel ranks, which the caller takes
(`copy_to_tensor_model_parallel_region`).

Shape suffixes: N tokens, H hidden size, V rows of the weight on this rank, C rows of a block, L losses.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from mimo_train.estimate.activations import block_tokens
from mimo_train.models.output.divergence import Lesson, Taught
from mimo_train.models.output.vocabulary import ExponentialSum, Vocabulary, add_product, add_up, blocks_of


def token_losses(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor | None,
    labels_N: torch.Tensor,
    vocabulary: Vocabulary,
    *,
    lesson: Lesson | None = None,
    predicts: bool = False,
    adds_to_main_grad: bool = False,
) -> torch.Tensor:
    """Return the losses of every token, fp32 [1, N], or [2, N] with a lesson or predictions: cross entropy in nats
    first. Collective over tensor-parallel ranks.

    A label outside of the vocabulary gives the loss of the most likely token, with the gradient of its normalization
    alone, as in Megatron-Core.

    Args:
        weight_VH: this rank's rows; None if `hidden_NH` are logits.
        lesson: a teacher's part of these tokens; the second row is the divergence from it.
        predicts: the second row has the most likely token, the lowest among equals. Only without gradients.
        adds_to_main_grad: backward adds the weight's gradient to its `main_grad`, as layers of Megatron-Core with
            `gradient_accumulation_fusion` do.
    """
    learns = torch.is_grad_enabled() and hidden_NH.requires_grad
    assert not (predicts and learns), "predictions have no gradient"
    if weight_VH is not None and learns and not weight_VH.requires_grad and lesson is None:
        # In fp16 gradients are representable only once they are scaled, in backward. Every rank must have a token.
        has_tokens = vocabulary.tokens > (vocabulary.tp_group.size() - 1) * len(weight_VH)
        if has_tokens and hidden_NH.dtype is not torch.float16:
            losses_N: torch.Tensor = _FrozenCrossEntropy.apply(hidden_NH, weight_VH, labels_N, vocabulary)
            return losses_N.unsqueeze(0)
    options = (vocabulary, lesson, predicts, adds_to_main_grad)
    losses_LN: torch.Tensor = _TokenLosses.apply(hidden_NH, weight_VH, labels_N, *options)
    return losses_LN


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor | None,
        labels_N: torch.Tensor,
        vocabulary: Vocabulary,
        lesson: Lesson | None,
        predicts: bool,
        adds_to_main_grad: bool,
    ) -> torch.Tensor:
        tokens = len(labels_N)
        first, rows = vocabulary.part(hidden_NH.size(1) if weight_VH is None else len(weight_VH))
        local_N = labels_N - first
        exponentials = ExponentialSum(tokens, hidden_NH.device)
        label_N, best_N = torch.zeros_like(exponentials.most_N), exponentials.most_N
        predicted_N = torch.zeros_like(labels_N)
        taught = None if lesson is None else Taught(lesson)
        for begin, end in blocks_of(tokens, rows):
            logits_NC = _logits(vocabulary, hidden_NH, weight_VH, begin, end)
            label_N += _at_label(logits_NC, local_N - begin)
            if predicts:
                most_N, column_N = logits_NC.max(1)
                predicted_N = torch.where(most_N > best_N, column_N + (first + begin), predicted_N)
                best_N = torch.maximum(best_N, most_N)
            if taught is not None:
                taught.add(logits_NC, begin)
            exponentials.add(logits_NC)
            del logits_NC  # before those of the next block
        (label_N,) = add_up(vocabulary.tp_group, [exponentials], label_N)
        log_sum_N = exponentials.log()
        losses_LN = [log_sum_N - label_N.where(vocabulary.is_token(labels_N), exponentials.most_N)]
        if predicts:
            losses_LN.append(_lowest(predicted_N, best_N == exponentials.most_N, vocabulary).float())
        if taught is not None:
            losses_LN.append(taught.divergence())
        ctx.save_for_backward(hidden_NH, weight_VH, local_N, log_sum_N)
        ctx.vocabulary, ctx.rows, ctx.taught = vocabulary, rows, taught
        ctx.fused_weight = weight_VH if adds_to_main_grad else None
        return torch.stack(losses_LN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, local_N, log_sum_N = ctx.saved_tensors
        logits, (to_hidden, to_weight) = ctx.vocabulary.logits, ctx.needs_input_grad[:2]
        gradients_LN1 = gradients[0].div(logits.divisor).unsqueeze(2)
        precision = torch.float32 if weight_VH is not None else hidden_NH.dtype
        hidden_gradient = torch.zeros_like(hidden_NH, dtype=precision) if to_hidden else None
        weight_gradient = torch.empty_like(weight_VH) if to_weight and ctx.fused_weight is None else None
        for begin, end in blocks_of(len(local_N), ctx.rows):
            logits_NC = _logits(ctx.vocabulary, hidden_NH, weight_VH, begin, end)
            slope_NC = logits.slope(logits_NC)
            of_lesson_NC = None if ctx.taught is None else ctx.taught.gradient(logits_NC, begin)
            terms_NC = _minus_label(logits_NC.sub_(log_sum_N.unsqueeze(1)).exp_(), local_N - begin)
            terms_NC.mul_(gradients_LN1[0])
            if of_lesson_NC is not None:
                terms_NC[:, : of_lesson_NC.size(1)].add_(of_lesson_NC.mul_(gradients_LN1[1]))
            if slope_NC is not None:
                terms_NC.mul_(slope_NC)
            rounded_NC = terms_NC.to(hidden_NH.dtype)
            del logits_NC, slope_NC, of_lesson_NC, terms_NC
            if hidden_gradient is not None and weight_VH is None:
                hidden_gradient[:, begin:end] = rounded_NC
            elif hidden_gradient is not None:
                add_product(hidden_gradient, rounded_NC, weight_VH[begin:end])
            if weight_gradient is not None:
                torch.mm(rounded_NC.T, hidden_NH, out=weight_gradient[begin:end])
            elif to_weight:
                add_product(ctx.fused_weight.main_grad[begin:end], rounded_NC.T, hidden_NH)
        if weight_gradient is not None:
            weight_gradient[ctx.rows :].zero_()
        elif to_weight:
            weight_gradient = _added_to_main_grad(ctx.fused_weight)
        return None if hidden_gradient is None else hidden_gradient.to(hidden_NH.dtype), weight_gradient, *[None] * 5


class _FrozenCrossEntropy(torch.autograd.Function):
    """Cross entropy whose gradient of the hidden states is made in forward; backward scales its rows."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor, vocabulary: Vocabulary
    ) -> torch.Tensor:
        (first, rows), logits = vocabulary.part(len(weight_VH)), vocabulary.logits
        weight_CH, hidden_gradient = weight_VH[:rows], torch.empty_like(hidden_NH)
        losses = []
        for part_NH, part_N, gradient_NH in zip(
            *(values.split(block_tokens(len(weight_VH))) for values in (hidden_NH, labels_N, hidden_gradient)),
            strict=True,
        ):
            logits_NC = logits(part_NH, weight_CH)
            slope_NC, label_N = logits.slope(logits_NC), _at_label(logits_NC, part_N - first)
            exponentials = ExponentialSum(len(part_N), hidden_NH.device)
            exponentials.add(logits_NC)
            local_most_N = exponentials.most_N
            (label_N,) = add_up(vocabulary.tp_group, [exponentials], label_N)
            log_sum_N = exponentials.log()
            losses.append(log_sum_N - label_N.where(vocabulary.is_token(part_N), exponentials.most_N))
            # `add` has left exp(logits - most).
            terms_NC = logits_NC.mul_((local_most_N - log_sum_N).exp_().unsqueeze(1))
            _minus_label(terms_NC, part_N - first).div_(logits.divisor)
            if slope_NC is not None:
                terms_NC.mul_(slope_NC)
            torch.mm(terms_NC.to(hidden_NH.dtype), weight_CH, out=gradient_NH)
            del logits_NC, slope_NC, terms_NC  # before those of the next block
        ctx.save_for_backward(hidden_gradient)
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden_gradient,) = ctx.saved_tensors
        return (hidden_gradient * gradients[0].unsqueeze(1)).to(hidden_gradient.dtype), None, None, None


def _logits(
    vocabulary: Vocabulary, hidden_NH: torch.Tensor, weight_VH: torch.Tensor | None, begin: int, end: int
) -> torch.Tensor:
    """Return a block of logits, a new fp32 tensor."""
    if weight_VH is None:
        return hidden_NH[:, begin:end].to(torch.float32, copy=True)
    return vocabulary.logits(hidden_NH, weight_VH[begin:end])


def _columns(local_N: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each label in a block that starts at label 0, [N, 1], and whether it has one, [N, 1]."""
    is_here_N = (local_N >= 0) & (local_N < columns)
    return local_N.where(is_here_N, 0).unsqueeze(1), is_here_N.unsqueeze(1)


def _at_label(logits_NC: torch.Tensor, local_N: torch.Tensor) -> torch.Tensor:
    """Return the label's logit [N], 0 where it is in another block."""
    column_N1, is_here_N1 = _columns(local_N, logits_NC.size(1))
    return logits_NC.gather(1, column_N1).where(is_here_N1, 0).squeeze(1)


def _minus_label(probabilities_NC: torch.Tensor, local_N: torch.Tensor) -> torch.Tensor:
    """Subtract 1 at the labels, in place: the gradient of cross entropy."""
    column_N1, is_here_N1 = _columns(local_N, probabilities_NC.size(1))
    return probabilities_NC.scatter_add_(1, column_N1, -is_here_N1.to(probabilities_NC.dtype))


def _lowest(predicted_N: torch.Tensor, is_most_N: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Return the lowest of the ranks' predictions that have the largest logit."""
    if vocabulary.tp_group.size() == 1:
        return predicted_N
    predicted_N = predicted_N.where(is_most_N, vocabulary.tokens - 1)
    dist.all_reduce(predicted_N, dist.ReduceOp.MIN, group=vocabulary.tp_group)
    return predicted_N


def _added_to_main_grad(weight: Any) -> torch.Tensor:
    """Tell Megatron-Core's wrapper that the gradient is in `main_grad`, and return one for autograd, as its layers do
    (0.19.2, tensor_parallel/layers.py): zeros for a tied weight, to which autograd adds the embedding's."""
    weight.grad_added_to_main_grad = True
    is_added = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if is_added else torch.empty_like(weight)

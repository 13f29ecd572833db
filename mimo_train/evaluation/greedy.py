"""Predictions of the language model at its last stage: greedy tokens, losses and answers, at any layout.

Shape suffixes: B batch, S sequence, C positions of this context-parallel rank, V vocabulary part of this
tensor-parallel rank.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from data.pipeline import TextSample
from data.text.tokens import Tokenizer
from mimo_train.config.parts import LANGUAGE
from mimo_train.models.documents import documents_of
from mimo_train.models.language_model import choose_logits, spread
from mimo_train.parallel.context import gather_sequence, own_part
from mimo_train.training.step.batches import WANTED, StepIterator
from mimo_train.training.step.forward_step import LEARNED, MODEL_INPUTS
from mimo_train.training.step.pipeline import Pipeline


class PredictStep:
    """Forward step whose loss function returns `_predictions`; run with forward_only and collect_non_loss_data."""

    def __init__(self, pipeline: Pipeline):
        self._groups = pipeline.groups.collections
        self._is_last_stage, self._is_alone = pipeline.is_last_stage, not pipeline.layout.edges

    def __call__(
        self, data_iterator: Iterator[dict[str, Any]], model: MegatronModule
    ) -> tuple[Any, Callable[..., dict[str, Any]] | None]:
        """Run one forward pass of this rank's modules over the next microbatch."""
        batch = next(data_iterator)
        inputs = {key: batch[key] for key in MODEL_INPUTS if key in batch and key not in ("labels", "loss_mask")}
        if LEARNED in batch:
            alone = unwrap_model(model)
            choose_logits(alone if self._is_alone else alone.language_model, batch[LEARNED])
        if self._is_alone:
            cp_group = self._groups[LANGUAGE].cp
            inputs.pop("documents", None)
            packing = {"packed_seq_params": documents_of(batch, cp_group.size())}
            output = model(**own_part(inputs, cp_group), attention_mask=None, **packing)
        else:
            inputs.setdefault("input_ids", None)
            output, _ = model(**inputs, labels=None, loss_mask=None)
        return output, partial(_predictions, batch, self._groups[LANGUAGE]) if self._is_last_stage else None


def _predictions(
    batch: dict[str, Any], language: ProcessGroupCollection, logits_BCV: torch.Tensor, non_loss_data: bool = True
) -> dict:
    """Return the microbatch with `losses` [B, S] in nats and `predicted` [B, S], the most likely next token. Every
    context-parallel rank gets the full sequence. With logits [1, N, V] at the places `learned`, both are 0
    elsewhere."""
    labels_BC = own_part({"labels": batch["labels"]}, language.cp)["labels"]
    shape, learned = labels_BC.shape, batch.get(LEARNED)
    if learned is not None:
        labels_BC = labels_BC.reshape(-1).index_select(0, learned).unsqueeze(0)
    logits_CBV = logits_BCV.transpose(0, 1).contiguous()
    predicted_CB = _parallel_argmax(logits_CBV, language.tp)
    losses_CB = vocab_parallel_cross_entropy(
        logits_CBV.float(), labels_BC.transpose(0, 1).contiguous(), tp_group=language.tp
    )
    if learned is not None:
        losses_CB, predicted_CB = (spread(part.squeeze(1), learned, shape).T for part in (losses_CB, predicted_CB))
    losses_SB, predicted_SB = (gather_sequence(part.contiguous(), language.cp) for part in (losses_CB, predicted_CB))
    return {**batch, "losses": losses_SB.transpose(0, 1), "predicted": predicted_SB.transpose(0, 1)}


def _parallel_argmax(logits_SBV: torch.Tensor, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Return the index of the largest logit over the full vocabulary, [S, B]; the lowest index among equals."""
    values, indices = logits_SBV.max(dim=-1)
    ranks = dist.get_world_size(tp_group)
    if ranks == 1:
        return indices
    indices = indices + dist.get_rank(tp_group) * logits_SBV.size(-1)
    all_values = [torch.empty_like(values) for _ in range(ranks)]
    all_indices = [torch.empty_like(indices) for _ in range(ranks)]
    dist.all_gather(all_values, values.contiguous(), group=tp_group)
    dist.all_gather(all_indices, indices.contiguous(), group=tp_group)
    best = torch.stack(all_values).argmax(dim=0, keepdim=True)
    return torch.stack(all_indices).gather(0, best).squeeze(0)


def greedy_answers(
    pipeline: Pipeline,
    tokenizer: Tokenizer,
    data_iterator: StepIterator,
    max_new_tokens: int,
    *,
    keep_ends: bool = False,
    before_token: Callable[[], None] = lambda: None,
) -> list[tuple[int, list[int]]]:
    """Answer the current step's samples by greedy decoding, with one forward pass of the full pipeline per token.

    The model's tokens replace each sample's last answer. Samples without an answer, or with media in or after the last
    one, are not answered. Collective over all ranks.

    Args:
        data_iterator: on a step of samples with `loss_mask` on answers.
        max_new_tokens: number of passes, and the longest answer.
        keep_ends: include the token that ends an answer; an answer without one was cut.
        before_token: called on every rank before each pass; may raise on all of them to end the decoding.

    Returns:
        (sample number, tokens of the answer) of this rank's samples, on ranks of the language model; else empty.
    """
    step, predict = data_iterator.current, PredictStep(pipeline)
    answers = [_OpenAnswers(microbatch, tokenizer) for microbatch in step.microbatches if "input_ids" in microbatch]
    for _ in range(max_new_tokens):
        before_token()
        data_iterator.rewind()
        for microbatch in answers:
            microbatch.want_next()
        collected = pipeline.run(predict, data_iterator, forward_only=True, collect_non_loss_data=True)
        for index, microbatch in enumerate(answers):
            microbatch.append(_from_last_stage(pipeline, collected, index, microbatch))
    return [pair for microbatch in answers for pair in microbatch.finished(keep_ends)]


def _from_last_stage(pipeline: Pipeline, collected: list, index: int, answers: "_OpenAnswers") -> torch.Tensor:
    pp_group = pipeline.groups.collections[LANGUAGE].pp
    if pipeline.is_last_stage:
        tokens = answers.next_tokens(collected[index]["predicted"])
    else:
        tokens = torch.empty(len(answers.lengths), dtype=torch.int64, device=pipeline.device)
    last = dist.get_process_group_ranks(pp_group)[-1]
    dist.broadcast(tokens, src=last, group=pp_group)
    return tokens


class _OpenAnswers:
    """Samples of one microbatch that are being answered; writes the tokens into the microbatch in place."""

    def __init__(self, microbatch: dict[str, Any], tokenizer: Tokenizer):
        self.numbers = microbatch["sample_numbers"].tolist()
        self._microbatch, self._as_text = microbatch, tokenizer.as_text
        self.ids, self._ends = microbatch["input_ids"], tokenizer.template.stop_ids
        self.lengths = [self._prompt(*row) for row in zip(self.ids, microbatch["loss_mask"], strict=True)]
        for row, length in zip(self.ids, self.lengths, strict=True):
            if length:
                row[length:] = tokenizer.pad_id
        self._new: list[list[int]] = [[] for _ in self.numbers]

    def _prompt(self, ids_S: torch.Tensor, loss_mask_S: torch.Tensor) -> int:
        """Return the number of tokens before the last answer; 0 without one or with placeholders in or after it,
        because their features need a place."""
        length = _prompt_length(loss_mask_S)
        return length if all(self._as_text(token) == token for token in ids_S[length:].tolist()) else 0

    def want_next(self) -> None:
        """Request logits at the last token of every sample from the next pass."""
        self._microbatch[WANTED] = torch.zeros_like(self.ids).scatter_(1, self._last()[:, None], 1)

    def next_tokens(self, predicted_BS: torch.Tensor) -> torch.Tensor:
        """Return the model's next token of every sample, [B]."""
        return predicted_BS.gather(1, self._last()[:, None].to(predicted_BS.device)).squeeze(1).contiguous()

    def _last(self) -> torch.Tensor:
        return (torch.tensor(self.lengths) - 1).clamp(min=0)

    def append(self, tokens: torch.Tensor) -> None:
        """Add one token to every answer that is open and has room."""
        for row, token in enumerate(tokens.tolist()):
            open_ = not self._new[row] or self._new[row][-1] not in self._ends
            if open_ and 0 < self.lengths[row] < self.ids.size(1):
                self.ids[row, self.lengths[row]] = self._as_text(token)
                self.lengths[row] += 1
                self._new[row].append(token)

    def finished(self, keep_ends: bool) -> list[tuple[int, list[int]]]:
        """Return (sample number, answer) of every sample."""
        return [
            (number, [token for token in new if keep_ends or token not in self._ends])
            for number, new in zip(self.numbers, self._new, strict=True)
        ]


def true_answer(sample: TextSample) -> list[int]:
    """Return the tokens of the true answer that greedy decoding replaces."""
    first = max(_prompt_length(torch.from_numpy(sample.loss_mask)) - 1, 0)
    return sample.labels[first:][sample.loss_mask[first:] > 0].tolist()


def _prompt_length(loss_mask_S: torch.Tensor) -> int:
    """Return the number of tokens before the last answer, 0 if nothing is learned. Position i with loss predicts token
    i + 1, so the prompt ends at the first i of the last run of ones."""
    learned = loss_mask_S.nonzero().flatten().tolist()
    if not learned:
        return 0
    start = len(learned) - 1
    while start and learned[start - 1] == learned[start] - 1:
        start -= 1
    return learned[start] + 1

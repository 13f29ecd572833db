"""The losses of the caller's forward step over a held-out set, at any layout."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_mix import source_names
from mimo_train.models.parameters import modules_of
from mimo_train.training.step import forward_step
from mimo_train.training.step.forward_step import ForwardStepCallable, record_losses
from mimo_train.training.step.losses import StepLosses
from mimo_train.training.step.pipeline import Pipeline

TOTAL = "loss"
"""Name of the loss that training minimises; a loss of the caller with this name replaces it."""


def is_default_step(step_func: ForwardStepCallable) -> bool:
    """True if the loss of `step_func`, as the schedule calls it, is the cross entropy of the learned tokens."""
    return getattr(step_func, "func", step_func) in (forward_step.gpt_forward_step, forward_step.mimo_forward_step)


def writes_text(pipeline: Pipeline) -> bool:
    """True if the language model ends in logits of the vocabulary; a value head does not. Collective over all ranks."""
    other_head = False
    if pipeline.is_last_stage:
        language = unwrap_model(modules_of(pipeline.model)[LANGUAGE][-1])
        head = language.output_layer
        other_head = not (isinstance(head, ColumnParallelLinear) and head.output_size == language.vocab_size)
    ranks = torch.tensor(int(other_head), device=pipeline.device)
    dist.all_reduce(ranks)
    return int(ranks) == 0


class CallerLosses:
    """Sums the losses of the caller's forward step, in any form of `losses.ACCEPTED_RETURNS`."""

    def __init__(self, step_func: ForwardStepCallable, pipeline: Pipeline, cfg: ConfigContainer):
        """`step_func` is the forward step as the schedule calls it."""
        self._pipeline = pipeline
        weights, sources = cfg.train.loss_weights, source_names(cfg.data.mix)
        self._step = record_losses(step_func, StepLosses(weights, pipeline.groups, sources=sources))
        self._microbatches: list[dict[str, torch.Tensor]] = []
        self._sums: dict[str, torch.Tensor] = {}

    def run(self, data: Any, samples: int) -> None:
        """Add the microbatches of the current step that have any of the first `samples` samples. Collective."""
        self._microbatches = []
        self._pipeline.run(self._forward_step, data, forward_only=True)
        numbers: Sequence[Any] = [each.get("sample_numbers") for each in data.current.microbatches]
        for number, sums in zip(numbers, self._microbatches, strict=self._pipeline.is_last_stage):
            if bool((number < samples).any()):
                for name, pair in sums.items():
                    self._sums[name] = self._sums.get(name, 0) + pair.double()

    def means(self) -> dict[str, float]:
        """Return the mean of every loss, NaN if nothing counted. Collective over ranks of the last stage."""
        replicas = self._pipeline.groups.collections[LANGUAGE].dp_cp
        parts: list[Any] = [None] * replicas.size()
        dist.all_gather_object(parts, {name: pair.tolist() for name, pair in self._sums.items()}, group=replicas)
        totals: dict[str, list[float]] = {}
        for name, (total, count) in (item for part in parts for item in part.items()):
            before = totals.get(name, [0.0, 0.0])
            totals[name] = [before[0] + total, before[1] + count]
        return {name: total / count if count else float("nan") for name, (total, count) in totals.items()}

    def _forward_step(
        self, data_iterator: Iterator[dict[str, Any]], model: MegatronModule, **options: Any
    ) -> tuple[Any, Callable | None]:
        output, loss_func = self._step(data_iterator, model, **options)
        return output, None if loss_func is None else partial(self._noted, loss_func)

    def _noted(self, loss_func: Callable, output: Any) -> tuple[torch.Tensor, torch.Tensor, dict]:
        loss, num_tokens, report = loss_func(output)
        total = torch.stack([loss.detach().reshape(()).double(), num_tokens.reshape(()).double()])
        self._microbatches.append({TOTAL: total} | report)
        return loss, num_tokens, report

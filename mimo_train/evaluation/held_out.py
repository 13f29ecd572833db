"""Evaluation in the loop: held-out loss, exact match of answers, and samples for the report."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mimo_train.config.schema import LANGUAGE
from mimo_train.evaluation.greedy import greedy_answers, predict_step
from mimo_train.evaluation.shown_media import shown_media
from mimo_train.metrics import progress as progress_log
from mimo_train.plan.samples import build_dataset
from mimo_train.step.batches import StepIterator, open_loader
from mimo_train.step.feature_cache import Features
from mimo_train.step.forward_step import prepare_forward_step_func
from mimo_train.step.state import GlobalState

SHOWN_TOKENS = 24
"""Longest answer that the report's samples are decoded to."""


class HeldOut:
    """The held-out samples: opens an iterator over all of them, or over the first `train.eval_samples`."""

    def __init__(self, state: GlobalState, features: Features | None = None):
        """`features`: where those of frozen encoders are found."""
        self._state = state
        self.dataset = build_dataset(state.cfg, state.tokenizer, held_out=True)
        if features is not None:
            features.serve(self.dataset)
        wanted = state.cfg.train.eval_samples or len(self.dataset)
        self.samples = min(wanted, len(self.dataset))
        self.steps = math.ceil(self.samples / state.layout.global_batch_size)

    def __call__(self) -> StepIterator:
        state = self._state
        loader = open_loader(state.cfg, state.layout, state.pipeline.groups, self.dataset, consumed=0, steps=self.steps)
        return StepIterator(loader, state.pipeline, forward_only=True)


def evaluate_when_due(
    step_func: Callable,
    model: list,
    held_out: HeldOut | None,
    state: GlobalState,
    process_non_loss_data_func: Callable[[Any, int, Any], None] | None = None,
    non_loss_data_func: Callable[[list], Any] | None = None,
) -> None:
    """Evaluate every `train.eval_interval` steps and after the last one. Collective over all ranks.

    Args:
        step_func: the run's forward step, prepared; it gives the non-loss data where `non_loss_data_func` does not.
        process_non_loss_data_func: called as (data, step, writer) on the logging rank, with TensorBoard's
            `SummaryWriter`, or None where `log.tensorboard` is off.
        non_loss_data_func: called as (model) on every rank; gives the data. Without it, the data is the list of what
            the loss functions, called with non_loss_data=True, give for the microbatches of the first held-out step.
    """
    interval, step = state.cfg.train.eval_interval, state.train_state.step
    due = (interval > 0 and step % interval == 0) or step == state.cfg.train.iters
    if held_out is None or not due:
        return
    values = evaluate(model, held_out, state)
    if state.is_logging_rank:
        state.metrics.log(step, state.train_state.consumed_train_samples, values)
        state.console.evaluation(step, values)
        progress_log.evaluated(state.run_dir, step=step, values=values)
    if process_non_loss_data_func is not None or non_loss_data_func is not None:
        data = _non_loss_data(step_func, model, held_out, state, non_loss_data_func)
        if process_non_loss_data_func is not None and state.is_logging_rank:
            process_non_loss_data_func(data, step, state.tensorboard_logger)
    state.callbacks.fire("on_evaluation", state, values)


def evaluate(model: list, held_out: HeldOut, state: GlobalState) -> dict[str, float]:
    """Loss and exact match over the held-out samples. Collective over all ranks.

    An answer matches exactly when greedy decoding gives the true answer to the last token. Greedy decoding does that if
    and only if the most likely token after every true prefix is the true one (by induction over the answer), so one
    pass over the true sequence decides it. `write_samples` decodes for real what the report shows.

    Returns:
        {"eval/loss": nats per answer token, "eval/exact_match": share of samples, "eval/samples": their number};
        empty on ranks before the language model's last stage.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=state.device)
    iterator = held_out()
    step_func = prepare_forward_step_func(predict_step, state)
    try:
        with _evaluating(model):
            for index in range(held_out.steps):
                iterator.advance()
                collected = state.pipeline.run(
                    step_func,
                    iterator,
                    model,
                    sequence_length=state.cfg.data.sequence_length,
                    forward_only=True,
                    collect_non_loss_data=True,
                )
                for microbatch in collected if state.pipeline.is_last_stage else ():
                    sums += _score(microbatch, held_out.samples)
                if index == 0:
                    write_samples(state, model, step_func, iterator, held_out)
    finally:
        iterator.close()
    if not state.pipeline.is_last_stage:
        return {}
    dist.all_reduce(sums, group=state.pipeline.groups.collections[LANGUAGE].dp)
    loss, tokens, matches, samples = sums.tolist()
    return {
        "eval/loss": loss / max(tokens, 1),
        "eval/exact_match": matches / max(samples, 1),
        "eval/samples": samples,
    }


def _non_loss_data(
    step_func: Callable, model: list, held_out: HeldOut, state: GlobalState, give: Callable[[list], Any] | None
) -> Any:
    """What `give` or, without it, a forward pass over the first held-out step gives, in evaluation mode."""
    with _evaluating(model):
        if give is not None:
            return give(model)
        iterator = held_out()
        try:
            iterator.advance()
            return state.pipeline.run(
                step_func,
                iterator,
                model,
                sequence_length=state.cfg.data.sequence_length,
                forward_only=True,
                collect_non_loss_data=True,
            )
        finally:
            iterator.close()


@contextlib.contextmanager
def _evaluating(model: list) -> Iterator[None]:
    """Chunks in evaluation mode, without gradients."""
    for chunk in model:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in model:
            chunk.train()


def _score(microbatch: dict[str, Any], samples: int) -> torch.Tensor:
    """[sum of losses, tokens, exact matches, samples] of a microbatch, without samples beyond the held-out ones."""
    real = (microbatch["sample_numbers"] < samples).to(microbatch["loss_mask"].device)
    mask = microbatch["loss_mask"] * real[:, None]
    learned = mask > 0
    answered = learned.any(dim=1)
    right = ((microbatch["predicted"] == microbatch["labels"]) | ~learned).all(dim=1) & answered
    loss = (microbatch["losses"] * mask).sum()
    return torch.stack([loss, mask.sum(), right.sum(), answered.sum()]).double()


def write_samples(state: GlobalState, model: list, step_func, iterator: StepIterator, held_out: HeldOut) -> None:
    """samples.json: media, questions, greedy answers and truths of the first step's samples, on the logging rank."""
    wanted = state.cfg.train.report_samples
    if wanted < 1:
        return
    answers = greedy_answers(state, step_func, model, iterator, SHOWN_TOKENS)
    if not state.is_logging_rank:
        return
    shown = []
    for number, ids in answers[:wanted]:
        if number >= held_out.samples or held_out.dataset.is_bad(number):
            continue
        question, truth = held_out.dataset.prompt_and_truth(number)
        answer = state.tokenizer.decode(ids).strip()
        words = {"question": question, "answer": answer, "truth": truth, "correct": answer == truth}
        shown.append(shown_media(held_out.dataset, number) | words)
    temporary = state.run_dir / "samples.json.partial"
    temporary.write_text(json.dumps(shown))
    temporary.rename(state.run_dir / "samples.json")

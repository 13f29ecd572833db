"""Evaluate a model on held-out sets: losses, exact match, and metrics of generated texts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from data.samples.protocol import Samples
from mimo_train.config.errors import UserError
from mimo_train.config.schema_distill import SFT
from mimo_train.evaluation.answerer import Answerer
from mimo_train.evaluation.generation.answers import Answer
from mimo_train.evaluation.generation.options import Sampling
from mimo_train.evaluation.held_out import HeldOut
from mimo_train.evaluation.metrics import require_metrics, score_each
from mimo_train.evaluation.open_model import Model
from mimo_train.evaluation.predictions import no_text, predicts_text
from mimo_train.evaluation.turns import References
from mimo_train.inputs.datasets import HeldOutSet
from mimo_train.logging.console import progress_bar
from mimo_train.training.step.forward_step import gpt_forward_step, mimo_forward_step
from mimo_train.training.tasks.registry import task_of


@dataclass(frozen=True)
class Settings:
    """What is evaluated, and how texts are generated."""

    metrics: Sequence[str] = ()
    """Of generated texts; without any, no text is generated."""
    references: str = ""
    """See `References`."""
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 64


@dataclass
class Evaluated:
    """The evaluation of a set, on the rank that writes it."""

    dataset: Samples
    values: dict[str, float]
    """Metrics, with the prefix of the set."""
    lines: list[dict[str, Any]]
    """A prediction for each answered turn, in the order of the samples."""
    references: dict[str, int]
    """See `References.counts`."""
    cut: int
    """Number of generated answers that were cut before the model ended its turn."""


def evaluate(
    model: Model,
    sets: Sequence[HeldOutSet],
    settings: Settings,
    step_func: Callable | None = None,
    serve: Callable[[HeldOut], None] = lambda held_out: None,
) -> Iterator[tuple[HeldOutSet, Evaluated]]:
    """Evaluate sets one after the other; yields them on the logging rank. Collective over all ranks.

    Args:
        step_func: see `HeldOut.measure`; None: that of the task.
        serve: gives a set what its task needs, before it is measured. Collective.

    Raises:
        UserError: a metric cannot be computed, or the model or its layout generates no text.
        DataError: the samples cannot be read, or too many are bad.
    """
    require_metrics(settings.metrics)
    pipeline = model.pipeline
    if step_func is None and model.cfg.train.task != SFT:
        forward = mimo_forward_step if model.cfg.encoders else gpt_forward_step
        step_func = partial(forward, SimpleNamespace(task=task_of(model.cfg)))  # type: ignore[arg-type]
    text, logs = predicts_text(model.cfg, pipeline), dist.get_rank() == model.run.layout.logging_rank
    if settings.metrics and not text:
        raise UserError(f"--metric: {no_text(model.cfg)}. Leave it out")
    generation = (settings.sampling, settings.max_new_tokens)
    answerer = Answerer(model.cfg, pipeline, model.tokenizer, *generation) if settings.metrics else None
    for of in sets:
        held_out = HeldOut(model.run, pipeline, model.tokenizer, of=of, writes_text=text)
        try:
            serve(held_out)
            with closing(progress_bar(f"evaluation of {of.label}", held_out.samples, "samples", logs)) as bar:
                values, entries = held_out.measure(step_func, bar.add)
            answers: dict[tuple[int, int], Answer] | None = None
            if answerer is not None:
                with closing(progress_bar(f"answers to {of.label}", len(entries), "prompts", logs)) as bar:
                    answers = answerer.of_turns(held_out.dataset, entries, bar.add)
            if logs:
                yield of, _scored(held_out, values, entries, answers, settings)
        finally:
            held_out.dataset.close()


def _scored(
    held_out: HeldOut,
    values: dict[str, float],
    entries: list[dict[str, Any]],
    answers: dict[tuple[int, int], Answer] | None,
    settings: Settings,
) -> Evaluated:
    lines, references = [], References(held_out.dataset, settings.references)
    for entry in entries:
        number, turn = entry["number"], entry["turn"]
        shard, key = held_out.dataset.locate(number)
        line = {"shard": str(shard), "key": key, "number": number, "turn": turn, "prompt": entry["question"]}
        prediction = entry["answer"] if answers is None else answers[number, turn].text
        line |= {"prediction": prediction, "truth": entry["truth"]}
        if answers is not None and (cut := answers[number, turn].cut):
            line["cut"] = cut
        scores: dict[str, Any] = {name: entry[name] for name in ("exact_match", "loss", "tokens")}
        if settings.metrics:
            line["references"] = references.of(number, turn, entry["truth"])
        lines.append(line | {"scores": scores})
    if settings.metrics:
        if not lines:
            raise UserError(f"--metric: no sample of {held_out.prefix} has an answer to compare with")
        predictions = [line["prediction"] for line in lines]
        scored = score_each(settings.metrics, predictions, [line["references"] for line in lines])
        for name, (value, each) in scored.items():
            values[f"{held_out.prefix}{name}"] = value
            for line, score in zip(lines, each, strict=bool(each)):
                line["scores"][name] = score
    return Evaluated(held_out.dataset, values, lines, references.counts, sum("cut" in line for line in lines))

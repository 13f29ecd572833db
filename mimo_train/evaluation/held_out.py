"""Losses on held-out samples, of the shipped forward steps or the caller's own, and exact match of answers."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from data.indexed.dataset import TokenDataset
from data.samples.bad_samples import require_budget
from data.samples.protocol import Samples
from data.text.tokens import Tokenizer
from data.workers import GivesUp, never
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_mix import source_names
from mimo_train.evaluation.answerer import Answerer
from mimo_train.evaluation.generation.options import Sampling
from mimo_train.evaluation.metrics import require_metrics, score
from mimo_train.evaluation.predictions import (
    PredictStep,
    no_text,
    predictions_of,
    predicts_text,
    write_predictions,
    write_samples,
)
from mimo_train.evaluation.turns import References
from mimo_train.flight.recorder import RECORDER
from mimo_train.inputs.datasets import HeldOutSet, build_dataset, held_out_sets
from mimo_train.inputs.padding import padding_of_documents
from mimo_train.layout.run import Run
from mimo_train.parallel import device as devices
from mimo_train.parallel.collectives import agreed
from mimo_train.training.step import forward_step
from mimo_train.training.step.bad_samples import BadSampleReport
from mimo_train.training.step.batches import StepIterator, open_loader
from mimo_train.training.step.feature_cache import Features
from mimo_train.training.step.forward_step import ForwardStepCallable, record_losses
from mimo_train.training.step.losses import StepLosses
from mimo_train.training.step.pipeline import Pipeline


class EvaluationStopped(Exception):
    """A rank was asked to end the run; raised on all ranks. `votes` is (signalled, out of time) of all ranks."""

    def __init__(self, votes: tuple[bool, bool] | None):
        super().__init__()
        self.votes = votes or (False, False)


class Ending(NamedTuple):
    """Functions by which an evaluation learns that the run is to end."""

    gives_up: GivesUp = never
    """See `StepLoader`."""
    votes: Callable[[], tuple[bool, bool]] | None = None
    """See `StepIterator`."""


class HeldOut:
    """The samples of a held-out set, all or the first ones, and evaluations on them."""

    def __init__(
        self,
        run: Run,
        pipeline: Pipeline,
        tokenizer: Tokenizer,
        features: Features | None = None,
        of: HeldOutSet | None = None,
        *,
        shows: bool = True,
        ending: Ending | None = None,
        writes_text: bool = True,
        taught_set: Callable[[Samples, HeldOutSet], Any] | None = None,
    ):
        """Open the set `of`, by default the run's first.

        Args:
            features: look-ups of cached features of frozen encoders.
            shows: evaluations write samples.json.
            ending: ends an evaluation early; default: nothing does.
            writes_text: see `predicts_text`. Otherwise there is no exact match, no predictions.jsonl and no
                samples.json.
            taught_set: opens these samples for the teacher (`training.teacher.steps.TaughtSet`); None without one.
        """
        of = of or held_out_sets(run.cfg)[0]
        self._run, self._pipeline, self._tokenizer, self._ending = run, pipeline, tokenizer, ending or Ending()
        self.prefix, self.is_test, self._shows = of.prefix, of.is_test, shows and writes_text
        self._writes_text = writes_text
        self._predictions, self.interval, self.metrics = of.predictions, of.interval, of.metrics
        self.dataset = build_dataset(run.cfg, tokenizer, held_out=of)
        apart = run.cfg.data.separate_documents and isinstance(self.dataset, TokenDataset)
        self.padding = padding_of_documents(run.cfg) if apart else None
        self._taught = None if taught_set is None else taught_set(self.dataset, of)
        if features is not None:
            features.serve(self.dataset)
        self._report: BadSampleReport | None = None
        self.samples = min(of.samples or len(self.dataset), len(self.dataset))
        self.steps = math.ceil(self.samples / run.batch.global_batch_size)

    def tell_of_bad_samples_by(self, report: BadSampleReport) -> None:
        """Report held-out samples that cannot be read to `report`, after each evaluation."""
        self._report = report
        report.adopt(self.dataset.bad_samples, "held_out")

    def __call__(self, *, all_logits: bool = False) -> StepIterator:
        """Open an iterator; `all_logits` computes logits everywhere, also with `train.logits=learned`."""
        return self._open(Ending(), all_logits=all_logits)

    def __next__(self) -> Any:
        """Raise an error that says what to call instead: a set has no position."""
        raise UserError(
            "valid_data_iterator: next() is not supported. Open an iterator for each pass: "
            "data = valid_data_iterator(), data.advance(), then next(data)"
        )

    def _open(self, ending: Ending, *, all_logits: bool = False) -> StepIterator:
        reading: dict[str, Any] = {"consumed": 0, "steps": self.steps, "gives_up": ending.gives_up}
        loader = open_loader(self._run, self._pipeline.groups, self.dataset, padding=self.padding, **reading)
        options: dict[str, Any] = {"votes": ending.votes, "samples": self.samples}
        if self._taught is not None and not all_logits:
            taught: StepIterator = self._taught.steps(loader, reading, **options)
            return taught
        learned = self._run.cfg.train.logits == "learned" and not all_logits
        return StepIterator(loader, self._pipeline, learned_logits=learned, **options)

    def evaluate(
        self,
        step: int = 0,
        step_func: ForwardStepCallable | None = None,
        progress: Callable[[int], None] = lambda samples: None,
    ) -> dict[str, float]:
        """Measure losses and exact match, and write the predictions. Collective over all ranks.

        The logging rank writes samples.json and predictions.jsonl, or predictions_NAME.jsonl or test_predictions.jsonl.

        Args:
            step: optimizer steps done, for the files.
            step_func, progress: see `measure`. Raises its errors.

        Returns:
            The values of `measure`.
        """
        run = self._run
        values, entries = self.measure(step_func, progress)
        if self.metrics:
            values |= self._score_texts(entries)
        if dist.get_rank() == run.layout.logging_rank and self._writes_text:
            write_predictions(run.dir / self._predictions, entries, step, self.dataset)
            if self._shows and run.cfg.train.report_samples:
                write_samples(run.dir / "samples.json", entries, run.cfg.train.report_samples, self.dataset)
        return values

    def _score_texts(self, entries: list[dict[str, Any]]) -> dict[str, float]:
        """Generate an answer for every entry, and return the values of `self.metrics`. Replaces the answers of the
        entries by these. Collective; the layout can generate text, so that all ranks have the entries."""
        pipeline, cfg, values = self._pipeline, self._run.cfg, dict[str, float]()
        with evaluating(pipeline.model):
            answerer = Answerer(cfg, pipeline, self._tokenizer, Sampling(), cfg.train.eval_max_new_tokens)
            texts = answerer.of_turns(self.dataset, entries, lambda samples: RECORDER.tick(), self._require_no_vote)
        for entry in entries:
            entry["answer"] = texts[entry["number"], entry["turn"]].text
        with agreed(values) as of_ranks:
            if dist.get_rank() == self._run.layout.logging_rank:
                of = References(self.dataset).of
                references = [of(entry["number"], entry["turn"], entry["truth"]) for entry in entries]
                values |= score(self.metrics, [entry["answer"] for entry in entries], references)
        return {f"{self.prefix}{name}": value for name, value in of_ranks[self._run.layout.logging_rank].items()}

    def _require_no_vote(self) -> None:
        """Raise EvaluationStopped on all ranks if one was asked to end the run. Collective."""
        if self._ending.votes is None:
            return
        votes = torch.tensor(self._ending.votes(), dtype=torch.int64, device=self._pipeline.device)
        dist.all_reduce(votes)
        signalled, out_of_time = map(bool, votes.tolist())
        if signalled or out_of_time:
            raise EvaluationStopped((signalled, out_of_time))

    def measure(
        self,
        step_func: ForwardStepCallable | None = None,
        progress: Callable[[int], None] = lambda samples: None,
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Measure losses and exact match over the samples. Collective over all ranks.

        Losses are those of `step_func`, reduced as in training; a custom step, or a task other than sft, takes a second
        forward pass for exact match. Of pairs, the chosen answers are predicted.

        An answer matches exactly if greedy decoding gives the true answer to its last token. By induction that holds if
        and only if the most likely token after every true prefix is the true one. So one pass over the true sequence
        decides it.

        Args:
            step_func: as the schedule calls it; None: the cross entropy of the learned tokens.
            progress: called with the number of samples of each finished batch.

        Raises:
            TooManyBadSamples: more samples are bad than `data.max_bad_samples` allows, on every rank; a rank that finds
                too many alone raises earlier.
            EvaluationStopped: a rank was asked to end the run; checked between two batches, also of generated texts.

        Returns:
            {"eval/loss": what training minimises (nats per answer token), "eval/exact_match": share of samples,
                "eval/samples": their number}, and `eval/VALUE` for each value that a custom step or a task reports. The
                prefix is `eval/NAME/` for a named set, `test/` for the test set. NaN if no sample has a token with
                loss. And the predictions of `predictions_of`, in the order of the samples. Both are empty on ranks
                before the language model's last stage.
        """
        pipeline = self._pipeline
        sums, predict = torch.zeros(4, dtype=torch.float64, device=pipeline.device), PredictStep(pipeline)
        bad = torch.zeros((), dtype=torch.int64, device=pipeline.device)
        losses = None
        if step_func is not None and not (self._writes_text and is_default_step(step_func, self._run.cfg)):
            losses = CallerLosses(step_func, pipeline, self._run.cfg)
        predictions = list[dict[str, Any]]()
        iterator = self._open(self._ending)
        try:
            with evaluating(pipeline.model):
                for _ in range(self.steps):
                    if iterator.advance() is None:
                        raise EvaluationStopped(iterator.ended_by)
                    # The last step may wrap around to the first samples.
                    bad += torch.count_nonzero(iterator.bad[: max(self.samples - iterator.current.first_sample, 0)])
                    if losses is not None:
                        losses.run(iterator, self.samples)
                        if pipeline.is_last_stage and not self._writes_text:
                            sums[3] += iterator.answered()
                        iterator.rewind()
                    if self._writes_text:
                        collected = pipeline.run(predict, iterator, forward_only=True, collect_non_loss_data=True)
                        for every_answer in collected if pipeline.is_last_stage else ():
                            microbatch = _first_answers(every_answer, self.dataset.answers)
                            sums += _score(microbatch, self.samples)
                            predictions += predictions_of(microbatch, self.samples, self._tokenizer)
                    progress(min(self.samples - iterator.current.first_sample, iterator.current.size))
        finally:
            iterator.close()
        if int(bad) and self._report is not None:  # the same on every rank
            self._report(self.dataset.bad_samples, "held_out")
        require_budget(int(bad), self.dataset.allowed_bad_samples, self.dataset.bad_samples.latest)
        if not pipeline.is_last_stage:
            return {}, []
        replicas = pipeline.groups.collections[LANGUAGE].dp
        dist.all_reduce(sums, group=replicas)
        of_replicas: list[Any] = [None] * replicas.size()
        dist.all_gather_object(of_replicas, predictions, group=replicas)
        entries = [entry for of_replica in of_replicas for entry in of_replica]
        entries.sort(key=lambda entry: entry["number"])
        loss, tokens, matches, samples = sums.tolist()
        values = {"loss": loss / tokens if tokens else math.nan} if losses is None else losses.means()
        if self._writes_text:
            values["exact_match"] = matches / samples if samples else math.nan
        values["samples"] = samples
        return {f"{self.prefix}{name}": value for name, value in values.items()}, entries

    def non_loss_data(self, step_func: Callable, give: Callable[[list], Any] | None = None) -> Any:
        """Return `give(model)`, or else the non-loss data of `step_func` over the first held-out step, in evaluation
        mode. Collective over all ranks."""
        pipeline = self._pipeline
        with evaluating(pipeline.model):
            if give is not None:
                return give(pipeline.model)
            iterator = self(all_logits=True)
            try:
                iterator.advance()
                return pipeline.run(step_func, iterator, forward_only=True, collect_non_loss_data=True)
            finally:
                iterator.close()


def open_held_out(
    run: Run,
    pipeline: Pipeline,
    tokenizer: Tokenizer,
    features: Features | None = None,
    ending: Ending | None = None,
    taught_set: Callable[[Samples, HeldOutSet], Any] | None = None,
) -> tuple[HeldOut, ...]:
    """Open all held-out sets, the test sets last; evaluations of the first write samples.json. Collective.

    Raises:
        UserError: a metric cannot be computed, or the model generates no text.
    """
    sets = held_out_sets(run.cfg)
    text = not sets or predicts_text(run.cfg, pipeline)
    for of in sets:
        require_metrics(of.metrics, of.metrics_key)
        if of.metrics and not text:
            raise UserError(f"{of.metrics_key}: {no_text(run.cfg)}. Remove it")
    options: dict[str, Any] = {"ending": ending, "writes_text": text, "taught_set": taught_set}
    return tuple(HeldOut(run, pipeline, tokenizer, features, of, shows=of is sets[0], **options) for of in sets)


@contextlib.contextmanager
def evaluating(model: list) -> Iterator[None]:
    """Set chunks to evaluation mode, without gradients, and restore their mode and the random state at the end. So a
    run that resumes from the checkpoint before the evaluation draws the same numbers."""
    before, modes = devices.get_rng_state(), [chunk.training for chunk in model]
    for chunk in model:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk, is_training in zip(model, modes, strict=True):
            chunk.train(is_training)
        devices.set_rng_state(before)


def _first_answers(microbatch: dict[str, Any], answers: int) -> dict[str, Any]:
    """Return a microbatch with the rows of each sample's first answer, the chosen one of a pair, out of `answers`."""
    rows = answers * len(microbatch["sample_numbers"])
    return {
        key: value[::answers] if isinstance(value, torch.Tensor | list) and len(value) == rows else value
        for key, value in microbatch.items()
    }


def _score(microbatch: dict[str, Any], samples: int) -> torch.Tensor:
    """Return [sum of losses, tokens, exact matches, samples] over samples below number `samples`."""
    real = (microbatch["sample_numbers"] < samples).to(microbatch["loss_mask"].device)
    mask = microbatch["loss_mask"] * real[:, None]
    learned = mask > 0
    answered = learned.any(dim=1)
    right = ((microbatch["predicted"] == microbatch["labels"]) | ~learned).all(dim=1) & answered
    loss = (microbatch["losses"] * mask).sum()
    return torch.stack([loss, mask.sum(), right.sum(), answered.sum()]).double()


TOTAL = "loss"
"""Name of the loss that training minimises; a loss of the caller with this name replaces it."""


def is_default_step(step_func: ForwardStepCallable, cfg: ConfigContainer) -> bool:
    """True if the loss of `step_func`, as the schedule calls it, is the cross entropy of the learned tokens."""
    steps = forward_step.gpt_forward_step, forward_step.mimo_forward_step
    return cfg.train.task == "sft" and getattr(step_func, "func", step_func) in steps


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

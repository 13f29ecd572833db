"""Held-out loss, exact match of answers, and samples for the report."""

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from data.pipeline import GivesUp, TokenDataset, never, require_budget
from data.storage.replace import replacing
from data.tokens import Tokenizer
from mimo_train.config.parts import LANGUAGE
from mimo_train.evaluation.bad_sample_report import BadSampleReport
from mimo_train.evaluation.greedy import PredictStep, greedy_answers, true_answer
from mimo_train.evaluation.predictions import FILE as PREDICTIONS
from mimo_train.evaluation.predictions import predictions_of, write_predictions
from mimo_train.evaluation.shown_media import shown_media
from mimo_train.plan.inputs import HeldOutSet, build_dataset, held_out_sets
from mimo_train.plan.padding import padding_of_documents
from mimo_train.plan.run import Run
from mimo_train.step.batches import StepIterator, open_loader
from mimo_train.step.feature_cache import Features
from mimo_train.step.schedule import Pipeline

_logger = logging.getLogger(__name__)

SHOWN_TOKENS = 24
"""Longest answer that the report's samples are decoded to."""


class EvaluationGivenUp(Exception):
    """The run is to end, and the samples of an evaluation have not come; raised on all ranks alike."""


class Ending(NamedTuple):
    """How an evaluation hears that the run is to end."""

    gives_up: GivesUp = never
    """See `StepLoader`."""
    votes: Callable[[], tuple[bool, bool]] | None = None
    """See `StepIterator`."""


class HeldOut:
    """The samples of a held-out set, all or the first `train.eval_samples`, and evaluations on them."""

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
    ):
        """
        Args:
            features: lookups of cached features of frozen encoders.
            of: the set; default: the run's first.
            shows: whether its evaluations write samples.json.
            ending: what ends an evaluation that waits for its samples; default: nothing.
        """
        of = of or held_out_sets(run.cfg)[0]
        self._run, self._pipeline, self._tokenizer, self._ending = run, pipeline, tokenizer, ending or Ending()
        self._prefix, self._shows = f"eval/{of.name}/" if of.name else "eval/", shows
        self._predictions = f"predictions_{of.name}.jsonl" if of.name else PREDICTIONS
        self.dataset = build_dataset(run.cfg, tokenizer, held_out=of)
        apart = run.cfg.data.separate_documents and isinstance(self.dataset, TokenDataset)
        self._padding = padding_of_documents(run.cfg) if apart else None
        if features is not None:
            features.serve(self.dataset)
        self._report: BadSampleReport | None = None
        wanted = run.cfg.train.eval_samples or len(self.dataset)
        self.samples = min(wanted, len(self.dataset))
        self.steps = math.ceil(self.samples / run.batch.global_batch_size)

    def tell_of_bad_samples_by(self, report: BadSampleReport) -> None:
        """Who tells people of held-out samples that cannot be read, after each evaluation."""
        self._report = report
        report.adopt(self.dataset.bad_samples, "held_out")

    def __call__(self, *, all_logits: bool = False) -> StepIterator:
        """Open an iterator over the samples.

        Args:
            all_logits: whether the model gives logits everywhere, also with `train.logits=learned`.
        """
        return self._open(Ending(), all_logits=all_logits)

    def _open(self, ending: Ending, *, all_logits: bool = False) -> StepIterator:
        loader = open_loader(
            self._run,
            self._pipeline.groups,
            self.dataset,
            consumed=0,
            steps=self.steps,
            padding=self._padding,
            gives_up=ending.gives_up,
        )
        learned = self._run.cfg.train.logits == "learned" and not all_logits
        return StepIterator(loader, self._pipeline, learned_logits=learned, votes=ending.votes)

    def evaluate(self, step: int = 0) -> dict[str, float]:
        """Loss and exact match over the samples; on the logging rank, samples.json and predictions.jsonl (of a
        set with a name predictions_NAME.jsonl) too. Collective over all ranks.

        An answer matches exactly when greedy decoding gives the true answer to the last token. That is so
        if and only if the most likely token after every true prefix is the true one (by induction over the answer), so
        one pass over the true sequence decides it. The answers in `samples.json` are really decoded.

        Args:
            step: optimizer steps done, for the files.

        Raises:
            TooManyBadSamples: more of the samples are bad than `data.max_bad_samples` allows, on every rank alike; a
                rank that has found too many by itself raises earlier.
            EvaluationGivenUp: the run is to end, and a rank has waited for samples in vain.

        Returns:
            {"eval/loss": nats per answer token, "eval/exact_match": share of samples, "eval/samples": their number},
            of a set with a name `eval/NAME/loss` and so on; NaN where no held-out sample has a token with loss; empty
            on ranks before the language model's last stage.
        """
        pipeline = self._pipeline
        sums, predict = torch.zeros(4, dtype=torch.float64, device=pipeline.device), PredictStep(pipeline)
        bad = torch.zeros((), dtype=torch.int64, device=pipeline.device)
        run, shown, predictions = self._run, list[dict](), list[dict]()
        # Each replica of the language model decodes its own samples; one writes them.
        wanted = run.cfg.train.report_samples if self._shows else 0
        of_step = run.batch.global_batch_size // run.layout.language.dp
        iterator = self._open(self._ending)
        try:
            with _evaluating(pipeline.model):
                for index in range(self.steps):
                    if iterator.advance() is None:
                        raise EvaluationGivenUp
                    # The last step may begin again with the first samples.
                    bad += torch.count_nonzero(iterator.bad[: max(self.samples - iterator.current.first_sample, 0)])
                    collected = pipeline.run(predict, iterator, forward_only=True, collect_non_loss_data=True)
                    for microbatch in collected if pipeline.is_last_stage else ():
                        sums += _score(microbatch, self.samples)
                        predictions += predictions_of(microbatch, self.samples, self._tokenizer)
                    if index * of_step < wanted:  # on every rank alike
                        shown += self._answered(iterator)
        finally:
            iterator.close()
        if wanted > 0 and dist.get_rank() == run.layout.logging_rank:
            _write_samples(run.dir / "samples.json", shown[:wanted])
        if int(bad) and self._report is not None:  # on every rank alike
            self._report(self.dataset.bad_samples, "held_out")
        require_budget(int(bad), self.dataset.allowed_bad_samples, self.dataset.bad_samples.latest)
        if not pipeline.is_last_stage:
            return {}
        replicas = pipeline.groups.collections[LANGUAGE].dp
        dist.all_reduce(sums, group=replicas)
        of_replicas: list[Any] = [None] * replicas.size()
        dist.all_gather_object(of_replicas, predictions, group=replicas)
        if dist.get_rank() == run.layout.logging_rank:
            entries = [entry for of_replica in of_replicas for entry in of_replica]
            write_predictions(run.dir / self._predictions, entries, step, self.dataset)
        loss, tokens, matches, samples = sums.tolist()
        return {
            f"{self._prefix}loss": loss / tokens if tokens else math.nan,
            f"{self._prefix}exact_match": matches / samples if samples else math.nan,
            f"{self._prefix}samples": samples,
        }

    def non_loss_data(self, step_func: Callable, give: Callable[[list], Any] | None = None) -> Any:
        """The result of `give(model)`, or without `give` of a forward pass over the first held-out step, in evaluation
        mode. Collective over all ranks.

        Args:
            step_func: as the schedule calls it; its loss functions are called with non_loss_data=True.
        """
        pipeline = self._pipeline
        with _evaluating(pipeline.model):
            if give is not None:
                return give(pipeline.model)
            iterator = self(all_logits=True)
            try:
                iterator.advance()
                return pipeline.run(step_func, iterator, forward_only=True, collect_non_loss_data=True)
            finally:
                iterator.close()

    def _answered(self, iterator: StepIterator) -> list[dict]:
        """Media, questions, greedy answers and truths of the current step's samples, those of this rank's replica;
        empty on all ranks but the logging one. Collective over all ranks."""
        answers = greedy_answers(self._pipeline, self._tokenizer, iterator, SHOWN_TOKENS, keep_ends=True)
        found, ends = list[dict](), self._tokenizer.template.stop_ids
        if dist.get_rank() != self._run.layout.logging_rank:
            return found
        for number, ids in answers:
            if number >= self.samples or self.dataset.is_bad(number):
                continue
            question, _ = self.dataset.prompt_and_truth(number)
            # Not the record's text: a chat template may write more, or less, of an answer.
            true_ids = true_answer(self.dataset.read_text(number)[0])
            truth = self._tokenizer.decode(true_ids).strip()
            answer = self._tokenizer.decode(ids).strip()
            # Nobody knows how one goes on that was cut, here or by `data.sequence_length`.
            is_whole = all(one and one[-1] in ends for one in (ids, true_ids))
            words: dict[str, Any] = {"question": question, "answer": answer, "truth": truth}
            words["correct"] = answer == truth if is_whole else None
            found.append(shown_media(self.dataset, number) | words)
        return found


def open_held_out(
    run: Run,
    pipeline: Pipeline,
    tokenizer: Tokenizer,
    features: Features | None = None,
    ending: Ending | None = None,
) -> tuple[HeldOut, ...]:
    """All held-out sets of a run; the first one's evaluations write samples.json."""
    sets = enumerate(held_out_sets(run.cfg))
    return tuple(
        HeldOut(run, pipeline, tokenizer, features, one, shows=not number, ending=ending) for number, one in sets
    )


def _write_samples(path: Path, shown: list[dict]) -> None:
    """Where the file cannot be written, that is said: no run ends for it."""
    try:
        with replacing(path) as file:
            file.write(json.dumps(shown).encode())
    except OSError as error:
        _logger.warning("%s cannot be written (%s): training goes on without it", path, error)


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

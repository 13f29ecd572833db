"""Tasks of lmms-eval 0.7 on a backend of ours, through its `simple_evaluate` in this process."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from lmms_eval.api.instance import GenerationResult, Instance
from lmms_eval.api.model import lmms
from lmms_eval.api.task import ConfigurableTask
from lmms_eval.evaluator import simple_evaluate
from lmms_eval.loggers import EvaluationTracker
from lmms_eval.tasks import TaskManager, get_task_dict
from lmms_eval.utils import get_datetime_str
from loguru import logger
from tenacity import RetryError
from tqdm import tqdm

from encoders.key_rules import nearest
from mimo_train.config.errors import UserError
from mimo_train.evaluation.benchmarks.requests import LOCAL, Decoding, Request, decoding_of, request_of

SCORED = ("loglikelihood", "multiple_choice")
"""Types of tasks that compare probabilities of answers; lmms-eval has them in its simple form of requests only."""


class Backend(Protocol):
    """Answers requests; see `ModelAnswers`."""

    def answer(
        self, requests: Sequence[Request], decoding: Decoding, done: Callable[[int], Any] = ...
    ) -> list[str]: ...

    def score(
        self, pairs: Sequence[tuple[Request, str]], done: Callable[[int], Any] = ...
    ) -> list[tuple[float, bool]]: ...


class MimoTrain(lmms):
    """A backend as a model of lmms-eval."""

    is_simple = False
    accelerator = None
    """lmms-eval makes one where it is missing."""

    def __init__(self, backend: Backend):
        super().__init__()
        self._backend = backend

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Answer the messages of documents."""
        groups: dict[Decoding, list[int]] = {}
        for at, request in enumerate(requests):
            groups.setdefault(decoding_of(request.args[2]), []).append(at)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="answers", disable=_rank() > 0) as bar:
            for decoding, places in groups.items():
                chats = _Lazy([requests[at] for at in places], self._chat)
                for at, text in zip(places, self._backend.answer(chats, decoding, bar.update), strict=True):
                    texts[at] = decoding.cut(text)
        return texts

    def loglikelihood(self, requests: list[Instance]) -> list[GenerationResult]:
        """Score continuations of a context, which is a user's message with the document's media. lmms-eval 0.7.3 makes
        a string of a pair that is not inside a result."""
        with tqdm(total=len(requests), desc="scores", disable=_rank() > 0) as bar:
            scores = self._backend.score(_Lazy(requests, self._scored), bar.update)
        return [GenerationResult(score) for score in scores]

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        """Raise UserError: no document of such a task is one conversation."""
        raise UserError("tasks of several rounds are not supported. Leave it out")

    def _chat(self, request: Instance) -> Request:
        _, to_messages, _, doc_id, task, split = request.args
        return request_of(to_messages(self.task_dict[task][split][doc_id]))

    def _scored(self, request: Instance) -> tuple[Request, str]:
        context, continuation, to_visual, doc_id, task, split = request.args
        document = self.task_dict[task][split][doc_id]
        text = continuation if isinstance(continuation, str) else continuation(document)
        visuals = to_visual(document) if callable(to_visual) else to_visual
        content = [{"type": _kind(visual), "url": visual} for visual in visuals or ()]
        return request_of([{"role": "user", "content": [*content, {"type": "text", "text": context}]}]), text


class _Lazy(Sequence[Any]):
    """What `read` makes of items when one is taken: the media of all documents do not fit into memory."""

    def __init__(self, items: Sequence[Instance], read: Callable[[Instance], Any]):
        self._items, self._read = items, read

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, at: Any) -> Any:
        return self._read(self._items[at])


def _kind(visual: Any) -> str:
    return "audio" if isinstance(visual, dict) else "video" if isinstance(visual, str) else "image"


def run_tasks(
    names: Sequence[str],
    backend: Backend,
    *,
    local: ConfigurableTask | None = None,
    include_path: str = "",
    limit: int | None = None,
    output_path: str = "",
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Evaluate tasks, each by itself. Collective; every rank gives the same arguments.

    Args:
        names: tasks, groups or tags of lmms-eval or of `include_path`, or `shards`.
        local: the task `shards`, which has its own limit.
        include_path: folder with further tasks.
        limit: documents of each task; None: all.
        output_path: folder for results and samples in lmms-eval's files; empty: none.

    Returns:
        Values of metrics by task, with those of the members of a group; and why tasks failed, by name.
    """
    _log_warnings()
    manager = TaskManager("ERROR", include_path=include_path or None)
    model, values, failed = MimoTrain(backend), dict[str, dict[str, float]](), dict[str, str]()
    for name in names:
        task = local if name == LOCAL and local is not None else name
        with _errors_logged() as logged:
            try:
                of_task = _values(_evaluate(task, model, manager, None if task is local else limit, output_path))
                values |= of_task
                if not any(of_task.values()):
                    failed[name] = "it has no value of any metric"
            except Exception as error:  # of a task's own code and data
                failed[name] = _reason(error)
        if logged and name not in failed:
            failed[name] = f"lmms-eval reported errors, so its values may be wrong: {logged[0]}"
    results: list[Any] = [values, {name: " ".join(reason.split()) for name, reason in failed.items()}]
    if _several():
        dist.broadcast_object_list(results)  # the other ranks have no metrics
    return results[0], results[1]


def _evaluate(
    task: str | ConfigurableTask, model: MimoTrain, manager: TaskManager, limit: int | None, output_path: str
) -> dict[str, Any]:
    """Return lmms-eval's results of a task; those of rank 0 are complete."""
    if isinstance(task, str) and task not in manager.task_index:
        raise UserError(f"lmms-eval has no such task. {nearest(task, manager.all_tasks)}, or give --include-path")
    model.is_simple = isinstance(task, str) and _is_scored(task, manager)
    if _several():
        _load_on_first_rank(task, model, manager)
    with _as_one_process():
        results = simple_evaluate(
            model,
            tasks=[task],
            task_manager=manager,
            limit=limit,
            predict_only=_rank() > 0,  # rank 0 computes metrics; some ask paid judges
            verbosity="ERROR",
            datetime_str=f"{get_datetime_str()}_{task if isinstance(task, str) else LOCAL}",
        )
    samples = results.pop("samples")
    if output_path and _rank() == 0:
        _save(results, samples, Path(output_path))
    return results


def _save(results: dict[str, Any], samples: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """Write lmms-eval's two files of a task."""
    tracker = EvaluationTracker(str(folder))
    tracker.general_config_tracker.log_experiment_args("mimo_train", "model=mimo_train", None, None, False)
    date = results["date"]
    tracker.save_results_aggregated(results=results, samples=samples, datetime_str=date)
    for name, of_task in samples.items():
        tracker.save_results_samples(task_name=name, samples=of_task)
    if not next(folder.rglob(f"{date.replace(':', '-')}_results.json"), None):
        raise UserError(f"--output-path: lmms-eval could not write its results to {folder}")


def _is_scored(name: str, manager: TaskManager) -> bool:
    entry = manager.task_index[name]
    members = entry.get("task") if entry["type"] == "tag" else manager._get_config(name).get("task")
    if isinstance(members, list):
        return any(isinstance(member, str) and _is_scored(member, manager) for member in members)
    return manager._get_config(name).get("output_type") in SCORED


def _load_on_first_rank(task: str | ConfigurableTask, model: MimoTrain, manager: TaskManager) -> None:
    """Load a task's data on rank 0, so that its error is one on all ranks; simple_evaluate has a barrier behind it."""
    reason: list[str] = [""]
    if _rank() == 0:
        try:
            get_task_dict([task], manager, "simple" if model.is_simple else "chat")
        except Exception as error:
            reason = [_reason(error)]
    dist.broadcast_object_list(reason)
    if reason[0]:
        raise UserError(reason[0])


def _reason(error: Exception) -> str:
    """Return the reason of an error of a task, which lmms-eval's retries may have wrapped."""
    while isinstance(error, RetryError) and isinstance(error.last_attempt.exception(), Exception):
        error = error.last_attempt.exception()
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _values(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the numbers of each task by metric, and by the filter of answers if it has a name."""
    return {
        name: {
            metric.removesuffix(",none"): float(value)
            for metric, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for name, metrics in results["results"].items()
    }


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


@contextlib.contextmanager
def _as_one_process() -> Iterator[None]:
    """Hide the job's other ranks from lmms-eval, which would deal documents and gather results its own way."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ |= before


def _log_warnings() -> None:
    logger.remove()
    logger.add(sys.stderr, level="WARNING" if _rank() == 0 else "CRITICAL")


@contextlib.contextmanager
def _errors_logged() -> Iterator[list[str]]:
    """Collect what lmms-eval and its tasks log as errors: many go on after one, with a score of 0."""
    errors: list[str] = []
    sink = logger.add(lambda message: errors.append(message.record["message"]), level="ERROR")
    try:
        yield errors
    finally:
        logger.remove(sink)

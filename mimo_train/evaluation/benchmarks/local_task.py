"""A task of lmms-eval over samples of a run: its exact match is that of a held-out evaluation."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from datasets import Dataset, DatasetDict
from lmms_eval.api.task import ConfigurableMessagesTask

from data.errors import SampleError
from data.samples.bad_samples import require_budget
from data.samples.originals import read_conversation, read_originals
from data.samples.shard_dataset import ShardDataset
from mimo_train.evaluation.benchmarks.requests import LOCAL, messages_of


class _LocalTask(ConfigurableMessagesTask):
    def __init__(self, documents: list[dict[str, Any]], config: dict[str, Any]) -> None:
        self._documents = documents
        super().__init__(config=config)

    def download(self, dataset_kwargs: dict[str, Any] | None = None) -> None:
        self.dataset = self.dataset_no_image = DatasetDict({"test": Dataset.from_list(self._documents)})


def local_task(samples: ShardDataset, count: int) -> ConfigurableMessagesTask:
    """Return a task with a document for each learned turn of the first `count` samples, after the true turns before.

    Its metrics are `exact_match`, the share of samples whose turns all have the true text, and `turn_exact_match`.
    Images are those of the shards; a video is a file or a series of images, as in training.

    Raises:
        TooManyBadSamples: more samples are bad than `data.max_bad_samples` allows.
    """

    # Functions and no methods: lmms-eval copies a task's config with all that it refers to.
    def doc_to_messages(document: dict[str, Any]) -> list[dict[str, Any]]:
        number = document["sample"]
        return messages_of(read_conversation(samples, number), read_originals(samples, number))[: document["turn"]]

    def process_results(document: dict[str, Any], answers: Sequence[str]) -> dict[str, Any]:
        right = answers[0] == document["target"].strip()
        return {"exact_match": (document["sample"], right), "turn_exact_match": right}

    documents = list(_documents(samples, count))
    config = {
        "task": LOCAL,
        "test_split": "test",
        "doc_to_text": "question",
        "doc_to_target": "target",
        "doc_to_messages": doc_to_messages,
        "process_results": process_results,
        "output_type": "generate_until",
        "generation_kwargs": {"until": [], "do_sample": False},
        "metric_list": [
            {"metric": "exact_match", "aggregation": _all_turns, "higher_is_better": True},
            {"metric": "turn_exact_match", "aggregation": "mean", "higher_is_better": True},
        ],
    }
    return _LocalTask(documents, config)


def _documents(samples: ShardDataset, count: int) -> Iterator[dict[str, Any]]:
    bad = 0
    for number in range(count):
        try:
            conversation = read_conversation(samples, number)
            read_originals(samples, number)  # damaged media are bad samples, as in training
        except SampleError:
            bad += 1
            require_budget(bad, samples.allowed_bad_samples)
            continue
        for at, turn in enumerate(conversation.turns):
            if turn.is_learned:
                question = conversation.question_before(at)
                yield {"sample": number, "turn": at, "question": question, "target": turn.text}


def _all_turns(items: Sequence[tuple[int, bool]]) -> float:
    """Return the share of samples whose turns are all right."""
    samples: dict[int, bool] = defaultdict(lambda: True)
    for sample, right in items:
        samples[sample] &= right
    return sum(samples.values()) / len(samples)

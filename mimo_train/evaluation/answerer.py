"""Texts that the replicas of a model generate: answers to the turns of samples, and to the prompts of a file."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data.samples.protocol import Samples
from data.storage.files import replacing
from data.text.tokens import Tokenizer
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.evaluation.generation.answers import Answer, Answers
from mimo_train.evaluation.generation.decoder import Decoder
from mimo_train.evaluation.generation.options import Sampling
from mimo_train.evaluation.generation.prompts import Prompts
from mimo_train.evaluation.prompt_file import PromptFile
from mimo_train.evaluation.turns import turn_prompts
from mimo_train.training.step.pipeline import Pipeline

NO_ROOM = "cut after 0 tokens, the prompt fills data.sequence_length"
CHUNK = 128
"""Prompts of a replica that are sorted by length together."""


class Answerer:
    """Generates texts on every replica of a model."""

    def __init__(
        self, cfg: ConfigContainer, pipeline: Pipeline, tokenizer: Tokenizer, sampling: Sampling, max_new_tokens: int
    ):
        """Set the model to evaluation mode. Raises UserError if its layout cannot decode."""
        self.answers = Answers(cfg, Decoder(pipeline), tokenizer, sampling, max_new_tokens)
        self.prompts = Prompts(cfg, tokenizer)
        self.group = pipeline.groups.collections[LANGUAGE].dp

    def share[Item](self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the items of this rank's replica."""
        return items[self.group.rank() :: self.group.size()]

    def gather[Value](self, values: Any) -> list[Any]:
        """Return the values of all replicas. Collective."""
        of_replicas: list[Any] = [None] * self.group.size()
        dist.all_gather_object(of_replicas, values, group=self.group)
        return of_replicas

    def of_turns(
        self,
        dataset: Samples,
        entries: Sequence[Mapping[str, Any]],
        progress: Callable[[int], None],
        before_chunk: Callable[[], None] = lambda: None,
    ) -> dict[tuple[int, int], Answer]:
        """Return an answer to each turn, by sample number and turn. Collective over the replicas.

        An answer is empty if the prompt fills `data.sequence_length`.

        Args:
            entries: the turns, of `predictions_of`; the same on every rank.
            progress: called with the number of prompts of each finished chunk, over all replicas.
            before_chunk: called as often on every rank; it may be collective.
        """
        turns: dict[int, list[int]] = {}
        for entry in entries:
            turns.setdefault(entry["number"], []).append(entry["turn"])
        done: dict[tuple[int, int], Answer] = {}
        numbers, replicas = list(turns), self.group.size()
        prompts = chain.from_iterable(
            turn_prompts(dataset, self.prompts, number, turns[number]) for number in self.share(numbers)
        )
        counts = [sum(len(turns[number]) for number in numbers[replica::replicas]) for replica in range(replicas)]
        for begin in range(0, max(counts), CHUNK):
            before_chunk()
            chunk = list(islice(prompts, CHUNK))
            answered = [each for each in chunk if self.answers.has_room(each.prompt)]
            # Numbers of draws, so that a seed draws the same texts at every layout.
            draws = [(each.number << 10) + each.turn for each in answered]
            answers = self.answers.batch([each.prompt for each in answered], draws)
            done |= {(each.number, each.turn): Answer([], "", NO_ROOM) for each in chunk}
            done |= {(each.number, each.turn): answer for each, answer in zip(answered, answers, strict=True)}
            progress(sum(min(max(count - begin, 0), CHUNK) for count in counts))
        return {key: answer for part in self.gather(done) for key, answer in part.items()}


def answer_prompts(
    file: PromptFile,
    answerer: Answerer,
    out: Path,
    facts: Mapping[str, Any],
    *,
    continues: bool,
    progress: Callable[[int], None],
) -> None:
    """Write each record with its `prediction` to `out`, in order. Collective over all ranks, which are replicas.

    The answers so far are in a file next to it. The same command continues from there.

    Args:
        facts: what the answers depend on besides the prompts.
        continues: see `PromptFile.prompt`.

    Raises:
        UserError: see `PromptFile.prompt`; or a prompt leaves no room for an answer.
        OSError: a file cannot be written.
    """
    identity = hashlib.sha256(file.raw + json.dumps(facts, sort_keys=True).encode()).hexdigest()
    partial, is_first = out.with_name(f"{out.name}.partial"), dist.get_rank() == 0
    lines = _lines_so_far(partial, identity) if is_first else []
    if is_first:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(partial) as file_so_far:
            file_so_far.write("".join([f"{identity}\n", *lines]).encode())
    begin: list[Any] = [len(lines)]
    dist.broadcast_object_list(begin, src=0)
    progress(begin[0])
    chunk = CHUNK * answerer.group.size()
    for first in range(begin[0], len(file.records), chunk):
        numbers = range(first, min(first + chunk, len(file.records)))
        local = answerer.share(numbers)
        prompts = [file.prompt(at, answerer.prompts, continues) for at in local]
        answers = dict(zip(local, answerer.answers.batch(prompts, local), strict=True))
        all_answers = {at: answer for part in answerer.gather(answers) for at, answer in part.items()}
        if is_first:
            new_lines = [_line(file.records[at][1], all_answers[at]) for at in numbers]
            with partial.open("a") as stream:
                stream.write("".join(new_lines))
            lines += new_lines
        progress(len(numbers))
    if is_first:
        with replacing(out) as complete:
            complete.write("".join(lines).encode())
        partial.unlink()


def _line(record: Mapping[str, Any], answer: Answer) -> str:
    cut = {"cut": answer.cut} if answer.cut else {}
    return json.dumps({**record, "prediction": answer.text, **cut}) + "\n"


def _lines_so_far(partial: Path, identity: str) -> list[str]:
    """Return the complete lines of an interrupted command with the same prompts, model and settings."""
    try:
        first, *lines = partial.read_text().splitlines(keepends=True)
    except (OSError, ValueError):
        return []
    return [line for line in lines if line.endswith("\n")] if first.strip() == identity else []

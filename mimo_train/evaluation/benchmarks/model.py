"""Answers of a model on this job's processes to requests of tasks.

Every rank has all requests, answers those of its replica, and gets the answers of all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from data.text.tokens import Tokenizer
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.evaluation.benchmarks.requests import Decoding, Request
from mimo_train.evaluation.generation.answers import Answers
from mimo_train.evaluation.generation.decoder import Decoder
from mimo_train.evaluation.generation.prompts import Prompt, Prompts
from mimo_train.training.step.pipeline import Pipeline

BATCH = 64
"""Prompts of a replica at a time, of which those of similar lengths are decoded together."""


class ModelAnswers:
    """Answers with our prompts and our decoder."""

    def __init__(self, cfg: ConfigContainer, pipeline: Pipeline, tokenizer: Tokenizer):
        self._cfg, self._tokenizer, self._prompts = cfg, tokenizer, Prompts(cfg, tokenizer)
        self._decoder, self._replicas = Decoder(pipeline), pipeline.groups.collections[LANGUAGE].dp

    def answer(
        self, requests: Sequence[Request], decoding: Decoding, done: Callable[[int], Any] = lambda count: None
    ) -> list[str]:
        """Return the texts of answers, in order. Collective; every rank gives the same requests.

        Args:
            done: called with the number of requests of each finished batch, over all replicas.

        Raises:
            UserError: a request has media that the model does not read, or leaves no room for an answer.
        """
        most = decoding.max_new_tokens or self._cfg.data.sequence_length
        answers = Answers(self._cfg, self._decoder, self._tokenizer, decoding.sampling, most)

        def texts(numbers: Sequence[int]) -> list[str]:
            return [each.text for each in answers.batch([self._prompt(requests[at]) for at in numbers], numbers)]

        return self._of_replicas(len(requests), texts, done)

    def score(
        self, pairs: Sequence[tuple[Request, str]], done: Callable[[int], Any] = lambda count: None
    ) -> list[tuple[float, bool]]:
        """Return for each pair of a request and a text the log-probability (nats) of an answer that begins with the
        text, and True if greedy decoding writes it. Collective; every rank gives the same pairs.

        Args:
            done: see `answer`.

        Raises:
            UserError: see `answer`; or a text does not fit into the model's sequences.
        """
        return self._of_replicas(len(pairs), lambda numbers: [self._score(*pairs[at]) for at in numbers], done)

    def _score(self, request: Request, continuation: str) -> tuple[float, bool]:
        prompt, length = self._prompt(request), self._cfg.data.sequence_length
        tokens, total, is_greedy = self._tokenizer.encode(continuation), 0.0, True
        if (needed := len(prompt.ids) + len(tokens)) > length:
            raise UserError(f"a prompt and its answer take {needed} tokens, and data.sequence_length is {length}")
        (logits_V,) = self._decoder.begin([prompt], len(prompt.ids) + len(tokens))
        for number, token in enumerate(tokens):
            total += float(torch.log_softmax(logits_V.double(), 0)[token])
            is_greedy &= int(logits_V.argmax()) == token
            if number + 1 < len(tokens):
                (logits_V,) = self._decoder.step([token])
        return total, is_greedy

    def _of_replicas[Value](
        self, count: int, values_of: Callable[[Sequence[int]], list[Value]], done: Callable[[int], Any]
    ) -> list[Value]:
        """Return the values of numbers 0 to `count`, of which every replica computes a part. Raises UserError on all of
        them if one fails."""
        size, rank = self._replicas.size(), self._replicas.rank()
        values: list[Any] = [None] * count
        for first in range(0, count, BATCH * size):
            error, of_rank = "", list[Value]()
            try:
                of_rank = values_of(range(first + rank, min(first + BATCH * size, count), size))
            except Exception as fault:  # of one replica: the others wait for its values
                error = str(fault) if isinstance(fault, UserError) else f"{type(fault).__name__}: {fault}"
            parts: list[Any] = [None] * size
            dist.all_gather_object(parts, (error, of_rank), group=self._replicas)
            for at, (error, of_replica) in enumerate(parts):
                if error:
                    raise UserError(error)
                values[first + at : first + BATCH * size : size] = of_replica
            done(sum(len(of_replica) for _, of_replica in parts))
        return values

    def _prompt(self, request: Request) -> Prompt:
        media = [self._prompts.medium_of(kind, raw, f"{kind} of a document") for kind, raw in request.files]
        if not self._cfg.encoders and self._tokenizer.template.is_own and len(request.turns) == 1:
            return self._prompts.of_text(request.turns[0].text)  # as `generate` reads a plain text model's prompt
        return self._prompts.of_conversation(request.turns, media)

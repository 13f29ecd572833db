"""Answers of a model: sampling of tokens, streaming of text, the loop over new tokens, and a chat.

Shape suffixes: V vocabulary, K tokens kept by top-k and top-p, the most likely first.
"""

import itertools
import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch

from data.records.conversation import Part, Turn
from data.text.tokens import Tokenizer
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.evaluation.generation.options import Sampling
from mimo_train.evaluation.generation.prompts import Medium, Prompt, Prompts, user_turn

if TYPE_CHECKING:
    from mimo_train.evaluation.generation.decoder import Decoder


class TextStream:
    """Writes the text of an answer in pieces, which join to `tokenizer.decode(tokens).strip()`. It holds back trailing
    white space and incomplete characters until the next tokens decide."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], None]):
        """`write` is called with each piece of text."""
        self.tokens: list[int] = []
        self._tokenizer, self._write, self._written = tokenizer, write, ""

    @property
    def text(self) -> str:
        """The text of all tokens so far."""
        return self._tokenizer.decode(self.tokens).strip()

    def add(self, token: int) -> None:
        """Take the next token."""
        self.tokens.append(token)
        self._write_up_to(self._tokenizer.decode(self.tokens).rstrip(UNDECODED).strip())

    def end(self) -> None:
        """Write what was held back."""
        self._write_up_to(self.text, last=True)

    def _write_up_to(self, text: str, last: bool = False) -> None:
        # A later token may change earlier text, for example for bytes that prove to be no character. Written text
        # cannot be taken back: the rest follows once the texts agree again.
        if last or text.startswith(self._written):
            piece = text[len(self._written) :]
            self._written += piece
            if piece:
                self._write(piece)


UNDECODED = "\ufffd"
"""Replacement that decoders write for bytes that are not a complete character."""


class Sampler:
    """Draws the tokens of one answer, one after the other."""

    def __init__(self, sampling: Sampling, number: int = 0):
        """`number` is that of the answer: answers with other numbers draw other tokens with the same seed."""
        self._sampling, self._generator = sampling, torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            mixed = numpy.random.SeedSequence([sampling.seed, number])
            self._generator.manual_seed(int(mixed.generate_state(1, numpy.uint64)[0]))

    def __call__(self, logits_V: torch.Tensor) -> int:
        """Draw a token. Raises UserError if the largest logit is not finite."""
        best = int(logits_V.argmax())
        if not math.isfinite(float(logits_V[best])):
            raise UserError(
                f"the model's logits are not finite ({float(logits_V[best])} for token {best}): its weights are not "
                "usable, try an earlier checkpoint"
            )
        if not self._sampling.temperature:
            return best
        probabilities_K, tokens_K = distribution(logits_V.cpu(), self._sampling)
        return int(tokens_K[torch.multinomial(probabilities_K, 1, generator=self._generator)])


def distribution(logits_V: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities [K] (float64) and tokens [K] to draw from, ties by token id; the temperature is above 0."""
    # The largest becomes 0, so that no temperature overflows.
    scaled_V = (logits_V.double() - logits_V.double().max()) / sampling.temperature
    scaled_K, tokens_K = scaled_V.sort(descending=True, stable=True)
    if sampling.top_k:
        scaled_K, tokens_K = scaled_K[: sampling.top_k], tokens_K[: sampling.top_k]
    probabilities_K = scaled_K.softmax(0)
    if sampling.top_p < 1:
        before_K = probabilities_K.cumsum(0) - probabilities_K
        left = max(1, int((before_K < sampling.top_p).sum()))
        probabilities_K, tokens_K = probabilities_K[:left] / probabilities_K[:left].sum(), tokens_K[:left]
    return probabilities_K, tokens_K


@dataclass(frozen=True)
class Answer:
    """A model's answer."""

    tokens: list[int]
    """Without the token that ends the turn."""
    text: str
    cut: str = ""
    """Why it was cut before the model ended its turn, as a sentence; empty if the model did."""
    end: tuple[int, ...] = ()
    """The token that ended the turn, if it was not cut."""

    @property
    def learned(self) -> list[int]:
        """The tokens that the model wrote, with the one that ended the turn."""
        return [*self.tokens, *self.end]


def nowhere(_text: str) -> None:
    """Write no text while it is decoded."""


class Answers:
    """Answers prompts."""

    def __init__(
        self,
        cfg: ConfigContainer,
        decoder: "Decoder",
        tokenizer: Tokenizer,
        sampling: Sampling,
        max_new_tokens: int,
        batch_size: int = 16,
    ):
        """`batch_size` is the most sequences that are decoded together, which the memory of their keys and values
        bounds.

        Raises:
            UserError: the model ends in a value head.
        """
        if cfg.traits.value_head:
            raise UserError(f"train.task: a model of train.task={cfg.train.task} scores texts and writes none")
        self._decoder, self._tokenizer, self._sampling = decoder, tokenizer, sampling
        self._sequence_length, self._max_new_tokens = cfg.data.sequence_length, max_new_tokens
        self._answered, self._batch_size = 0, batch_size

    def batch(self, prompts: Sequence[Prompt], numbers: Sequence[int] | None = None) -> list[Answer]:
        """Answer prompts, in their order, as if one by one. Prompts of similar lengths are decoded together.

        Args:
            numbers: numbers of the answers, on which with `sampling.seed` the drawn tokens depend; default: in order,
                after the answers so far.

        Raises:
            UserError: a prompt leaves no room for an answer.
        """
        numbers = self._next(len(prompts)) if numbers is None else numbers
        drafts = [self._draft(prompt, number) for prompt, number in zip(prompts, numbers, strict=True)]
        for together in self._together(drafts):
            self._write(together)
        return [draft.answer() for draft in drafts]

    def __call__(
        self,
        prompt: Prompt,
        write: Callable[[str], None] = nowhere,
        *,
        number: int | None = None,
        keep_interrupted: bool = False,
    ) -> Answer:
        """Answer a prompt.

        Args:
            write: called with each piece of the text as soon as it is final.
            number: number of the answer, see `batch`.
            keep_interrupted: a keyboard interrupt ends the answer and is not raised.

        Raises:
            UserError: the prompt leaves no room for an answer.
        """
        draft = self._draft(prompt, self._next(1)[0] if number is None else number, write)
        try:
            self._write([draft])
        except KeyboardInterrupt:
            if not keep_interrupted:
                raise
            draft.cut = "interrupted"
        draft.stream.end()
        return draft.answer()

    def has_room(self, prompt: Prompt) -> bool:
        """True if a prompt leaves room for an answer."""
        return len(prompt.ids) < self._sequence_length

    def _next(self, answers: int) -> Sequence[int]:
        first, self._answered = self._answered, self._answered + answers
        return range(first, first + answers)

    def _draft(self, prompt: Prompt, number: int, write: Callable[[str], None] = nowhere) -> "Draft":
        left = self._sequence_length - len(prompt.ids)
        if not self.has_room(prompt):
            raise UserError(
                f"the prompt takes {len(prompt.ids)} tokens with its media and leaves no room for an answer: the model "
                f"was trained on data.sequence_length {self._sequence_length}; shorten it"
            )
        most = min(left, self._max_new_tokens)
        cut = f"cut after {most} tokens, "
        if self._max_new_tokens <= left:
            cut += "--max-new-tokens"
        else:
            cut += f"where data.sequence_length {self._sequence_length} ends"
        return Draft(prompt, Sampler(self._sampling, number), TextStream(self._tokenizer, write), most, cut)

    def _together(self, drafts: Sequence["Draft"]) -> Iterator[list["Draft"]]:
        """Yield batches of similar lengths, or of equal ones if the model takes no padding."""
        ordered = sorted(drafts, key=lambda draft: draft.length)
        groups = [ordered]
        if not self._decoder.takes_lengths:
            groups = [list(equal) for _, equal in itertools.groupby(ordered, key=lambda draft: draft.length)]
        for group in groups:
            size = self._batch_size if self._decoder.takes_batch([draft.prompt for draft in group[:2]]) else 1
            yield from (group[at : at + size] for at in range(0, len(group), size))

    def _write(self, drafts: Sequence["Draft"]) -> None:
        """Write answers in one batch of the decoder."""
        rows, decoder = list(drafts), self._decoder
        logits_BV = decoder.begin(
            [draft.prompt for draft in rows], max(draft.length for draft in rows) + max(draft.most for draft in rows)
        )
        while True:
            tokens = decoder.agree([draft.next(logits_V) for draft, logits_V in zip(rows, logits_BV, strict=True)])
            for draft, token in zip(rows, tokens, strict=True):
                draft.add(token, self._tokenizer.template.stop_ids)
            remaining = [row for row, draft in enumerate(rows) if not draft.is_complete]
            if not remaining:
                return
            # Copying the cache costs about a step.
            if 2 * len(remaining) <= len(rows) and decoder.keep(remaining):
                rows, tokens = [rows[row] for row in remaining], [tokens[row] for row in remaining]
            logits_BV = decoder.step([self._tokenizer.as_text(token) for token in tokens])


@dataclass
class Draft:
    """An answer that is being written."""

    prompt: Prompt
    sampler: Sampler
    stream: TextStream
    most: int
    """Most tokens that it may have."""
    cut_at_most: str
    """Why it is cut after these."""
    is_complete: bool = False
    cut: str = ""
    end: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """The tokens of the prompt."""
        return len(self.prompt.ids)

    def next(self, logits_V: torch.Tensor) -> int:
        """Return the next token; any after the end."""
        return self.prompt.ids[-1] if self.is_complete else self.sampler(logits_V)

    def add(self, token: int, stop_ids: Container[int]) -> None:
        """Take the next token; nothing happens after the end."""
        if self.is_complete:
            return
        if token in stop_ids:
            self.is_complete, self.end = True, (token,)
            return
        self.stream.add(token)
        if len(self.stream.tokens) == self.most:
            self.is_complete, self.cut = True, self.cut_at_most

    def answer(self) -> Answer:
        """Return the answer."""
        return Answer(self.stream.tokens, self.stream.text, self.cut, self.end)


class Chat:
    """One conversation. Every answer sees all turns before it, with their media."""

    def __init__(self, prompts: Prompts, answers: Answers, system: str = ""):
        """`system` is the text of the first turn; empty for none."""
        self._prompts, self._answers, self._system = prompts, answers, system
        self.attached: list[Medium] = []
        """Media for the next message."""
        self.reset()

    def reset(self) -> None:
        """Start again: forget all turns and attached media."""
        self._turns = [Turn("system", (Part("text", self._system),))] if self._system else []
        self._media: list[Medium] = []
        self.attached = []

    def say(self, text: str, write: Callable[[str], None] = nowhere, *, keep_interrupted: bool = False) -> Answer:
        """Answer the next message, with the attached media. A message that fails is forgotten together with its media.

        Raises:
            UserError: the message's markers do not match its media, or the conversation leaves no room for an answer.
        """
        attached, self.attached = self.attached, []
        turns, media = [*self._turns, user_turn(text, attached)], [*self._media, *attached]
        answer = self._answers(self._prompts.of_conversation(turns, media), write, keep_interrupted=keep_interrupted)
        self._turns, self._media = [*turns, Turn("assistant", (Part("text", answer.text),))], media
        return answer

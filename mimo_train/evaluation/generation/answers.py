"""Answers of a model: the loop over new tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data.text.tokens import Tokenizer
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.evaluation.generation.prompts import Prompt
from mimo_train.evaluation.generation.sampling import Sampler
from mimo_train.evaluation.generation.text_stream import TextStream

if TYPE_CHECKING:
    from mimo_train.evaluation.generation.decoder import Decoder


@dataclass(frozen=True)
class Answer:
    """What a model said."""

    tokens: list[int]
    """Without the one that ends the turn."""
    text: str
    cut: str = ""
    """Why it was cut before the model ended its turn, as a sentence; empty if the model did."""


def nowhere(_text: str) -> None:
    """Write no text while it is decoded."""


class Answers:
    """Answers prompts."""

    def __init__(
        self, cfg: ConfigContainer, decoder: "Decoder", tokenizer: Tokenizer, sampler: Sampler, max_new_tokens: int
    ):
        self._decoder, self._tokenizer, self._sampler = decoder, tokenizer, sampler
        self._sequence_length, self._max_new_tokens = cfg.data.sequence_length, max_new_tokens

    def __call__(
        self, prompt: Prompt, write: Callable[[str], None] = nowhere, *, keep_interrupted: bool = False
    ) -> Answer:
        """The answer to a prompt.

        Args:
            write: is called with each piece of the text as soon as it is certain.
            keep_interrupted: whether an interrupt from the keyboard ends the answer and nothing more.

        Raises:
            UserError: the prompt leaves no room for an answer.
        """
        left = self._sequence_length - len(prompt.ids)
        if left < 1:
            raise UserError(
                f"the prompt takes {len(prompt.ids)} tokens with its media and leaves no room for an answer: the model "
                f"was trained on data.sequence_length {self._sequence_length}; shorten it"
            )
        stream, cut = TextStream(self._tokenizer, write), ""
        try:
            for token in self._tokens(prompt, min(left, self._max_new_tokens)):
                if token is None:
                    cut = self._why_cut(left)
                else:
                    stream.add(token)
        except KeyboardInterrupt:
            if not keep_interrupted:
                raise
            cut = "interrupted"
        stream.end()
        return Answer(stream.tokens, stream.text, cut)

    def _tokens(self, prompt: Prompt, most: int) -> Iterator[int | None]:
        """Up to `most` tokens, and None if the model has not ended its turn then."""
        logits_V = self._decoder.begin(prompt, len(prompt.ids) + most)
        for number in range(1, most + 1):
            token = self._sampler(logits_V)
            if token in self._tokenizer.template.stop_ids:
                return
            yield token
            if number < most:
                logits_V = self._decoder.step(self._tokenizer.as_text(token))
        yield None

    def _why_cut(self, left: int) -> str:
        if self._max_new_tokens <= left:
            return f"cut after {self._max_new_tokens} tokens, --max-new-tokens"
        return f"cut after {left} tokens, where data.sequence_length {self._sequence_length} ends"

"""Tokens -> text, as early as it is certain."""

from collections.abc import Callable

from data.text.tokens import Tokenizer

UNDECODED = "\ufffd"
"""What decoders put in the place of bytes that are no character, or not a whole one yet."""


class TextStream:
    """Gives the text of an answer piece by piece. Its pieces make `tokenizer.decode(tokens).strip()`: white space at
    the end and characters of several tokens are held back until the next tokens decide."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], None]):
        """
        Args:
            write: is called with each piece of text.
        """
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
        # Some tokenizers change text that is behind them, as they do to bytes that turn out to be no character. Nothing
        # can be taken back: the rest follows once the texts agree again.
        if last or text.startswith(self._written):
            piece = text[len(self._written) :]
            self._written += piece
            if piece:
                self._write(piece)

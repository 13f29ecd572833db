"""Tokenizers behind one protocol: bytes, or any Hugging Face tokenizer.

Template of a conversation (ours, neutral, the same for both kinds; `collate.py` applies it):

    [begin] then for each turn: [role marker] text and placeholders [end of turn]

Byte tokenizer: each marker is one special id. Hugging Face tokenizer: begin is its BOS token (left out if it has
none), end of turn its EOS token, and a role marker is the special token `<|user|>`, `<|assistant|>` or `<|system|>`
where the vocabulary has all three, else the plain text "user:", "assistant:" or "system:" and a line break. Its own
chat template is not used. Text is never read as special tokens, so that a record cannot forge a marker or a
placeholder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Protocol

from data.errors import DataError

ROLES = ("user", "assistant", "system")


class Tokenizer(Protocol):
    """What the data path needs of a tokenizer. `vocab_size`: one more than the largest id, without any padding."""

    pad_id: int
    begin_id: int | None
    end_of_turn_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; no special id among them."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special ids are left out."""

    def role_ids(self, role: str) -> list[int]:
        """Marker that opens a turn of `role`: user, assistant or system."""

    def placeholder_id(self, name: str) -> int:
        """Id of a placeholder such as `<image>`. Raises DataError for a name that the tokenizer was not built with."""

    def as_text(self, token: int) -> int:
        """The token where the model wrote it: padding in the place of a placeholder, which would ask for features."""


def build_tokenizer(name: str | os.PathLike[str], placeholders: Sequence[str] = ()) -> Tokenizer:
    """`name` (config key `data.tokenizer`): "bytes", or a folder or hub name of a Hugging Face tokenizer.

    placeholders: one per media module, e.g. ["<image>"]. Raises DataError if it cannot be loaded.
    """
    if len(set(placeholders)) < len(placeholders):
        raise DataError(f"each media module needs its own placeholder, got {list(placeholders)}")
    return ByteTokenizer(placeholders) if name == "bytes" else HuggingFaceTokenizer(name, placeholders)


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; then pad, begin, end of turn, user, assistant, system, and the placeholders."""

    def __init__(self, placeholders: Sequence[str] = ()) -> None:
        self.pad_id, self.end_of_turn_id = 256, 258
        self.begin_id: int | None = 257
        self._roles = {role: 259 + at for at, role in enumerate(ROLES)}
        first = 259 + len(ROLES)
        self._placeholders = {name: first + at for at, name in enumerate(placeholders)}
        self.vocab_size = first + len(placeholders)

    def encode(self, text: str) -> list[int]:
        # JSON may hold half of a surrogate pair, which UTF-8 cannot: it becomes "?".
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(token) for token in ids if 0 <= int(token) < 256).decode("utf-8", "replace")

    def role_ids(self, role: str) -> list[int]:
        return [self._roles[role]]

    def placeholder_id(self, name: str) -> int:
        return _lookup(self._placeholders, name)

    def as_text(self, token: int) -> int:
        return self.pad_id if token in self._placeholders.values() else token


class HuggingFaceTokenizer:
    """A `transformers` tokenizer. Placeholders that it lacks are added as special tokens; pad falls back to EOS.

    Raises DataError (names `data.tokenizer`) if it cannot be loaded or has no EOS token.
    """

    def __init__(self, path: str | os.PathLike[str], placeholders: Sequence[str] = ()) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise DataError(
                f"data.tokenizer: cannot load {str(path)!r}: {reason}. Use 'bytes' or a Hugging Face tokenizer"
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f"data.tokenizer: {str(path)!r} has no EOS token, which ends each turn; set eos_token in its config"
            )
        known = self._tokenizer.get_vocab()
        # Also those that the vocabulary has: only as special tokens are they kept apart from text.
        self._tokenizer.add_tokens(list(placeholders), special_tokens=True)
        vocabulary = self._tokenizer.get_vocab()
        self._placeholders = {name: vocabulary[name] for name in placeholders}
        self.end_of_turn_id: int = self._tokenizer.eos_token_id
        self.begin_id: int | None = self._tokenizer.bos_token_id
        pad = self._tokenizer.pad_token_id
        self.pad_id: int = self.end_of_turn_id if pad is None else pad
        # Not their number: the ids of a vocabulary may have gaps.
        self.vocab_size = 1 + max(vocabulary.values())
        markers = {role: f"<|{role}|>" for role in ROLES}
        if all(marker in known for marker in markers.values()):
            self._roles = {role: [known[marker]] for role, marker in markers.items()}
        else:
            self._roles = {role: self.encode(f"{role}:\n") for role in ROLES}
        # The first call sets options of the shared Rust object, which must not happen while another thread encodes.
        self.encode("")

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids: Iterable[int]) -> str:
        # A model may answer with an id of its padding, which has no text.
        kept = [int(token) for token in ids if 0 <= int(token) < self.vocab_size]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        assert isinstance(text, str), type(text)  # a list only for several sequences
        return text

    def role_ids(self, role: str) -> list[int]:
        return list(self._roles[role])

    def placeholder_id(self, name: str) -> int:
        return _lookup(self._placeholders, name)

    def as_text(self, token: int) -> int:
        return self.pad_id if token in self._placeholders.values() else token


def _lookup(placeholders: dict[str, int], name: str) -> int:
    if name not in placeholders:
        raise DataError(f"the tokenizer has no placeholder {name!r}; it was built with {sorted(placeholders)}")
    return placeholders[name]

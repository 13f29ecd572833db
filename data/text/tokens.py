"""Tokenizers behind one protocol: bytes, or any Hugging Face tokenizer, each with its chat template.

In our own format, a Hugging Face tokenizer begins with BOS (if any), ends turns with EOS, and has the role tags
`<|user|>`, `<|assistant|>`, `<|system|>` if the vocabulary has all three, else the text "user:" etc. and a line break.
Text is not read as special tokens, except for `data.special_tokens_in_text`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.text.chat_renderer import ChatRenderer
from data.text.jinja_template import JinjaTemplate
from data.text.placeholders import Placeholder, as_placeholders, place_texts, resolve
from data.text.special_text import SpecialText, admit
from data.text.templates import OwnTemplate, Template, own_chat_template
from data.text.tokenizer_files import files_fingerprint, require_plain_files, requires_sentencepiece

ROLES = ("user", "assistant", "system")
_TAG = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)
"""Added tokens such as `<|im_start|>`; not the line breaks (Gemma) and words that a vocabulary may have added too."""


class Tokenizer(ABC):
    """A tokenizer of the data path.

    Attributes:
        vocab_size: largest id + 1, without padding.
        text_size: largest id of text + 1, without placeholders.
        special_text: finds special tokens in plain text.
        places: kind -> text of an image or audio, with one pad of each module.
        vocabulary_fingerprint: hash of how text becomes ids. Trained weights require the same one.
    """

    pad_id: int
    begin_id: int | None
    end_of_turn_id: int
    vocab_size: int
    text_size: int
    template: Template
    special_text: SpecialText
    places: Mapping[str, str]
    vocabulary_fingerprint: str

    _placeholders: Mapping[str, int]
    _roles: Mapping[str, list[int]]

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the vocabulary, template and placeholders: of everything that determines tokens."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, without special ids."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special ids."""

    @abstractmethod
    def shown(self, ids: Iterable[int]) -> str:
        """Return readable text of ids, with the names of special ids."""

    def role_ids(self, role: str) -> list[int]:
        """Return the ids that open a turn of `role`: user, assistant or system."""
        return list(self._roles[role])

    @property
    def placeholder_ids(self) -> Collection[int]:
        """The pad ids of all placeholders."""
        return self._placeholders.values()

    def placeholder_id(self, name: str) -> int:
        """Return the pad id of a placeholder such as `<image>`. Raises DataError for an unknown name."""
        if name not in self._placeholders:
            raise DataError(
                f"the tokenizer has no placeholder {name!r}; it was built with {sorted(self._placeholders)}"
            )
        return self._placeholders[name]

    def as_text(self, token: int) -> int:
        """Return a generated token, or padding for a placeholder, which would require features."""
        return self.pad_id if token in self._placeholders.values() else token


def build_tokenizer(
    name: str | os.PathLike[str],
    placeholders: Iterable[str | Placeholder] = (),
    *,
    chat_template: str = "auto",
    template_variables: Mapping[str, Any] | None = None,
    special_in_text: str | Sequence[str] = (),
) -> Tokenizer:
    """Return the tokenizer of a run.

    Args:
        name: `data.tokenizer`: "bytes", or a folder with a Hugging Face tokenizer.
        placeholders: one per media module, e.g. ["<image>"].
        chat_template: `data.chat_template`: "auto" (the tokenizer's template, our own format if it has none), "own"
            (our own format), or a file with a Jinja template.
        template_variables: `data.template_variables`: Jinja variables besides the conversation.
        special_in_text: `data.special_tokens_in_text`: special tokens allowed in texts, see `special_text.admit`.

    Raises:
        DataError: the tokenizer or its template cannot be used. The message starts with the config key.
    """
    is_own = chat_template == "own" or (name == "bytes" and chat_template == "auto")
    if is_own and template_variables:
        raise DataError(
            f"data.template_variables: {sorted(template_variables)} are for a tokenizer's chat template, and our own "
            "format takes none. Remove them"
        )
    items = as_placeholders(placeholders)
    if name != "bytes":
        return HuggingFaceTokenizer(name, items, chat_template, template_variables or {}, special_in_text)
    if special_in_text:
        raise DataError(
            "data.special_tokens_in_text: the tokenizer `bytes` has no special tokens for texts. Remove the key"
        )
    if not is_own:
        raise DataError(
            f"data.chat_template: is {chat_template!r}, but the tokenizer `bytes` has our own format only. Set "
            "data.tokenizer to the folder of a Hugging Face tokenizer, or data.chat_template=auto"
        )
    return ByteTokenizer(items)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are ids 0 to 255; then pad, begin, end of turn, user, assistant, system, and the placeholders."""

    def __init__(self, placeholders: Sequence[Placeholder] = ()) -> None:
        placeholders = resolve(placeholders, _unwritten)
        self.pad_id, self.begin_id, self.end_of_turn_id = 256, 257, 258
        self._roles = {role: [259 + at] for at, role in enumerate(ROLES)}
        first = 259 + len(ROLES)
        self._placeholders = {item.name: first + at for at, item in enumerate(placeholders)}
        self.vocab_size, self.text_size = first + len(placeholders), first
        around = {
            self._placeholders[item.name]: (self.encode(item.start), self.encode(item.end)) for item in placeholders
        }
        # `shown` names a pad by its placeholder.
        self.places = place_texts([replace(item, pad=item.name) for item in placeholders])
        self.template = OwnTemplate(self, placeholders, around)
        self.special_text = SpecialText(())
        self.vocabulary_fingerprint = "bytes"

    @property
    def fingerprint(self) -> str:
        return _fingerprint(self.vocabulary_fingerprint, self.template.identity)

    def encode(self, text: str) -> list[int]:
        # JSON may hold half of a surrogate pair, which UTF-8 cannot: it becomes "?".
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(token) for token in ids if 0 <= int(token) < 256).decode("utf-8", "replace")

    def shown(self, ids: Iterable[int]) -> str:
        names = {256: "[pad]", 257: "[begin]", 258: "[end]"}
        names |= {token: f"[{role}]" for role, (token,) in self._roles.items()}
        names |= {token: name for name, token in self._placeholders.items()}
        runs = groupby(ids, key=lambda token: token < 256)
        return "".join(
            self.decode(run) if is_text else "".join(names.get(int(token), "[unused]") for token in run)
            for is_text, run in runs
        )


class HuggingFaceTokenizer(Tokenizer):
    """A `transformers` tokenizer. Missing placeholders are added as special tokens; pad falls back to EOS.

    `own_source` is our own format in Jinja. `uses_its_template` is True for `data.chat_template=auto`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        placeholders: Sequence[Placeholder] = (),
        chat_template: str = "auto",
        template_variables: Mapping[str, Any] | None = None,
        special_in_text: str | Sequence[str] = (),
    ) -> None:
        """See `build_tokenizer`. Raises DataError if it cannot be loaded or has no EOS token."""
        self._tokenizer = _load(path)
        self.uses_its_template = chat_template == "auto"
        self.template_variables = dict(template_variables or {})
        self._renderer = _renderer(self._tokenizer, path, chat_template, self.template_variables)
        placeholders = resolve(placeholders, self._renderer.written if self._renderer else _unwritten)
        marks = [text for item in placeholders for text in (item.pad, item.mark) if text]
        self._admitted = admit(self._tokenizer, special_in_text, marks)
        role_tokens = [f"<|{role}|>" for role in ROLES]
        has_roles = self._tokenizer.get_vocab().keys() >= {*role_tokens}
        added = [*marks, *(role_tokens if has_roles and self._renderer is None else ())]
        # Tags that frame a message are special, whatever the files say: only special tokens are kept apart from text.
        frame = self._renderer.frame() if self._renderer else ""
        contents = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        added += [content for content in contents if content in frame and _TAG.fullmatch(content)]
        self._tokenizer.add_tokens(list(dict.fromkeys(added)), special_tokens=True)
        vocabulary = self._tokenizer.get_vocab()
        self.special_text = SpecialText(
            token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special
        )
        self._placeholders = {item.name: vocabulary[item.pad] for item in placeholders}
        self.begin_id, self.end_of_turn_id = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        pad = self._tokenizer.pad_token_id
        self.pad_id = self.end_of_turn_id if pad is None else pad
        # Not the number of ids, which may have gaps.
        self.vocab_size = 1 + max(vocabulary.values())
        self.text_size = 1 + max({*vocabulary.values()} - {*self._placeholders.values()})
        # The first call sets options of the shared Rust object, so it must precede encoding in other threads.
        self.encode("")
        roles = dict(zip(ROLES, role_tokens if has_roles else [f"{role}:\n" for role in ROLES], strict=True))
        self._roles = {
            role: [vocabulary[marker]] if has_roles else self.encode(marker) for role, marker in roles.items()
        }
        self.vocabulary_fingerprint = files_fingerprint(self._tokenizer, path)
        self.places = place_texts(placeholders)
        begin, end = self._tokenizer.bos_token or "", self._tokenizer.eos_token
        self.own_source = own_chat_template(begin, roles, end, self.places)
        renderer = self._renderer or ChatRenderer({"default": self.own_source}, {}, "our own format")
        is_own = self._renderer is None
        self.template = JinjaTemplate(renderer, self._tokenizer, self, placeholders, is_own=is_own)

    @cached_property
    def fingerprint(self) -> str:
        vocabulary = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        return _fingerprint(
            self.vocabulary_fingerprint, json.dumps(vocabulary), self.template.identity, *self._admitted
        )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids: Iterable[int]) -> str:
        # A model may generate an id of the padded vocabulary, which has no text.
        kept = [int(token) for token in ids if 0 <= int(token) < self.vocab_size]
        return self._tokenizer.decode(kept, skip_special_tokens=True)

    def shown(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    @property
    def template_sources(self) -> Mapping[str, str]:
        """name -> Jinja template of conversations; empty for our own format."""
        return self._renderer.sources if self._renderer else {}

    def writes(self, kind: str) -> str | None:
        """Return the Jinja template's text for an image or audio; None if it does not know the kind."""
        return self._renderer.written(kind) if self._renderer else None


def _load(path: str | os.PathLike[str]) -> Any:
    """Load a folder's `transformers` tokenizer. Raises DataError on failure or without an EOS token."""
    require_plain_files(path)
    from transformers import AutoTokenizer

    try:
        # No network, no code from the folder, and no prompt on a terminal.
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files raise errors of many classes
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        remedy = "Use 'bytes' or a Hugging Face tokenizer"
        if requires_sentencepiece(Path(path)):
            reason = "its tokenizer.model is SentencePiece's, which is not installed"
            remedy = "pip install sentencepiece, or save the tokenizer as tokenizer.json"
        raise DataError(f"data.tokenizer: cannot load {str(path)!r}: {reason}. {remedy}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise DataError(
            f"data.tokenizer: {str(path)!r} is not a fast tokenizer, so it does not say which characters a token has. "
            "Save it as one (tokenizer.json)"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"data.tokenizer: {str(path)!r} has no EOS token, which ends each turn. Set eos_token in its config"
        )
    return tokenizer


def _renderer(
    tokenizer: Any, path: str | os.PathLike[str], chat_template: str, variables: Mapping[str, Any]
) -> ChatRenderer | None:
    if chat_template == "own":
        return None
    if chat_template == "auto":
        sources, origin = _templates_of(tokenizer, path), f"data.tokenizer {str(path)!r}"
    else:
        origin = chat_template
        try:
            sources = {"default": Path(chat_template).expanduser().read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"data.chat_template: cannot read the file {chat_template}: {error}. Set it to a file with a "
                "Jinja template, auto or own"
            ) from error
    if not sources:
        if variables:
            raise DataError(
                f"data.template_variables: {sorted(variables)} are for a chat template, and {origin} has none. Remove "
                "them, or set data.chat_template to a file with one"
            )
        return None
    # As in transformers: templates name special tokens by these variables.
    return ChatRenderer(sources, {**tokenizer.special_tokens_map, **variables}, origin)


def _templates_of(tokenizer: Any, path: str | os.PathLike[str]) -> dict[str, str]:
    folder = Path(path)
    older = folder / "chat_template.json"
    if older.is_file() and not (folder / "chat_template.jinja").is_file():
        # Older processors store it here; it knows media, and the tokenizer's may not.
        try:
            template = json.loads(older.read_text(encoding="utf-8"))["chat_template"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"data.tokenizer: {older} has no chat_template ({error!r}). Repair it") from error
    else:
        template = tokenizer.chat_template
    if not template:
        return {}
    return dict(template) if isinstance(template, Mapping) else {"default": template}


def _unwritten(kind: str) -> None:
    """Return None: our own format writes no marks."""


def _fingerprint(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:32]

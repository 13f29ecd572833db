"""Files of a folder with a Hugging Face tokenizer: that none of them is code, and a fingerprint of those that decide
how it cuts text."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.storage.files import POINTER_ERROR, POINTER_REMEDY, is_lfs_pointer

FILES = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "tokenizer.model"}
"""Names that most classes use; others have names of their own (`vocab_files_names`). Not tokenizer_config.json: a model
and its chat version differ in it, and cut text alike."""
SETTINGS = {"tokenizer_config.json", "special_tokens_map.json"}
_TAIL = 4096
"""Bytes of a file in which its end is looked for."""


def files_fingerprint(tokenizer: Any, path: str | os.PathLike[str]) -> str:
    """Of a `transformers` tokenizer that was loaded from `path`: its class, and the names and contents of its files. It
    is the same wherever the folder is."""
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    names = FILES | set(getattr(tokenizer, "vocab_files_names", {}).values())
    found = 0
    for file in _files(path, sorted(names - {"tokenizer_config.json"})):
        digest.update(f"\0{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
        found += 1
    if not found:
        # A class that keeps its vocabulary elsewhere.
        digest.update(repr(sorted(tokenizer.get_vocab().items())).encode())
    return digest.hexdigest()[:32]


def require_plain_files(path: str | os.PathLike[str]) -> None:
    """
    Raises:
        DataError: it is no folder, a file of the tokenizer was cut short or is a Git-LFS pointer, or its tokenizer is
            code of its own (`auto_map`), which is not run.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(
            f"data.tokenizer: no folder {str(path)!r}: give bytes, or a folder with a Hugging Face tokenizer; nothing "
            "is downloaded"
        )
    for file in _files(folder, sorted({*FILES, *SETTINGS})):
        _require_whole(file)
    for name in ("tokenizer_config.json", "config.json"):
        file = folder / name
        try:
            config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"data.tokenizer: {file} cannot be read ({error}): copy it again") from error
        found = config.get("auto_map") if isinstance(config, dict) else None
        code = found.get("AutoTokenizer") if isinstance(found, dict) else found
        if code:
            raise DataError(
                f"data.tokenizer: {file} names code of its own for the tokenizer ({code}, in auto_map), which is not "
                "run: give a tokenizer of transformers, or remove auto_map if its tokenizer_class is one"
            )


def _require_whole(file: Path) -> None:
    """Raise DataError for a Git-LFS pointer and for truncated JSON, which transformers may ignore."""
    try:
        is_pointer, size = is_lfs_pointer(file), file.stat().st_size
        with file.open("rb") as content:
            content.seek(max(0, size - _TAIL))
            end = content.read().rstrip()[-1:]
    except OSError as error:
        raise DataError(f"data.tokenizer: {file} cannot be read ({error}): copy it again") from error
    if is_pointer:
        raise DataError(f"data.tokenizer: {file} {POINTER_ERROR}: {POINTER_REMEDY}")
    if file.suffix == ".json" and end not in (b"}", b"]"):
        raise DataError(f"data.tokenizer: {file} was cut short (it has {size} bytes): copy it again")


def _files(folder: str | os.PathLike[str], names: list[str]) -> Iterator[Path]:
    yield from (file for name in names if (file := Path(folder) / name).is_file())

"""A fingerprint of the files that decide how a Hugging Face tokenizer cuts text, in a folder or in the hub's cache."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILES = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "tokenizer.model"}
"""Names that most classes use; others have names of their own (`vocab_files_names`). Not tokenizer_config.json: a model
and its chat version differ in it, and cut text alike."""


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


def _files(path: str | os.PathLike[str], names: list[str]) -> Iterator[Path]:
    if Path(path).is_dir():
        yield from (file for name in names if (file := Path(path) / name).is_file())
        return
    from huggingface_hub import try_to_load_from_cache

    for name in names:
        cached = try_to_load_from_cache(str(path), name)
        if isinstance(cached, str):
            yield Path(cached)

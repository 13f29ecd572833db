"""Files of a Hugging Face tokenizer: checks before loading, and a fingerprint of its vocabulary."""

import hashlib
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.storage.files import POINTER_ERROR, POINTER_REMEDY, is_lfs_pointer

FILES = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "tokenizer.model"}
"""Names that most classes use; `vocab_files_names` has others. tokenizer_config.json is excluded: base and chat models
differ in it, but tokenize alike."""
SETTINGS = {"tokenizer_config.json", "special_tokens_map.json"}
_TAIL = 4096  # bytes


def files_fingerprint(tokenizer: Any, path: str | os.PathLike[str]) -> str:
    """Return a hash of a `transformers` tokenizer's class, file names and file contents, independent of the folder."""
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    names = FILES | set(getattr(tokenizer, "vocab_files_names", {}).values())
    files = [*_files(path, names - {"tokenizer_config.json"})]
    for file in files:
        digest.update(f"\0{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    if not files:  # a class that keeps its vocabulary elsewhere
        digest.update(repr(sorted(tokenizer.get_vocab().items())).encode())
    return digest.hexdigest()[:32]


def require_plain_files(path: str | os.PathLike[str]) -> None:
    """Raise DataError for a folder that is missing, truncated, has Git-LFS pointers, or needs code (`auto_map`)."""
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(
            f"data.tokenizer: no folder {str(path)!r}. Use bytes, or a folder with a Hugging Face tokenizer"
        )
    for file in _files(folder, FILES | SETTINGS):
        _require_complete(file)
    for name in ("tokenizer_config.json", "config.json"):
        file = folder / name
        try:
            config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"data.tokenizer: cannot read {file} ({error}). Copy it again") from error
        auto_map = config.get("auto_map") if isinstance(config, dict) else None
        if code := auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map:
            raise DataError(
                f"data.tokenizer: {file} names code of its own for the tokenizer ({code}, in auto_map), which is not "
                "run. Use a tokenizer of transformers, or remove auto_map if its tokenizer_class is one"
            )


def requires_sentencepiece(folder: Path) -> bool:
    """True if a tokenizer requires the package sentencepiece, which is not installed."""
    has_model = (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file()
    return has_model and find_spec("sentencepiece") is None


def _require_complete(file: Path) -> None:
    """Raise DataError for a Git-LFS pointer and for truncated JSON, which transformers may ignore."""
    try:
        is_pointer, size = is_lfs_pointer(file), file.stat().st_size
        with file.open("rb") as content:
            content.seek(max(0, size - _TAIL))
            end = content.read().rstrip()[-1:]
    except OSError as error:
        raise DataError(f"data.tokenizer: cannot read {file} ({error}). Copy it again") from error
    if is_pointer:
        raise DataError(f"data.tokenizer: {file} {POINTER_ERROR}: {POINTER_REMEDY}")
    if file.suffix == ".json" and end not in (b"}", b"]"):
        raise DataError(f"data.tokenizer: {file} is truncated (it has {size} bytes). Copy it again")


def _files(folder: str | os.PathLike[str], names: set[str]) -> Iterator[Path]:
    yield from (file for name in sorted(names) if (file := Path(folder) / name).is_file())

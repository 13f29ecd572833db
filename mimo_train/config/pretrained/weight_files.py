"""The files of weights in a directory, and their tensors: which, where, and of which shape. Only headers are read.

Files are chosen as `transformers` chooses them: one safetensors file, else those of its index, else one `.bin` file,
else those of its index. torch is imported where the directory has `.bin` files only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mimo_train.config.errors import UserError
from mimo_train.config.pretrained.bin_header import read_bin_header
from mimo_train.config.pretrained.safetensors_header import (
    MOST_BYTES,
    Entry,
    Unreadable,
    parsed,
    read_error,
    read_header,
    require_no_pointer,
)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BIN_INDEX, BIN = "pytorch_model.bin.index.json", "pytorch_model.bin"


def stored_tensors(folder: Path, key: str) -> dict[str, tuple[Path, Entry]]:
    """Return the tensors of a directory by name, each with its file.

    Args:
        key: config key that names the directory, for errors.

    Raises:
        UserError: the directory has no weights, or a file is missing, cut short, a Git-LFS pointer, or not as its
            header or the index say.
    """
    tensors: dict[str, tuple[Path, Entry]] = {}
    files, index = _files(folder, key)
    for name, indexed in files.items():
        path = folder / name
        for tensor, entry in _stored_in(path, indexed, index, key).items():
            if tensor in indexed or tensor not in tensors:  # of a tensor in several files, that of the index counts
                tensors[tensor] = path, entry
    return tensors


def _files(folder: Path, key: str) -> tuple[dict[str, set[str]], str]:
    """Return the files with the tensors that the index has in each, and the name of the index."""
    for single, index in ((SINGLE, INDEX), (BIN, BIN_INDEX)):
        if (folder / single).is_file():
            return {single: set()}, index
        if (folder / index).is_file():
            return _indexed(folder / index, key), index
    for pattern, index in (("model-*.safetensors", INDEX), ("pytorch_model-*.bin", BIN_INDEX)):
        shards = sorted(path.name for path in folder.glob(pattern))
        if shards:
            raise UserError(f"{key}: {folder} has {shards[0]} and no {index}, which names its tensors: copy that too")
    raise UserError(
        f"{key}: {folder} has no weights ({SINGLE}, {INDEX}, {BIN} or {BIN_INDEX}): copy them too, or save the model "
        "with transformers' save_pretrained"
    )


def _indexed(index: Path, key: str) -> dict[str, set[str]]:
    with _named(index, key):
        require_no_pointer(index)
        if index.stat().st_size > MOST_BYTES:
            raise Unreadable(f"has {index.stat().st_size} bytes, and {MOST_BYTES} are read at most")
        places = parsed(index.read_bytes()).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise Unreadable("has no weight_map of tensors and files")
        files: dict[str, set[str]] = {}
        for tensor, file in places.items():
            if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file or "\0" in file:
                raise Unreadable(f"has {tensor} in {file!r:.80}, which is no file beside it")
            files.setdefault(file, set()).add(tensor)
    return dict(sorted(files.items()))


def _stored_in(path: Path, indexed: set[str], index: str, key: str) -> dict[str, Entry]:
    if not path.is_file():
        raise UserError(f"{key}: {path} is missing, and {index} names it: copy the directory again")
    with _named(path, key):
        entries = read_bin_header(path) if index == BIN_INDEX else read_header(path)
        absent = next((name for name in sorted(indexed) if name not in entries), None)
        if absent is not None:
            raise Unreadable(f"has no {absent}, which {index} has there")
    return entries


@contextmanager
def _named(path: Path, key: str) -> Iterator[None]:
    """Name the file in an error, and the key."""
    try:
        yield
    except (Unreadable, OSError) as error:
        raise UserError(f"{key}: {read_error(path, error)}") from error

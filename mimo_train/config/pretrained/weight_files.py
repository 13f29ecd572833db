"""The safetensors files of a directory: which there are, and what their headers say. Imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mimo_train.config.fault import UserError
from mimo_train.config.pretrained.safetensors_header import MOST_BYTES, Entry, Unreadable, parsed, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def stored_tensors(folder: Path, key: str) -> dict[str, tuple[Path, Entry]]:
    """The tensors of a directory by name, each with its file; reads headers only.

    Args:
        key: config key that names the directory, for errors.

    Raises:
        UserError: the directory has no safetensors, or a file is missing, cut short, or not as its header or the index
            say.
    """
    found: dict[str, tuple[Path, Entry]] = {}
    for name, listed in _files(folder, key).items():
        path = folder / name
        for tensor, entry in _stored_in(path, listed, key).items():
            if tensor in listed or tensor not in found:  # of a tensor in several files, that of the index counts
                found[tensor] = path, entry
    return found


def _files(folder: Path, key: str) -> dict[str, set[str]]:
    """Names of the tensors that the index has in each file; none without an index."""
    index = folder / INDEX
    if index.is_file():
        return _listed(index, key)
    if (folder / SINGLE).is_file():
        return {SINGLE: set()}
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    if shards:
        raise UserError(f"{key}: {folder} has {shards[0]} and no {INDEX}, which names its tensors: copy that too")
    others = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
    saved = f"it has {', '.join(others[:2])}, which is read by unpickling" if others else "it has none"
    raise UserError(
        f"{key}: {folder} has no {SINGLE} and no {INDEX} ({saved}): save the model with transformers' save_pretrained"
    )


def _listed(index: Path, key: str) -> dict[str, set[str]]:
    with _named(index, key):
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


def _stored_in(path: Path, listed: set[str], key: str) -> dict[str, Entry]:
    if not path.is_file():
        raise UserError(f"{key}: {path} is missing, and {INDEX} names it: copy the directory again")
    with _named(path, key):
        entries = read_header(path)
        absent = next((name for name in sorted(listed) if name not in entries), None)
        if absent is not None:
            raise Unreadable(f"has no {absent}, which {INDEX} has there")
    return entries


@contextmanager
def _named(path: Path, key: str) -> Iterator[None]:
    try:
        yield
    except Unreadable as error:
        raise UserError(f"{key}: {path} {error}: copy it again") from error
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read: {error}") from error

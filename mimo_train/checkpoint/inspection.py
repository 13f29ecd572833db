"""List the contents of checkpoint folders and verify them, without ranks."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from data.storage.object_store import store_of
from data.storage.url import WEB, Place, Url
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.best import is_best
from mimo_train.checkpoint.damage import damage_in
from mimo_train.checkpoint.format.files import COMPLETE, Damage
from mimo_train.checkpoint.format.index import WEIGHT, Index, Key, is_of_rank
from mimo_train.checkpoint.format.read import Reader
from mimo_train.config.errors import UserError
from mimo_train.layout.ranks import AXES

PERSISTENT, NON_PERSISTENT, UNFINISHED, SET_ASIDE = "persistent", "non-persistent", "unfinished", "set aside"
"""Kinds of folders. No run resumes from the last two, so their damage does not matter to a run."""
CONTINUED = (PERSISTENT, NON_PERSISTENT)


@dataclass(frozen=True)
class Found:
    """A checkpoint folder, as described by its names, sizes and record."""

    path: Place
    kind: str
    step: int | None
    """None if the record is unreadable."""
    saved_at: float | None
    """Unix time when it became complete."""
    files: int
    """Number of the ranks' files; 0 if the index is unreadable."""
    nbytes: int
    """Size of these files."""
    layout: dict[str, str]
    damage: str
    """Why a run cannot resume from it, as far as visible; empty otherwise."""


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer in a checkpoint."""

    module: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    """Dtype of the weight by its safetensors name."""
    states: tuple[str, ...]
    nbytes: int
    """Size including those states."""
    files: int
    """Number of files that have a part of it."""
    numel: int


@dataclass(frozen=True)
class Verified:
    """Result of reading a whole checkpoint."""

    path: Place
    files: int
    nbytes: int
    blocks: int
    damage: list[str]
    """Damaged files with their tensors; empty if the checkpoint is intact."""


def folders_at(path: Place) -> list[Place]:
    """Return the checkpoint folders of a run's folder or its `checkpoints`, or `path` itself; oldest first.

    Raises:
        UserError: there is none.
    """
    if folders.is_complete(path):
        return [path]
    if is_best(path):
        return [folders.best_of(path, "PATH")]
    paths: list[Place] = []
    if folders.STEP.fullmatch(path.name):
        paths = [path] if folders.contents(path).names else []
    elif not (isinstance(path, Url) and path.scheme in WEB):
        run_dir = path.parent if path.name == "checkpoints" else path
        paths = [folder.path for kind in (False, True) for folder in folders.every(run_dir, kind)]
    if not paths:
        what = "there is no" if isinstance(path, Path) and not path.exists() else "no checkpoint in"
        raise UserError(f"PATH: {what} {path}: give the folder of a run, or of a checkpoint")
    return sorted(paths, key=lambda folder: (folder.name, str(folder)))


def look(path: Place) -> list[Found]:
    """Describe the folders of `folders_at` without reading tensors. Folders that vanish meanwhile are skipped."""
    described = [(folder, _look(folder)) for folder in folders_at(path)]
    return [description for folder, description in described if isinstance(folder, Url) or folder.is_dir()]


def _look(folder: Place) -> Found:
    damage = ""
    record: dict[str, Any] = {}
    reader: Reader | None = None
    try:
        folders.require_complete(folder)
        record = folders.read_record(folder, "step", "layout")
        reader = Reader(folder)
        reader.require_files()
    except UserError as error:
        damage = damage_in(folder, error) or str(error)
    except (Damage, OSError) as error:
        damage = str(error)
    files = reader.index.files if reader is not None else []
    saved_at: float | None = None
    with suppress(OSError):
        marker = folder / COMPLETE
        saved_at = store_of(marker).look(marker).modified if isinstance(marker, Url) else marker.stat().st_mtime
    return Found(
        path=folder,
        kind=kind_of(folder),
        step=step if isinstance(step := record.get("step"), int) else None,
        saved_at=saved_at,
        files=len(files),
        nbytes=sum(file.size for file in files),
        layout=_layout(record.get("layout")),
        damage=damage,
    )


def verify(folder: Place, workers: int) -> Verified:
    """Read a whole checkpoint in `workers` threads and compare every hash."""
    try:
        folders.require_complete(folder)
        folders.read_record(folder)
        reader = Reader(folder)
    except UserError as error:
        return Verified(folder, 0, 0, 0, [damage_in(folder, error) or str(error)])
    except (Damage, OSError) as error:
        return Verified(folder, 0, 0, 0, [str(error)])
    damage, files = reader.damage(workers), reader.index.files
    nbytes = sum(file.size for file in files)
    return Verified(folder, len(files), nbytes, sum(len(file.hashes) - 1 for file in files), damage)


def tensors(index: Index, patterns: Collection[str] = ()) -> list[Tensor]:
    """Return the parameters and buffers of a checkpoint.

    Args:
        patterns: shell patterns of `module.name`; none selects all.
    """
    keys: dict[tuple[str, str], dict[str, Key]] = {}
    for key in index.pieces:
        named = f"{key.module}.{key.name}"
        if not is_of_rank(key) and (not patterns or any(fnmatchcase(named, pattern) for pattern in patterns)):
            # States of other shapes than their parameter's have names of their own.
            name = key.name if key.state == WEIGHT else key.name.removesuffix(f".{key.state}")
            keys.setdefault((key.module, name), {})[key.state] = key
    return [_tensor(index, module, name, by_state) for (module, name), by_state in keys.items()]


def _tensor(index: Index, module: str, name: str, by_state: dict[str, Key]) -> Tensor:
    first = by_state.get(WEIGHT, next(iter(by_state.values())))
    return Tensor(
        module=module,
        name=name,
        shape=index.shape(first),
        dtype=index.dtypes[first],
        states=tuple(state for state in by_state if state != WEIGHT),
        nbytes=sum(map(index.nbytes, by_state.values())),
        numel=prod(index.shape(first)),
        files=len({piece.file for key in by_state.values() for piece in index.pieces[key]}),
    )


def kind_of(folder: Place) -> str:
    """Return PERSISTENT, NON_PERSISTENT, UNFINISHED or SET_ASIDE by the files in a folder.

    Raises:
        UserError: the storage does not answer.
    """
    if not isinstance(folder, Url) or folder.scheme not in WEB:
        contents = folders.contents(folder)
        if contents.is_set_aside or contents.is_unfinished:
            return SET_ASIDE if contents.is_set_aside else UNFINISHED
    return NON_PERSISTENT if folder.parent.name == "non_persistent" else PERSISTENT


def _layout(sizes: Any) -> dict[str, str]:
    """Return sizes by module in `RunLayout`'s notation; empty if the record has something else."""
    layout = {}
    for name, of in sizes.items() if isinstance(sizes, dict) else ():
        if not isinstance(of, list) or len(of) != len(folders.LAYOUT) or not all(isinstance(size, int) for size in of):
            return {}
        by_axis = dict(zip(folders.LAYOUT, of, strict=True))
        layout[name] = " ".join(f"{axis}{by_axis[axis]}" for axis in AXES if by_axis[axis] > 1) or "one rank"
    return layout

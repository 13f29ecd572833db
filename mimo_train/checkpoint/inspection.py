"""What is in a folder of checkpoints, and whether it is whole: for people, without ranks. Imports no torch."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from mimo_train.checkpoint import folders
from mimo_train.checkpoint.format.blocks import Blocks
from mimo_train.checkpoint.format.files import COMPLETE, Damage
from mimo_train.checkpoint.format.index import WEIGHT, Index, Key, is_of_rank
from mimo_train.config.fault import UserError
from mimo_train.plan.layout import AXES

PERSISTENT, NON_PERSISTENT, UNFINISHED, SET_ASIDE = "persistent", "non-persistent", "unfinished", "set aside"
"""Kinds of folders; no run continues from the last two, whose damage is none of a run's."""
CONTINUED = (PERSISTENT, NON_PERSISTENT)


@dataclass(frozen=True)
class Found:
    """A folder of a checkpoint, as far as its names, sizes and record tell."""

    path: Path
    kind: str
    """PERSISTENT, NON_PERSISTENT, UNFINISHED or SET_ASIDE."""
    step: int | None
    """None where the record cannot be read."""
    saved_at: float | None
    """When it became complete, in seconds since the epoch."""
    files: int
    nbytes: int
    layout: dict[str, str]
    """Parallel sizes by module."""
    damage: str
    """Why it cannot be continued from, as far as that shows; empty if nothing does."""


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer in a checkpoint."""

    module: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    """Of the weight, as safetensors names it."""
    states: tuple[str, ...]
    """Of the optimizer, that are stored for it."""
    nbytes: int
    """With those."""
    files: int
    """That have a part of it."""
    numel: int


@dataclass(frozen=True)
class Verified:
    """What reading all of a checkpoint has found."""

    path: Path
    files: int
    nbytes: int
    blocks: int
    damage: list[str]
    """By file, with tensors; empty if it is whole."""


def folders_at(path: Path) -> list[Path]:
    """The folders of checkpoints in a run's folder, in its `checkpoints`, or the one that `path` is; oldest first.

    Raises:
        UserError: there is none.
    """
    if (path / COMPLETE).is_file() or path.name.startswith("step_"):
        if not path.is_dir():
            raise UserError(f"PATH: no folder {path}")
        return [path]
    run_dir = path.parent if path.name == "checkpoints" and not (path / "checkpoints").is_dir() else path
    found = [
        folder for kind in (False, True) for folder in folders.named(run_dir, kind, "step_????????*") if folder.is_dir()
    ]
    if not found:
        raise UserError(f"PATH: no checkpoint in {path}: give the folder of a run, or of a checkpoint")
    return sorted(found, key=lambda folder: (folder.name, str(folder)))


def look(path: Path) -> list[Found]:
    """What the folders of `folders_at` hold, without reading their tensors. One that a run has renamed or removed
    meanwhile is left out."""
    found = [(folder, _look(folder)) for folder in folders_at(path)]
    return [one for folder, one in found if folder.is_dir()]


def _look(folder: Path) -> Found:
    damage = ""
    record: dict[str, Any] = {}
    try:
        folders.require_complete(folder)
        record = folders.read_record(folder, "step", "layout")
        Blocks(folder).require_files()
    except UserError as error:
        damage = folders.damage_in(folder, error) or str(error)
    except (Damage, OSError) as error:
        damage = str(error)
    sizes: list[int] = []
    saved_at: float | None = None
    with suppress(OSError):
        sizes = [file.stat().st_size for file in folder.iterdir() if file.is_file()]
        saved_at = (folder / COMPLETE).stat().st_mtime
    return Found(
        path=folder,
        kind=kind_of(folder),
        step=step if isinstance(step := record.get("step"), int) else None,
        saved_at=saved_at,
        files=len(sizes),
        nbytes=sum(sizes),
        layout=_layout(record.get("layout")),
        damage=damage,
    )


def verify(folder: Path, workers: int) -> Verified:
    """Read all of a checkpoint and compare every hash, in as many threads."""
    try:
        folders.require_complete(folder)
        folders.read_record(folder)
        blocks = Blocks(folder)
    except UserError as error:
        return Verified(folder, 0, 0, 0, [folders.damage_in(folder, error) or str(error)])
    except (Damage, OSError) as error:
        return Verified(folder, 0, 0, 0, [str(error)])
    damage, files = blocks.damage(workers), blocks.index.files
    blocks.close()
    nbytes = sum(file.size for file in files)
    return Verified(folder, len(files), nbytes, sum(len(file.hashes) - 1 for file in files), damage)


def tensors(index: Index, patterns: Collection[str] = ()) -> list[Tensor]:
    """The parameters and buffers of a checkpoint.

    Args:
        patterns: shell patterns of `module.name`; none means all.
    """
    keys: dict[tuple[str, str], dict[str, Key]] = {}
    for key in index.pieces:
        named = f"{key.module}.{key.name}"
        if not is_of_rank(key) and (not patterns or any(fnmatchcase(named, pattern) for pattern in patterns)):
            keys.setdefault((key.module, key.name), {})[key.state] = key
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


def kind_of(folder: Path) -> str:
    """PERSISTENT, NON_PERSISTENT, UNFINISHED or SET_ASIDE, by its name."""
    if ".partial" in folder.name:
        return UNFINISHED
    if ".damaged" in folder.name:
        return SET_ASIDE
    return NON_PERSISTENT if folder.parent.name == "non_persistent" else PERSISTENT


def _layout(sizes: Any) -> dict[str, str]:
    """By module, as `RunLayout` writes them; empty where a record holds something else."""
    found = {}
    for name, of in sizes.items() if isinstance(sizes, dict) else ():
        if not isinstance(of, list) or len(of) != len(folders.LAYOUT) or not all(isinstance(one, int) for one in of):
            return {}
        by_axis = dict(zip(folders.LAYOUT, of, strict=True))
        found[name] = " ".join(f"{axis}{by_axis[axis]}" for axis in AXES if by_axis[axis] > 1) or "one rank"
    return found

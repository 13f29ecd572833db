"""`checkpoint.resume=auto`: of the newest checkpoints of a run the first that can be read; damaged ones are set aside.

All ranks try the same one, and give it up together. A folder gets another name only when an older checkpoint was read
whole: a file system that fails for a while moves none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from mimo_train.checkpoint import folders
from mimo_train.config.fault import UserError
from mimo_train.parallel.agreement import agreed


@dataclass(frozen=True)
class SetAside:
    """A damaged checkpoint that a run did not continue from."""

    folder: Path
    """As it was called."""
    now: Path
    """As it is called now."""
    why: str

    def __str__(self) -> str:
        return f"checkpoint {self.folder} is damaged: {self.why}; it is now {self.now}"


def newest_that_loads(run_dir: Path, load: Callable[[Path], None]) -> tuple[Path | None, list[SetAside]]:
    """Load the newest checkpoint of a run, or the one before it where that is damaged, and so on. Collective.

    Args:
        load: loads one; collective. What it has changed when it raises does not matter: the next one replaces it.

    Returns:
        The checkpoint that was loaded, None for a new run; and what was set aside.

    Raises:
        UserError: every checkpoint is damaged, and none was moved; or one cannot be loaded for another reason. On every
            rank alike.
    """
    given_up: list[tuple[Path, UserError]] = []
    for folder in _candidates(run_dir):
        try:
            _require_whole(folder)
            load(folder)
        except UserError as error:
            if folders.damage_in(folder, error):
                given_up.append((folder, error))
                continue
            if not given_up:
                raise
            before = "\n".join(str(found) for _, found in given_up)
            raise UserError(f"{before}\nand of the one before: {error}") from error
        return folder, _set_aside(given_up)
    if len(given_up) > 1:
        raise UserError("\n".join(str(error) for _, error in given_up))
    if given_up:
        raise given_up[0][1]
    return None, []


def _candidates(run_dir: Path) -> list[Path]:
    """Folders named as checkpoints, the newest first, as rank 0 finds them. Collective."""
    box = list[list[str]]([[]])
    with agreed():
        if dist.get_rank() == 0:
            folders.finish_renames(run_dir)
            box = [[str(folder) for folder in folders.newest_first(run_dir)]]
    dist.broadcast_object_list(box)
    return [Path(folder) for folder in box[0]]


def _require_whole(folder: Path) -> None:
    """Rank 0 finds a checkpoint complete, and every other rank finds it. Collective.

    Raises:
        UserError: not so; on every rank.
    """
    with agreed():
        if dist.get_rank() == 0:
            folders.require_complete(folder)
    with agreed():
        folders.require_seen(folder)


def _renamed(folder: Path, damage: UserError) -> Path:
    try:
        return folders.set_aside(folder)
    except OSError as error:
        raise UserError(f"{damage}\nrun.dir: and it cannot be renamed ({error}): rename or remove it") from error


def _set_aside(given_up: list[tuple[Path, UserError]]) -> list[SetAside]:
    """Rename them. Collective."""
    if not given_up:
        return []
    found = []
    with agreed():
        if dist.get_rank() == 0:
            for folder, error in given_up:
                found.append(SetAside(folder, _renamed(folder, error), folders.damage_in(folder, error)))
    box = [found]
    dist.broadcast_object_list(box)
    return box[0]

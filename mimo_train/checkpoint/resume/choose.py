"""Choose the checkpoint to resume from: rank 0 chooses, damaged ones are set aside.

Ranks that searched on their own could find different ones, while another run writes them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from data.storage.url import Place, Url
from mimo_train.checkpoint import folder_changes, folders
from mimo_train.checkpoint.damage import all_damaged, damage_in
from mimo_train.config.errors import UserError
from mimo_train.parallel.collectives import agreed


def chosen_by_first(choose: Callable[[], Place | None], key: str) -> Place | None:
    """Return rank 0's result of `choose`, which every rank must see. Collective.

    Args:
        key: config key for messages.

    Raises:
        UserError: the error of `choose`, or a rank does not see the checkpoint; on every rank.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    box = list[Place | None]([None])
    with agreed():
        if alone or dist.get_rank() == 0:
            box = [choose()]
    if not alone:
        dist.broadcast_object_list(box)
    folder = box[0]
    with agreed():
        if folder is not None:
            folders.require_seen(folder, key)
    return folder


@dataclass(frozen=True)
class SetAside:
    """A damaged checkpoint that a run did not resume from."""

    folder: Place
    """Old name."""
    now: Place
    """New name; in object storage, the DAMAGED mark."""
    why: str

    def __str__(self) -> str:
        what = "its mark" if isinstance(self.now, Url) else "it"
        return f"checkpoint {self.folder} is damaged: {self.why}; {what} is now {self.now}"


def newest_that_loads(run_dir: Place, load: Callable[[Place], None]) -> tuple[Place | None, list[SetAside]]:
    """Load a run's newest checkpoint that is not damaged. Collective.

    Args:
        load: loads a checkpoint; collective. Its changes before an error do not matter: the next load replaces them.

    Returns:
        The loaded checkpoint, None for a new run; and what was set aside.

    Raises:
        UserError: all checkpoints are damaged, and none was moved; or one cannot be loaded for another reason. On every
            rank alike.
    """
    given_up: list[tuple[Place, UserError]] = []
    for folder in _candidates(run_dir):
        try:
            _require_whole(folder, folders.key_of(run_dir))
            load(folder)
        except UserError as error:
            if damage_in(folder, error):
                given_up.append((folder, error))
                continue
            if not given_up:
                raise
            before = "\n".join(str(found) for _, found in given_up)
            raise UserError(f"{before}\nand of the one before: {error}") from error
        return folder, _set_aside(given_up)
    if given_up:
        raise all_damaged(run_dir, folders.key_of(run_dir), [error for _, error in given_up])
    return None, []


def _candidates(run_dir: Place) -> list[Place]:
    """Return rank 0's folders named as checkpoints, newest first. Collective."""
    box = list[list[Place]]([[]])
    with agreed():
        if dist.get_rank() == 0:
            folder_changes.finish_renames(run_dir)
            box = [folders.newest_first(run_dir)]
    dist.broadcast_object_list(box)
    return box[0]


def _require_whole(folder: Place, key: str) -> None:
    """Raise UserError on every rank unless rank 0 finds a checkpoint complete and every rank sees it. Collective."""
    with agreed():
        if dist.get_rank() == 0:
            folders.require_complete(folder)
    with agreed():
        folders.require_seen(folder, key)


def _renamed(folder: Place, damage: UserError) -> Place:
    try:
        return folder_changes.set_aside(folder)
    except OSError as error:
        raise UserError(f"{damage}\nand it cannot be renamed ({error}): rename or remove it") from error


def _set_aside(given_up: list[tuple[Place, UserError]]) -> list[SetAside]:
    """Rename the damaged checkpoints. Collective."""
    if not given_up:
        return []
    found = []
    with agreed():
        if dist.get_rank() == 0:
            for folder, error in given_up:
                found.append(SetAside(folder, _renamed(folder, error), damage_in(folder, error)))
    box = [found]
    dist.broadcast_object_list(box)
    return box[0]

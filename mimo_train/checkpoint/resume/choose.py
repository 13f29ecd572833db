"""Choose the checkpoint to resume from: rank 0 chooses, damaged ones are set aside.

Ranks that searched on their own could find different ones, while another run writes them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from data.storage.url import Place
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
    folder = _on_first(choose)
    with agreed():
        if folder is not None:
            folders.require_seen(folder, key)
    return folder


@dataclass(frozen=True)
class SetAside:
    """A damaged checkpoint that a run did not resume from."""

    folder: Place
    damage: str

    def __str__(self) -> str:
        return f"checkpoint {self.folder} is damaged: {self.damage}; it is set aside by a file {folders.DAMAGED} in it"


def newest_that_loads(run_dir: Place, load: Callable[[Place], None]) -> tuple[Place | None, list[SetAside]]:
    """Load a run's newest checkpoint that is not damaged. Collective.

    Args:
        load: loads a checkpoint; collective. Its changes before an error do not matter: the next load replaces them.

    Returns:
        The loaded checkpoint, None for a new run; and what was set aside.

    Raises:
        UserError: all checkpoints are damaged, and none was set aside; or one cannot be loaded for another reason. On
            every rank alike.
    """
    failed: list[tuple[Place, UserError]] = []
    key = folders.key_of(run_dir)
    for folder in _on_first(lambda: folders.newest_first(run_dir)):
        try:
            _on_first(partial(folders.require_complete, folder))
            with agreed():
                folders.require_seen(folder, key)
            load(folder)
        except UserError as error:
            if damage_in(folder, error):
                failed.append((folder, error))
                continue
            if not failed:
                raise
            newer = "\n".join(str(damage) for _, damage in failed)
            raise UserError(f"{newer}\nand of the one before: {error}") from error
        aside = [SetAside(path, damage_in(path, error)) for path, error in failed]

        def mark() -> None:
            for path, error in failed:
                folder_changes.set_aside(path, error)

        _on_first(mark)
        return folder, aside
    if failed:
        raise all_damaged(run_dir, key, [error for _, error in failed])
    return None, []


def _on_first[Result](work: Callable[[], Result]) -> Result:
    """Return rank 0's result of `work`; its UserError is raised on every rank. Collective."""
    box: list[Any] = [None]
    with agreed():
        if not dist.is_initialized() or dist.get_rank() == 0:
            box = [work()]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(box)
    return box[0]

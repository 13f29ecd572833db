"""Errors for checkpoints that are damaged, unreadable, or written by another program."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data.storage.url import Place, Url
from mimo_train.checkpoint.format.files import COMPLETE, PARTIAL, Damage
from mimo_train.config.errors import PeersError, UserError


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are not what was written; made by `damaged`."""


class FolderFailed(UserError, OSError):
    """The storage cannot list or read a folder. This is no damage: nothing is marked or assumed missing."""


_DAMAGED = " is damaged: "
REMEDY = "; name another checkpoint (`mimo-train checkpoint list` shows those of a run), or remove this folder"
"""End of a damage message; it suits training, export and any other reader."""


def damaged(folder: Place, reason: str) -> UserError:
    """Return the error for a damaged checkpoint, or another one if a run is removing it."""
    if isinstance(folder, Path) and _is_removed(folder):
        return UserError(
            f"checkpoint {folder} was removed while it was read, as a run removes its old ones: start again, which "
            "takes the newest, or let that run keep more (checkpoint.keep, checkpoint.keep_every)"
        )
    return DamagedCheckpoint(f"checkpoint {folder}{_DAMAGED}{reason}{REMEDY}")


def _is_removed(folder: Path) -> bool:
    """True if a folder is gone or being removed."""
    exists = os.path.exists
    return not exists(folder) or (exists(folder / PARTIAL) and not exists(folder / COMPLETE))


def all_damaged(run_dir: Place, key: str, errors: Sequence[UserError]) -> UserError:
    """Return the error for a run whose checkpoints are all damaged: a line for each, and what to do.

    Args:
        key: config key of `run_dir`.
        errors: one for each checkpoint, the newest first.
    """
    lines = [str(error).removesuffix(REMEDY) for error in errors]
    last = (
        f"{key}: no checkpoint in {run_dir} can be read ({len(errors)} tried), and none was set aside: copy the "
        f"damaged files again, or begin a new run in another {key}"
    )
    return UserError("\n".join([*lines, last]))


def unreadable(folder: Place, error: OSError) -> FolderFailed:
    """Return the error for a checkpoint that the file system cannot read."""
    return FolderFailed(
        f"checkpoint {folder} cannot be read ({error}): an error of the file system or of this machine, which says "
        "nothing about the checkpoint: mend that, and start again"
    )


@contextmanager
def failure_named(folder: Place) -> Iterator[None]:
    """Turn errors of listing a checkpoint folder, or of renaming in it, into FolderFailed."""
    try:
        yield
    except OSError as error:
        reason = "an error of the file system or of this machine, or a missing permission: mend that, and start again"
        if isinstance(folder, Url):
            reason = (
                "look at the URL, the endpoint and the credentials in the environment, and whether the storage "
                "answers, and start again"
            )
        raise FolderFailed(f"the checkpoints in {folder} cannot be looked at ({error}): {reason}") from error


def damage_in(folder: Place, error: UserError) -> str:
    """Return the damage of a checkpoint from this or another rank's error; empty if the error is something else."""
    of_peer = isinstance(error, PeersError) and error.kind == DamagedCheckpoint.__name__
    start = f"checkpoint {folder}{_DAMAGED}"
    if not of_peer and not isinstance(error, DamagedCheckpoint) or not str(error).startswith(start):
        return ""
    return str(error).removeprefix(start).removesuffix(REMEDY)


@contextmanager
def damage_named(folder: Place) -> Iterator[None]:
    """Turn `Damage` and file system errors into errors that name the checkpoint and the remedy."""
    try:
        yield
    except (Damage, FileNotFoundError) as error:
        raise damaged(folder, str(error)) from error
    except FolderFailed:
        raise
    except OSError as error:
        raise unreadable(folder, error) from error


_OTHER_FORMATS = (".metadata", "*.distcp", "*.pt", "*.pth", "*.ckpt", "mp_rank_*/*.pt", "iter_*/mp_rank_*/*.pt")
"""Files that only checkpoints of torch.distributed.checkpoint, Megatron-LM and torch.save have."""


def require_own_format(folder: Place, before: str = "") -> None:
    """Raise UserError, prefixed with `before`, for a checkpoint of another program or of an earlier version. Such
    checkpoints are not damaged, and copying does not help. They do not exist in object storage."""
    if isinstance(folder, Url):
        return
    files = [path for pattern in _OTHER_FORMATS for path in sorted(folder.glob(pattern))]
    if files:
        raise UserError(
            f"{before}checkpoint {folder} has another format ({files[0].relative_to(folder)}), which can only be read "
            "by unpickling. Export it as a directory of transformers with the program that wrote it, and start from "
            "that (modules.NAME.pretrained)"
        )

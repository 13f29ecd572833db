"""Git LFS: a clone without it has a short text, a pointer, in the place of each large file."""

from pathlib import Path

_BEGINNING = b"version https://git-lfs.github.com/spec/"

POINTER_ERROR = "is a Git-LFS pointer, not the file itself"
POINTER_REMEDY = "run `git lfs pull` in its folder, or download it again"


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is a pointer. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING

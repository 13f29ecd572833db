"""Faults of keys with paths or URLs."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from data.errors import DataError
from data.storage.url import EXTRA, OBJECTS, Url, is_url, place_of, require_scheme
from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.keys import is_installed


def place_faults(key: str, text: str, *, written: bool = False) -> Iterator[Fault]:
    """Yield the faults that the text of a folder or URL shows; `written`: it must be empty or a writable URL."""
    schemes = ", ".join(f"{scheme}://" for scheme in OBJECTS)
    try:
        place = place_of(text)
    except DataError as error:
        yield Fault(key, str(error))
        return
    if not isinstance(place, Url):
        if written and text:
            yield Fault(
                key,
                f"is {text!r}, no URL: give one of {schemes}, or leave it empty: checkpoints are in run.dir then, "
                "where the folder `checkpoints` may be a link to another disk",
            )
        return
    if written and place.scheme not in OBJECTS:
        yield Fault(key, f"is {text}: checkpoints are written to {schemes}, not to {place.scheme}://")
        return
    try:
        require_scheme(place)
    except DataError as error:
        yield Fault(key, str(error))
        return
    if not is_installed("obstore"):
        yield Fault(key, f"{text} requires the extra `remote` (obstore is not installed): run `{EXTRA}`")


def local_faults(key: str, text: str, remedy: str) -> Iterator[Fault]:
    """Yield the fault of a URL where a local folder is required."""
    if is_url(text):
        yield Fault(key, f"is the URL {text}, and must be a folder on a file system of this machine: {remedy}")


def demo_faults(demo: str, folders: dict[str, str]) -> Iterator[Fault]:
    """Yield faults of the folders of a demo, which must be at its places and hold no other shards.
    `folders`: the keys `shards` and `validation_shards`."""
    from data.demo.make import DEMOS, MARKER

    if demo not in DEMOS:
        return
    for name, text in folders.items():
        yield from local_faults(f"data.{name}", text, "the demo is made there")
    if any(is_url(text) for text in folders.values()):
        return
    folder = Path(folders["shards"]).parent
    places = {"shards": folder / "train", "validation_shards": folder / "held_out"}
    for name, place in places.items():
        if folders[name] and Path(folders[name]) != place:
            yield Fault(
                "data.demo",
                f"the {demo} demo would be made in {places['shards']} and {places['validation_shards']}, but "
                f"data.{name} is {folders[name]}: set data.demo= (empty) to train on shards of your own",
            )
            return
        if any(place.glob("*.tar")) and not (folder / MARKER).is_file():
            yield Fault(
                "data.demo",
                f"{place} has shards, but not those of the {demo} demo (there is no {folder / MARKER}). Set "
                "data.demo= (empty) to train on them",
            )
            return


KEY = "run.dir"


def folder_fault(folder: Path) -> Fault | None:
    """Return why a run cannot write to `folder`, as far as possible without creating it; None if it can."""
    standing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not standing.is_dir():
        what = f"is a link to {standing.readlink()}, and there is" if standing.is_symlink() else "is"
        return Fault(KEY, f"the folder {folder} cannot be made: {standing} {what} no folder; give another one")
    try:
        _write_into(standing)
    except OSError as error:
        return _refused(folder, error)
    return None


def make_folder(folder: Path) -> None:
    """Create the folder of a run, and check that it accepts files.

    Raises:
        ConfigError: it cannot be created or written, with the reason from the operating system.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_into(folder)
    except OSError as error:
        raise ConfigError([_refused(folder, error)]) from error


def _write_into(folder: Path) -> None:
    """Create a file without a name, which leaves nothing."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def _refused(folder: Path, error: OSError) -> Fault:
    reason = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return Fault(KEY, f"the folder {folder} cannot be written ({reason}); {_REMEDY}")


def runs_within(folder: Path, files: str) -> str:
    """Return a clause for messages about a folder that contains runs but is no run, newest first; empty if it has none.
    `files`: pattern of a run's files, from its folder."""
    runs = {folder / path.relative_to(folder).parts[0] for path in folder.glob(f"*/{files}")}
    newest = sorted(runs, key=lambda run: (-run.stat().st_mtime, run))
    named = " or ".join(map(str, newest[:_NAMED]))
    more = f", or another of {len(newest)}" if len(newest) > _NAMED else ""
    return f"; there are runs in it: give {named}{more}" if runs else ""


_NAMED = 3
_REMEDY = "give one that every rank can write"

"""Faults of keys that name places, on file systems or elsewhere. Imports no torch."""

from collections.abc import Iterator
from pathlib import Path

from data.errors import DataError
from data.storage.stores import EXTRA
from data.storage.url import OBJECTS, WEB, Url, is_url, place_of
from mimo_train.config.fault import Fault
from mimo_train.config.installed import is_installed


def place_faults(key: str, text: str, *, written: bool = False) -> Iterator[Fault]:
    """What is wrong with a folder or URL, as far as its text shows.

    Args:
        written: whether it must be a URL that a run can write to, or empty.
    """
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
    library = "obstore" if place.scheme in OBJECTS + WEB else "fsspec"
    if not is_installed(library):
        yield Fault(key, f"{text} needs the extra `remote` ({library} is not installed): run `{EXTRA}`")


def local_faults(key: str, text: str, remedy: str) -> Iterator[Fault]:
    """The fault of a URL where only a folder on a file system can be."""
    if is_url(text):
        yield Fault(key, f"is the URL {text}, and must be a folder on a file system of this machine: {remedy}")


def demo_faults(demo: str, given: dict[str, str]) -> Iterator[Fault]:
    """Faults of the folders of a demo. Making it replaces every *.tar of them: never where other shards are.

    Args:
        given: `shards` and `validation_shards`.
    """
    from data.demo.make import DEMOS, MARKER

    if demo not in DEMOS:
        return
    for name, text in given.items():
        yield from local_faults(f"data.{name}", text, "the demo is made there")
    if any(is_url(text) for text in given.values()):
        return
    folder = Path(given["shards"]).parent
    places = {"shards": folder / "train", "validation_shards": folder / "held_out"}
    for name, place in places.items():
        if given[name] and Path(given[name]) != place:
            yield Fault(
                "data.demo",
                f"the {demo} demo would be made in {places['shards']} and {places['validation_shards']}, but "
                f"data.{name} is {given[name]}: set data.demo= (empty) to train on shards of your own",
            )
            return
        if any(place.glob("*.tar")) and not (folder / MARKER).is_file():
            yield Fault(
                "data.demo",
                f"the {demo} demo would replace the shards of {place}, which are not a demo's (there is no "
                f"{folder / MARKER}): set data.demo= (empty) to train on them",
            )
            return

"""Finding shards: a folder, a glob, a brace range, or a list of these -> paths or URLs in a fixed order."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path

from data.errors import DataError
from data.index.braces import expand_braces, split_commas
from data.index.compressed import refuse_compressed, refuse_left_out
from data.index.energon import energon_part, energon_shards
from data.index.remote_shards import find_remote
from data.storage.files import require_file, retrying
from data.storage.url import Place, Url, is_url
from data.text_format import listed

_SUFFIX = ".tar"


def find_shards(
    pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Url],
) -> list[Place]:
    """Paths and URLs of the shards that `pattern` names.

    Accepted: a folder (its `*.tar`, sorted by name), a file, a glob (sorted), a brace range such as
    `x-{000000..000003}.tar` or choice `{a,b}.tar` (in the order written; each must exist), several of these separated
    by commas, or a sequence of them (in the order given); a folder of an energon dataset, `FOLDER:SPLIT` for one of its
    splits. Any may be a URL (s3, gs, az, http, https); a web server lists nothing, so
    that each of its shards must be named.

    Raises:
        DataError: nothing matches, or a named shard is missing (names `data.shards` and what was looked for).
        ShardError: a match is a compressed tar, or no file.
    """
    parts = patterns_of(pattern)
    if not parts:
        raise DataError(
            "data.shards is empty: give a folder, a glob, a brace range such as 'x-{000000..000003}.tar', or a list"
        )
    return [shard for part in parts for shard in _find_one(part)]


def patterns_of(pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Url]) -> list[str]:
    """The parts of what `find_shards` takes: a text may be several, separated by commas; a path is one, whatever its
    name."""
    if isinstance(pattern, str):
        return split_commas(pattern)
    if isinstance(pattern, os.PathLike):
        return [os.fspath(pattern)]
    return [piece for item in pattern for piece in (split_commas(item) if isinstance(item, str) else [_text(item)])]


def _text(item: str | os.PathLike[str] | Url) -> str:
    return str(item) if isinstance(item, Url) else os.fspath(item)


def _find_one(part: str) -> Sequence[Place]:
    if part.startswith("pipe:"):
        raise DataError(
            f"data.shards: {part!r} is a command, whose output cannot be indexed. Give the path or URL that it reads, "
            f"such as {_source_of(part)}"
        )
    if is_url(part) and not part.startswith("file://"):
        return [*find_remote(expand_braces(part))]
    if (of_energon := energon_part(part.removeprefix("file://"))) is not None:
        return _files(energon_shards(*of_energon))
    path = Path(part.removeprefix("file://")).expanduser()
    if path.is_dir():
        return _of_folder(path)
    if path.exists():
        refuse_compressed(path)
        return _files([path])
    found: list[Path] = []
    for name in expand_braces(str(path)):
        matches = [Path(name)] if os.path.exists(name) else [Path(match) for match in sorted(glob.glob(name))]
        if not matches:
            kind = "no file matches" if glob.has_magic(name) else "no such file or folder:"
            hint = "" if name == str(path) else f" (from {part!r})"
            raise DataError(f"data.shards: {kind} {name}{hint}; looked from {os.getcwd()}")
        for match in matches:
            refuse_compressed(match)
        found.extend(matches)
    return _files(found)


def _source_of(command: str) -> str:
    """Return the first URL in `command`, or an example of one."""
    urls = [word for word in command.split() if is_url(word)]
    return urls[0] if urls else "s3://bucket/x-{000000..000003}.tar"


def _holds_shards(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.endswith(_SUFFIX) for entry in entries)
    except OSError:
        return False


def _of_folder(folder: Path) -> list[Path]:
    with os.scandir(folder) as found:
        entries = [*found]
    names = sorted(name for name in map(attrgetter("name"), entries) if name.endswith(_SUFFIX) and name[0] != ".")
    if not names:
        for name in sorted(os.listdir(folder)):
            refuse_compressed(folder / name)
        inside = sorted(entry.name for entry in entries if entry.is_dir() and _holds_shards(Path(entry.path)))
        remedy = (
            f"give a folder inside of it that does: {listed([str(folder / name) for name in inside])}"
            if inside
            else "`mimo-train shards build` makes shards"
        )
        raise DataError(f"data.shards: the folder {folder} holds no *{_SUFFIX} file: {remedy}")
    refuse_left_out(folder, names, [entry.name for entry in entries])
    # What the folder itself says is a file needs no look of its own here: the catalogue looks at each.
    try:
        unclear = {entry.name for entry in entries if not entry.is_file()}
    except OSError:  # of a link that leads in a circle, nothing is known
        unclear = {*names}
    _files(folder / name for name in names if name in unclear)
    return [folder / name for name in names]


def _files(paths: Iterable[Path]) -> list[Path]:
    paths = [*paths]
    for path in paths:
        require_file(path, retrying(path.stat, f"{path}: cannot look at it"))
    return paths

"""Find shards: a folder, a glob, a brace range, or a list of these -> paths or URLs in a fixed order."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path

from data.errors import DataError, ReadError
from data.index.energon import energon_part, energon_shards
from data.index.shard_names import expand_braces, refuse_compressed, refuse_left_out, split_commas
from data.storage.files import require_file, retrying
from data.storage.stores import store_of
from data.storage.url import WEB, ObjectMeta, Place, Url, is_url
from data.text_format import listed

_SUFFIX = ".tar"


def find_shards(
    pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Url],
) -> list[Place]:
    """Return the paths and URLs of the shards that `pattern` names.

    A pattern is a folder (its `*.tar`, sorted), a file, a glob (sorted), a brace range `x-{000000..000003}.tar` or
    choice `{a,b}.tar` (in this order; each must exist), or several of these, as a sequence or separated by commas (in
    this order). It may be the folder of an energon dataset, or `FOLDER:SPLIT` for one of its splits. Any may be a URL
    (s3, gs, az, http, https). Web servers cannot list, so each shard must be named.

    Raises:
        DataError: nothing matches, or a named shard is missing. The message has `data.shards` and the name.
        ShardError: a match is a compressed tar, or no file.
    """
    parts = patterns_of(pattern)
    if not parts:
        raise DataError(
            "data.shards is empty: give a folder, a glob, a brace range such as 'x-{000000..000003}.tar', or a list"
        )
    return [shard for part in parts for shard in _find_one(part)]


def patterns_of(pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Url]) -> list[str]:
    """Return the parts of `find_shards`' argument: a text may have several, separated by commas; a path is one."""
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
    # Only check entries that the listing does not show as files; the catalogue checks all.
    try:
        unclear = {entry.name for entry in entries if not entry.is_file()}
    except OSError:  # a circular link
        unclear = {*names}
    _files(folder / name for name in names if name in unclear)
    return [folder / name for name in names]


def _files(paths: Iterable[Path]) -> list[Path]:
    paths = [*paths]
    for path in paths:
        require_file(path, retrying(path.stat, f"{path}: cannot look at it"))
    return paths


_FEW = 4  # objects of a folder that are requested singly instead of listing it


def find_remote(names: Sequence[str]) -> list[Url]:
    """Return the shards that URLs name, in order, with sizes and tags.

    Each URL is a file, a folder, or has a glob in its last part (both sorted). Raises ShardError for a compressed tar,
    DataError if a URL matches nothing, ReadError if a server does not answer.
    """
    urls = [Url.parse(name) for name in names]
    files = [url for url in urls if url.name.endswith(".tar") and not _is_glob(url)]
    for url in urls:
        refuse_compressed(str(url))
    known = _looked_at(files)
    found: list[Url] = []
    for url in urls:
        if url in known:
            found.append(_seen(known[url]))
        else:
            found += _found(url)
    return found


def _looked_at(files: Sequence[Url]) -> dict[Url, ObjectMeta]:
    """Return metadata of all files. Many in one folder are listed, with a thousand per answer."""
    by_folder: dict[Url, list[Url]] = {}
    for url in files:
        by_folder.setdefault(url.parent, []).append(url)
    known: dict[Url, ObjectMeta] = {}
    single: list[Url] = []
    for folder, of_folder in by_folder.items():
        if len(of_folder) <= _FEW or folder.scheme in WEB:
            single += of_folder
            continue
        there = {one.url: one for one in _listed(folder)}
        known |= {url: there[url] for url in of_folder if url in there}
        single += [url for url in of_folder if url not in there]
    with ThreadPoolExecutor(16) as pool:
        known |= zip(single, pool.map(_look, single), strict=True)
    return known


def _found(url: Url) -> list[Url]:
    of_folder = not _is_glob(url)
    folder = url if of_folder else url.parent
    if url.scheme in WEB:
        if not of_folder:
            raise DataError(f"data.shards: {url}: a web server lists nothing: name each shard, for example by a range")
        return [_seen(_look(url))]
    there = _listed(folder)
    found = [
        _seen(one)
        for one in there
        if (one.url.name.endswith(".tar") if of_folder else fnmatchcase(one.url.name, url.name))
    ]
    if not found and of_folder and not there:
        return [_seen(_look(url))]  # a shard without .tar in its name
    for one in found or there:
        refuse_compressed(str(one if isinstance(one, Url) else one.url))
    if not found:
        for one in there:
            refuse_tokens(str(one.url))
        raise DataError(f"data.shards: {folder} holds nothing that matches {'*.tar' if of_folder else url.name}")
    if of_folder:
        refuse_left_out(folder, [one.name for one in found], [one.url.name for one in there])
    return found


def refuse_tokens(url: str) -> None:
    """Raise DataError if `url` is named like a file of tokens (`data.indexed`) or its index."""
    if url.endswith((".idx", ".bin")):
        raise DataError(
            f"data.shards: {url}: .bin and .idx files are read from file systems only: copy them, or mount the storage"
        )


def _is_glob(url: Url) -> bool:
    return url.scheme not in WEB and re.search(r"[*?\[]", url.name) is not None


def _listed(folder: Url) -> list[ObjectMeta]:
    return retrying(lambda: [*store_of(folder).list(folder, deep=False)], f"{folder}: cannot list it")


def _look(url: Url) -> ObjectMeta:
    try:
        return retrying(lambda: store_of(url).look(url), f"{url}: cannot look at it")
    except ReadError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise DataError(f"data.shards: nothing is at {url} ({error.__cause__.strerror})") from error
        raise


def _seen(found: ObjectMeta) -> Url:
    return replace(found.url, seen=(found.size, found.tag) if found.tag else None)

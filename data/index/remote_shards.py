"""Finding shards that are objects or on web servers: a file, a folder, a glob."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase

from data.errors import DataError, ReadError
from data.index.compressed import refuse_compressed, refuse_left_out
from data.storage.files import retrying
from data.storage.stores import store_of
from data.storage.url import WEB, ObjectMeta, Url

_FEW = 4  # objects of a folder that are looked at one by one, instead of a list of all


def find_remote(names: Sequence[str]) -> list[Url]:
    """The shards that URLs name, in their order, with sizes and tags: each a file, a folder with them, or a glob in
    its last part (both sorted).

    Raises:
        ShardError: one is a compressed tar.
        DataError: one names nothing.
        ReadError: a server does not answer.
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
    """All of these. Many in one folder are taken from a list of it, which has a thousand in an answer."""
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
    """Raises DataError if `url` is named like a file of tokens (`data.indexed`) or its index."""
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

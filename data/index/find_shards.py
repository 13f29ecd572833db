"""Find shards: a folder, a glob, a brace range, or a list of these -> paths or URLs in a fixed order."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from braceexpand import braceexpand

from data.errors import DataError, ReadError, ShardError
from data.index.energon import energon_part, energon_shards
from data.storage.files import retrying
from data.storage.hub import download, is_hub
from data.storage.object_store import store_of
from data.storage.url import WEB, Place, Url, is_url
from data.text_format import listed, plural

Shards = str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Url]
"""Names of shards, see `find_shards`."""

TABLE = ".parquet"
TRAIN = ("train", "training")
_SPLITS = frozenset([*TRAIN, "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"])
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")


def find_shards(pattern: Shards) -> list[Place]:
    """Return the paths and URLs of the shards that `pattern` names.

    A pattern is a folder (its `*.tar`, sorted, or the parquet files of its train split), a file, a glob (sorted), a
    brace range `x-{000000..000003}.tar` or choice `{a,b}.tar` (in this order; each must exist), or several of these, as
    a sequence or separated by commas (in this order). It may be the folder of an energon dataset, or `FOLDER:SPLIT` for
    one of its splits. Any may be a URL (s3, gs, az, http, https), or a dataset of the Hugging Face hub,
    `hf://datasets/ORG/NAME`. Web servers cannot list, so each shard must be named.

    Raises:
        DataError: nothing matches, or a named shard is missing. The message has `data.shards` and the name.
        ShardError: a match is a compressed tar.
    """
    parts = patterns_of(pattern)
    if not parts:
        raise DataError(
            "data.shards is empty: give a folder, a glob, a brace range such as 'x-{000000..000003}.tar', or a list"
        )
    return [shard for part in parts for shard in _find_part(part)]


def patterns_of(pattern: Shards) -> list[str]:
    """Return the parts of `find_shards`' argument: a text may have several, separated by commas; a path is one."""
    items = [pattern] if isinstance(pattern, str | os.PathLike) else pattern
    return [part for item in items for part in (split_commas(item) if isinstance(item, str) else [str(item)])]


def _find_part(part: str) -> Sequence[Place]:
    if part.startswith("pipe:"):
        words = [word for word in part.removeprefix("pipe:").split() if is_url(word) or word.endswith(".tar")]
        raise DataError(
            f"data.shards: {part!r} is a command, whose output cannot be indexed. Give the path or URL that it reads, "
            f"such as {words[0] if words else 's3://bucket/x-{000000..000003}.tar'}"
        )
    if is_hub(part):
        return [path for name in expand_braces(part) for path in download(Url.parse(name), _choose_of_hub)]
    if is_url(part) and not part.startswith("file://"):
        return _find_urls([Url.parse(name) for name in expand_braces(part)])
    part = part.removeprefix("file://")
    if (dataset := energon_part(part)) is not None:
        return energon_shards(*dataset)
    path = Path(part).expanduser()
    if path.is_dir():
        return _find_in_folder(path)
    shards: list[Path] = []
    for name in [str(path)] if path.exists() else expand_braces(str(path)):
        matches = [name] if os.path.exists(name) else sorted(glob.glob(name))
        if not matches:
            kind = "no file matches" if glob.has_magic(name) else "no such file or folder:"
            hint = "" if name == str(path) else f" (from {part!r})"
            raise DataError(f"data.shards: {kind} {name}{hint}; looked from {os.getcwd()}")
        refuse_compressed(*matches)
        shards += map(Path, matches)
    return shards


def _find_in_folder(folder: Path) -> list[Path]:
    names = sorted(os.listdir(folder))
    shards = [name for name in names if name.endswith(".tar") and name[0] != "."]
    if not shards:
        inside = sorted({str(path.parent) for path in folder.glob("*/*.tar")})
        tables = sorted(path for path in folder.rglob(f"*{TABLE}") if "/." not in f"/{path.relative_to(folder)}")
        # img2dataset writes a parquet file without images next to each tar or folder of files.
        if not inside and not all((path.parent / path.stem).is_dir() for path in tables):
            return [*_of_train_split(folder, tables)]
        refuse_compressed(*(folder / name for name in names))
        remedy = f"give a folder inside of it that does: {listed(inside)}"
        raise DataError(
            f"data.shards: the folder {folder} holds no *.tar and no *.parquet file with samples: "
            f"{remedy if inside else '`mimo-train shards build` makes shards'}"
        )
    _require_all_taken(folder, shards, names)
    return [folder / name for name in shards]


def split_files[File: (Path, Url)](folder: File, files: Iterable[File]) -> dict[str, list[File]]:
    """Group the files of a dataset by `SPLIT` or `CONFIG/SPLIT`, as folders or the beginnings of names tell, as on the
    Hugging Face hub: `data/train-00000-of-00001.parquet`. All are "" if no name tells a split."""
    splits: dict[str, list[File]] = {}
    start, has_split = len(str(folder).rstrip("/")) + 1, False
    for file in files:
        *folders, name = str(file)[start:].split("/")
        parts = [part for part in folders if part != "data"]
        word = re.match("[a-z]*", name)
        if word is not None and word[0] in _SPLITS and parts[-1:] != [word[0]]:
            parts.append(word[0])
        has_split = has_split or not _SPLITS.isdisjoint(parts)
        splits.setdefault("/".join(parts), []).append(file)
    return splits if has_split or len(splits) > 1 else {"": [file for of_split in splits.values() for file in of_split]}


def _of_train_split[File: (Path, Url)](folder: File, files: Sequence[File]) -> Sequence[File]:
    splits = split_files(folder, files)
    if len(splits) == 1:
        return files
    names = [name for name in splits if name.rpartition("/")[2] in TRAIN]
    if len(names) != 1:
        example = str(next(iter(splits.values()))[0])
        raise DataError(
            f"data.shards: {folder} has parquet files of {listed([name or 'no split' for name in sorted(splits)], 8)}: "
            f"name those to read, such as {example}"
        )
    return splits[names[0]]


def _choose_of_hub(url: Url, files: Sequence[Url]) -> Sequence[Url]:
    """Return the files of a dataset of the hub that a URL names: a file, a glob or a folder."""
    if re.search(r"[*?\[]", url.path) or url.name.endswith((".tar", TABLE)):
        shards: Sequence[Url] = [file for file in files if fnmatchcase(file.path, url.path)]
        if "**" not in url.path:
            shards = [file for file in shards if file.path.count("/") == url.path.count("/")]
    else:
        inside = [file for file in files if file.path.startswith(f"{url.path}/")]
        shards = [file for file in inside if file.name.endswith(".tar")]
        if not shards and (tables := [file for file in inside if file.name.endswith(TABLE)]):
            shards = _of_train_split(url, tables)
    if not shards:
        raise DataError(
            f"data.shards: {url} has no such parquet file or tar. The hub converts most datasets: try the revision "
            f"{'/'.join(str(url).split('/')[:5])}@~parquet"
        )
    return shards


def _find_urls(urls: Sequence[Url]) -> list[Url]:
    refuse_compressed(*urls)
    with ThreadPoolExecutor(64) as pool:  # a request for each
        return [shard for shards in pool.map(_find_url, urls) for shard in shards]


def _find_url(url: Url) -> list[Url]:
    """Return the shards at a URL: a file, a folder, or a glob in its last part, with sizes and tags."""
    is_glob = url.scheme not in WEB and re.search(r"[*?\[]", url.name) is not None
    if url.scheme in WEB or (url.name.endswith((".tar", TABLE)) and not is_glob):
        return [_look(url)]
    folder, pattern = (url.parent, url.name) if is_glob else (url, "*.tar")
    objects = retrying(lambda: store_of(folder).list(folder, deep=False), f"{folder}: cannot list it")
    every = [replace(meta.url, seen=meta.seen) for meta in objects]
    shards = [shard for shard in every if fnmatchcase(shard.name, pattern)]
    if not shards and not is_glob and (tables := [shard for shard in every if shard.name.endswith(TABLE)]):
        return [*_of_train_split(folder, tables)]
    if not objects and not is_glob:
        return [_look(url)]  # a shard without .tar in its name
    refuse_compressed(*(shards or (meta.url for meta in objects)))
    if not shards:
        raise DataError(f"data.shards: {folder} holds nothing that matches {pattern}")
    if not is_glob:
        _require_all_taken(folder, [shard.name for shard in shards], [meta.url.name for meta in objects])
    return shards


def _look(url: Url) -> Url:
    try:
        meta = retrying(lambda: store_of(url).look(url), f"{url}: cannot look at it")
    except ReadError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise DataError(f"data.shards: nothing is at {url} ({error.__cause__.strerror})") from error
        raise
    return replace(url, seen=meta.seen)


def expand_braces(text: str) -> list[str]:
    """Expand braces as bash does: `a-{08..10}` -> a-08, a-09, a-10; `{x,y}` -> x, y. Unbalanced ones stay."""
    try:
        return [*braceexpand(text, escape=False)]
    except ValueError:
        return [text]


def split_commas(text: str) -> list[str]:
    """Split at commas outside braces."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def refuse_compressed(*shards: str | os.PathLike[str] | Url) -> None:
    """Raise ShardError if a shard is named like a compressed tar."""
    for shard in shards:
        if str(shard).lower().endswith(_COMPRESSED):
            raise ShardError(
                f"{shard}: compressed tars cannot be indexed, because their members have no fixed place in the file. "
                "Decompress it once (for example `gunzip FILE.tar.gz`; images and audio are compressed already)."
            )


def _require_all_taken(folder: Place, shards: Iterable[str], names: Iterable[str]) -> None:
    """Raise ShardError if a folder with `names` has compressed tars without an unpacked one among the `shards`."""
    stems = {shard.removesuffix(".tar") for shard in shards}
    others = [name for name in sorted(names) if name.lower().endswith(_COMPRESSED)]
    others = [name for name in others if name[: name.lower().rindex(".t")] not in stems]
    if others:
        raise ShardError(
            f"{folder}: {plural(len(others), 'compressed tar')}, such as {others[0]}, would be left out. Decompress "
            f"them, or name the shards to read, such as '{folder}/*.tar'"
        )

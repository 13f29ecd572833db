"""`mimo-train shards index|inspect|verify` of .bin and .idx files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data.text_format import plural

if TYPE_CHECKING:
    from data.indexed.file import IndexedFile

_AT_ONCE = 1 << 22  # tokens that are read together


def needs_no_index(pattern: str) -> int:
    """`index`: they bring their own. Raises DataError for files that cannot be used."""
    for file in _files(pattern):
        print(f"{_line(file)}: needs no other index")
    return 0


def inspect(pattern: str, samples: int) -> int:
    """How many documents and tokens they have, how long documents are, and the first ones' tokens. Raises DataError."""
    import numpy as np

    from data.storage.reader import ShardReader

    reader = ShardReader()
    for file in _files(pattern):
        lengths = np.diff(file.starts(np.arange(file.documents + 1)))
        print(_line(file))
        if len(lengths):
            print(f"  tokens of a document: {lengths.min():,} to {lengths.max():,}, {lengths.mean():,.1f} on average")
        for document in range(min(samples, file.documents)):
            (first,) = file.starts(np.array([document])).tolist()
            tokens = file.read(reader, first, min(int(lengths[document]), 16)).tolist()
            print(f"  document {document}, {plural(int(lengths[document]), 'token')}: {' '.join(map(str, tokens))}")
    return 0


def verify(pattern: str) -> int:
    """Look at every place of the indexes, and read every token. Raises DataError for files that cannot be used."""
    from data.storage.reader import ShardReader

    reader = ShardReader()
    for file in _files(pattern):
        file.require_whole()
        most, least = -1, 0
        for first in range(0, file.tokens, _AT_ONCE):
            tokens = file.read(reader, first, min(_AT_ONCE, file.tokens - first))
            most, least = max(most, int(tokens.max())), min(least, int(tokens.min()))
        print(f"{_line(file)}, the largest {most}")
        if least < 0:
            print(f"bad: {file.path}: has the token {least}, which is none")
            return 1
    return 0


def _files(pattern: str) -> list[IndexedFile]:
    from data.indexed.file import IndexedFile
    from data.indexed.find import find_indexed

    return [IndexedFile(path) for path in find_indexed(pattern)]


def _line(file: IndexedFile) -> str:
    documents, tokens = plural(file.documents, "document"), plural(file.tokens, "token")
    return f"{file.path}: {documents}, {tokens} ({file.dtype.name})"

"""The bucket or server of a URL. The libraries for them are imported when a URL is first used."""

from __future__ import annotations

import os
import threading

from data.errors import DataError
from data.storage.base import Store
from data.storage.url import OBJECTS, WEB, Url

EXTRA = "pip install 'mimo-train[remote]'"

_STORES: dict[tuple[str, str], Store] = {}
_GUARD = threading.Lock()
_FORKED = False


def _forked() -> None:
    global _GUARD, _FORKED
    _FORKED, _GUARD = bool(_STORES), threading.Lock()


os.register_at_fork(after_in_child=_forked)


def store_of(url: Url) -> Store:
    """The bucket or server of a URL.

    Raises:
        DataError: the library is not installed, or this process was forked from one that has used storage: its threads
            are not here, and the library would wait for them for ever.
    """
    with _GUARD:
        if _FORKED:
            raise DataError(
                f"{url}: this process was forked from one that had used object storage already, which cannot go on "
                "here: start processes by spawn or forkserver"
            )
        place = url.scheme, url.host
        if place not in _STORES:
            _STORES[place] = _opened(url)
        return _STORES[place]


def _opened(url: Url) -> Store:
    try:
        if url.scheme in OBJECTS + WEB:
            from data.storage.objects import ObjectStore

            return ObjectStore(url)
        from data.storage.other import OtherStore

        return OtherStore(url)
    except ImportError as error:
        if isinstance(error.__cause__, ImportError):  # as fsspec says it
            library = error.__cause__.name
            raise DataError(
                f"{url}: reading it needs a library that is not installed ({library}; fsspec says: {error}): install it"
            ) from error
        package = f" ({error.name} is not installed)" if error.name else ""
        raise DataError(f"{url}: reading it needs the extra `remote`{package}: run `{EXTRA}`") from error

"""Paths and URLs by the thousand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import overload

from data.storage.url import Place, Url


class PlaceList(Sequence[Place]):
    """Places whose `Path`s are made when they are asked for: to make and to name 10,000 takes longer than to look at
    the files.

    Attributes:
        texts: paths as `str(Path)` writes them, or URLs.
    """

    def __init__(self, places: Iterable[Place | str]) -> None:
        """
        Args:
            places: with texts of paths only.
        """
        self.texts: list[str | Url] = [str(place) if isinstance(place, Path) else place for place in places]
        self._made: dict[int, Place] = {}
        self._folder: str | None = None  # of all of them, where it is known

    @classmethod
    def of_folder(cls, folder: Path, names: list[str]) -> PlaceList:
        """Files of one folder."""
        before = str(folder / "_")[:-1]
        places = cls(())
        places.texts = [before + name for name in names]
        places.names, places._folder = names, before.rpartition("/")[0]
        return places

    @classmethod
    def joined(cls, lists: Sequence[PlaceList]) -> PlaceList:
        """All of several, one behind the other."""
        return lists[0] if len(lists) == 1 else cls(text for one in lists for text in one.texts)

    @cached_property
    def names(self) -> list[str]:
        """`name` of each."""
        return [one.name if isinstance(one, Url) else one.rpartition("/")[2] for one in self.texts]

    @cached_property
    def is_remote(self) -> bool:
        """Whether any is a URL."""
        return self._folder is None and any(isinstance(text, Url) for text in self.texts)

    def by_folder(self) -> list[tuple[PlaceList, Sequence[int]]]:
        """(those that are in one folder, their numbers here) of each folder, in the order in which they occur."""
        if self._folder is not None:
            return [(self, range(len(self)))]
        numbers: dict[str, list[int]] = {}
        for number, one in enumerate(self.texts):
            numbers.setdefault(str(one).rpartition("/")[0], []).append(number)
        if len(numbers) == 1:
            return [(self, range(len(self)))]
        return [(PlaceList(self.texts[number] for number in own), own) for own in numbers.values()]

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[Place]:
        return (self[at] for at in range(len(self.texts)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    def __repr__(self) -> str:
        return repr([*self])

    @overload
    def __getitem__(self, at: int) -> Place: ...
    @overload
    def __getitem__(self, at: slice) -> PlaceList: ...
    def __getitem__(self, at: int | slice) -> Place | PlaceList:
        if isinstance(at, slice):
            some = PlaceList(self.texts[at])
            some._folder = self._folder
            return some
        made = self._made.get(at)
        if made is None:
            text = self.texts[at]
            made = self._made[at] = text if isinstance(text, Url) else Path(text)
        return made

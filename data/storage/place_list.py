"""Paths and URLs by the thousand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

    def names(self) -> list[str]:
        """`name` of each."""
        return [one.name if isinstance(one, Url) else one.rpartition("/")[2] for one in self.texts]

    def folders(self) -> list[str]:
        """The text of what each is in."""
        return [str(one).rpartition("/")[0] for one in self.texts]

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
            return PlaceList(self.texts[at])
        made = self._made.get(at)
        if made is None:
            text = self.texts[at]
            made = self._made[at] = text if isinstance(text, Url) else Path(text)
        return made

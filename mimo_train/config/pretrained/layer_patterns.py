"""Regular expressions of PEFT that name layers (`rank_pattern`, `alpha_pattern`), matched in bounded work. Imports no
torch.

They come with an adapter, from whoever made that, and Python's `re` goes back over a name as often as a pattern makes
it: `(a+)+b` would keep a run from starting for years. Here all places that a part of a pattern may end at are followed
at once, so that nothing is tried twice; what has no end that way either is counted, and given up.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

WORK = 1_000_000
"""Steps that a match may take. The name of a layer and a usual pattern take about a hundred."""
LONGEST = 1000
"""Characters of a pattern."""

_TOKEN = re.compile(
    r"(?P<one>\.|\\[dDwWsS]|\\[^a-zA-Z0-9]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[\]().*+?{}|^$])"
    r"|(?P<open>\((?:\?:)?(?!\?))|(?P<close>\))|(?P<either>\|)"
    r"|(?P<again>[*+?]|\{(?P<least>\d{0,4})(?P<comma>,?)(?P<most>\d{0,4})\})\??(?![*+?{])"
    r"|(?P<edge>[\^$])"
)

type _Places = frozenset[int]


class _Follow(NamedTuple):
    """A name, and what may still be done with it."""

    name: str
    spend: Callable[[int], None]


type _Part = Callable[[_Follow, _Places], _Places]
"""Where a part of a pattern may end that begins at one of the given places."""


def fits(pattern: str, name: str) -> bool:
    """Whether PEFT takes a layer for one that a pattern names: the whole name, or what stands behind a dot in it.

    Raises:
        ValueError: the pattern is none, has what is not understood here (groups that look around or back), or takes
            too much work.
    """
    if len(pattern) > LONGEST:
        raise ValueError(f"the pattern {pattern[:40]!r}... has {len(pattern)} characters, above {LONGEST}")
    whole, rest = _either(pattern, 0)
    if rest != len(pattern):
        raise ValueError(f"the pattern {pattern!r} is not understood from {pattern[rest:]!r} on")
    left = WORK

    def spend(steps: int) -> None:
        nonlocal left
        left -= steps
        if left < 0:
            raise ValueError(f"the pattern {pattern!r} is given up: it takes more than {WORK:,} steps")

    starts = frozenset([0, *(at + 1 for at, one in enumerate(name) if one == ".")])
    return len(name) in whole(_Follow(name, spend), starts)


def _either(pattern: str, at: int) -> tuple[_Part, int]:
    """(what follows alternatives, where they end): at the end, or at a `)`."""
    choices: list[list[_Part]] = [[]]
    while (token := _TOKEN.match(pattern, at)) and token.lastgroup != "close" and token["close"] is None:
        at = token.end()
        if token["either"]:
            choices.append([])
        elif token["open"]:
            part, at = _either(pattern, at)
            if pattern[at : at + 1] != ")":
                raise ValueError(f"the pattern {pattern!r} has a group without an end, or one that is not understood")
            choices[-1].append(part)
            at += 1
        elif token["again"]:
            if not choices[-1]:
                raise ValueError(f"the pattern {pattern!r} repeats nothing at {token[0]!r}")
            choices[-1].append(_again(choices[-1].pop(), *_counts(token)))
        elif token["edge"]:
            choices[-1].append(_edge(token["edge"] == "^"))
        else:
            choices[-1].append(_one(re.compile(token["one"], re.DOTALL)))
    return _any_of([_in_turn(parts) for parts in choices]), at


def _counts(token: re.Match[str]) -> tuple[int, float]:
    """The least and the largest number of repetitions."""
    if token["again"] in ("*", "+", "?"):
        return int(token["again"] == "+"), 1 if token["again"] == "?" else float("inf")
    least = int(token["least"] or 0)
    most = int(token["most"]) if token["most"] else float("inf") if token["comma"] else least
    if (not token["least"] and not token["comma"]) or most < least:
        raise ValueError(f"{token[0]!r} is no number of repetitions")
    return least, most


def _one(character: re.Pattern[str]) -> _Part:
    def follow(of: _Follow, places: _Places) -> _Places:
        of.spend(len(places) + 1)
        return frozenset(at + 1 for at in places if at < len(of.name) and character.fullmatch(of.name[at]))

    return follow


def _edge(is_start: bool) -> _Part:
    return lambda of, places: places & {0 if is_start else len(of.name)}


def _in_turn(parts: list[_Part]) -> _Part:
    def follow(of: _Follow, places: _Places) -> _Places:
        for part in parts:
            of.spend(1)
            places = part(of, places)
        return places

    return follow


def _any_of(parts: list[_Part]) -> _Part:
    return lambda of, places: frozenset().union(*(part(of, places) for part in parts))


def _again(part: _Part, least: int, most: float) -> _Part:
    def follow(of: _Follow, places: _Places) -> _Places:
        for _ in range(least):
            before, places = places, part(of, places)
            if places == before:  # so it stays
                break
        found, new, count = places, places, least
        while new and count < most:
            new, count = part(of, new) - found, count + 1
            found |= new
        return found

    return follow

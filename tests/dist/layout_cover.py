"""Which rows of the parity table are trained by default: few that have together what any row of
their family of models has."""

import re
from itertools import combinations

from tests.dist.layout_tables import CASES, MODELS, Row


def features(row: Row) -> frozenset[str]:
    """What is special about a layout, so that a fault may show at it and at no other.

    By module its axes and their sizes' kind, what it does beside another axis, where it stands to its neighbours, and
    each change of the run.
    """
    found = {change.removeprefix("modules.") for change in row.changes}
    for module, sizes in row.sizes.items():
        axes = [re.sub(r"\d", "", axis) for axis in sizes.split()]
        found |= {f"{module} {axis}" for axis in axes}
        if module == "language":
            found |= {f"{one} x {other}" for one in axes for other in axes if one < other}
        if row.size(module, "pp") > 2:
            found.add(f"{module} middle stage")
    if "data.pack=true" in row.changes:
        found |= {f"packed, {axis}" for axis in re.sub(r"\d", "", row.sizes["language"]).split()}
    place = "first ranks" if row.placement.startswith("{") else row.placement
    if len(row.sizes) > 1:
        found |= {place, *_neighbours(row, place)}
    return frozenset(found)


def _neighbours(row: Row, place: str) -> set[str]:
    """How encoders stand to the language model: who has more replicas, what is cut on both sides, who stands where."""
    found = set()
    first = {name: int(rank) for name, rank in re.findall(r"(\w+): (\d+)", row.placement)}
    for encoder in row.sizes.keys() - {"language"}:
        same = place == "shared" or (first and first[encoder] == first["language"])
        way = "same ranks" if same else "apart"
        replicas = row.size(encoder, "dp") - row.size("language", "dp")
        found.add(f"{way}, {'fan-in' if replicas > 0 else 'fan-out' if replicas < 0 else 'one to one'}")
        cut = [axis for axis in ("tp", "pp", "vpp", "cp", "dp") if row.size("language", axis) > 1]
        found |= {f"{way}, before {axis}" for axis in cut}
        if row.size(encoder, "tp") > 1:
            found |= {f"{way}, tp before {axis}" for axis in cut}
        if first and first[encoder] > first["language"]:
            found.add("behind the language model")
    if len(first) > 2:
        found.add(f"encoders {'on the same ranks' if len(set(first.values())) < len(first) else 'apart'}")
        pairs = combinations(sorted(first), 2)
        chunks = ", before vpp" if row.size("language", "vpp") > 1 else ""
        found |= {f"{one} with {other}{chunks}" for one, other in pairs if first[one] == first[other]}
    return found


def cases_of(family: str) -> list[tuple[str, Row, frozenset[str]]]:
    """Every model and row of a family, with the features of the row, that of being this model, and those of replicas
    where they have different numbers of images."""
    found = []
    for model, row in CASES:
        if MODELS[model].family == family:
            of = features(row)
            uneven = {f"uneven, {feature}" for feature in of if "fan-" in feature and MODELS[model].uneven}
            found.append((model, row, of | uneven | {model}))
    return found


def chosen(family: str) -> list[tuple[str, Row]]:
    """Few rows of a family that have every feature of all its rows: again and again the row with most that is missing,
    of several the first."""
    cases, picked = cases_of(family), []
    missing = frozenset().union(*(features for *_, features in cases))
    while missing:
        model, row, found = max(cases, key=lambda case: len(case[2] & missing))
        picked.append((model, row))
        missing -= found
    return picked


FAMILIES = tuple(dict.fromkeys(model.family for model in MODELS.values()))

DEFAULT = sorted((case for family in FAMILIES for case in chosen(family)), key=CASES.index)
"""Rows that are trained by default, in the order of the table."""

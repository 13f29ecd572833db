"""Layouts drawn at random, as config overrides: legal ones, and illegal ones that break one rule of a legal one."""

import math
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from hypothesis import strategies as st

BATCH, MICROBATCH, LAYERS = 8, 4, 2
"""Samples of a step and of a microbatch, and layers of every module, at every layout; a language model alone has twice
as many, so that it can be interleaved."""

MODELS = {
    ("language",): "gpt_tiny",
    ("images", "language"): "vlm_digits",
    ("images", "details", "language"): "vlm_digits",
}
"""The shipped run behind each set of modules."""

DETAILS = (
    "encoder@modules.details.encoder=vit_tiny",
    "projector@modules.details.projector=linear",
    "modules.details.encoder.patch_size=24",
)


CHANGES = (
    {},
    {"optim.distributed_optimizer": False},
    {"train.recompute": "full"},
    {"modules.language.recompute": "selective"},
    {"modules.images.balance": "patches"},
)
"""What goes with a layout and changes no number."""


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of modules and their place."""

    sizes: dict[str, dict[str, int]]
    """By module, `language` last."""
    first: dict[str, int] = field(default_factory=dict)
    """First rank of each module; empty: `mode` decides."""
    mode: str = "disjoint"
    more: dict[str, Any] = field(default_factory=dict)
    """Other values, by key."""

    @property
    def config(self) -> str:
        """Name of the shipped run."""
        return MODELS[tuple(self.sizes)]

    @property
    def model(self) -> tuple[str, ...]:
        """Overrides that make the model: the same for all layouts of the same modules."""
        small = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4}
        parts = {name: "llm" if name == "language" else "encoder" for name in self.sizes}
        return (
            *(DETAILS if "details" in self.sizes else ()),
            *(f"modules.{name}.{part}.{key}={value}" for name, part in parts.items() for key, value in small.items()),
            *(f"modules.{name}.{part}.num_layers={layers(self.sizes)}" for name, part in parts.items()),
            *(f"modules.{name}.encoder.class_token=true" for name in self.sizes if name == "images"),
            "modules.language.llm.num_query_groups=4",
        )

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of model, layout and batch."""
        axes = {name: dict.fromkeys(("tp", "cp", "dp", "pp"), 1) | sizes for name, sizes in self.sizes.items()}
        values = {
            **{f"modules.{name}.layout.{axis}": size for name, of in axes.items() for axis, size in of.items()},
            "placement.mode": self.mode,
            "train.global_batch_size": BATCH,
            "train.micro_batch_size": MICROBATCH // max(1, axes["language"]["dp"]),
            **self.more,
        }
        if self.first:
            values["placement.first_rank"] = "{" + ", ".join(f"{name}: {at}" for name, at in self.first.items()) + "}"
        return (*self.model, *(f"{key}={str(value).lower()}" for key, value in values.items()))


def one_process(modules: tuple[str, ...]) -> Layout:
    """These modules on one process."""
    return Layout({name: {} for name in modules}, mode="shared")


def layers(sizes: dict[str, dict[str, int]]) -> int:
    """Layers of every module of a layout with these modules."""
    return LAYERS * (2 if len(sizes) == 1 else 1)


def ranks(sizes: dict[str, int]) -> int:
    """Ranks of a module of these sizes."""
    return math.prod(sizes.get(axis, 1) for axis in ("tp", "cp", "dp", "pp"))


def keeps_to_nodes(layout: Layout, node: int) -> bool:
    """Whether every tensor-parallel group stands on one node: at its first ranks, or in some order of modules."""
    if layout.mode == "shared":
        return _keep(layout, dict.fromkeys(layout.sizes, 0), node)
    if layout.first:
        return _keep(layout, layout.first, node)
    return any(_keep(layout, _one_after_the_other(layout.sizes, order), node) for order in permutations(layout.sizes))


def _keep(layout: Layout, first: dict[str, int], node: int) -> bool:
    return all(
        start // node == (start + sizes.get("tp", 1) - 1) // node
        for name, sizes in layout.sizes.items()
        for start in range(first[name], first[name] + ranks(sizes), sizes.get("tp", 1))
    )


def _one_after_the_other(sizes: dict[str, dict[str, int]], order) -> dict[str, int]:
    first, following = {}, 0
    for name in order:
        first[name], following = following, following + ranks(sizes[name])
    return first


@st.composite
def legal_layouts(draw, most_ranks: int = 6) -> Layout:
    """Layouts of some numbers of modules, disjoint, shared, mixed or with first ranks of their own, with holes too."""
    names = draw(st.sampled_from(list(MODELS)))
    encoders = names[:-1]
    language = draw(_sizes(most_ranks - bool(encoders and draw(st.booleans())), ("tp", "cp", "dp", "pp")))
    stage = ranks(language) // language["pp"]
    sizes, blocks, left = {}, {"language": ["language"]}, most_ranks - ranks(language)
    for name in encoders:
        apart = [head for head in blocks if head != "language"]
        where = draw(st.sampled_from(["language", *apart, *(["apart"] if left else [])]))
        if where == "apart":
            sizes[name] = draw(_sizes(left, ("tp", "dp", "pp")))
            left -= ranks(sizes[name])
            blocks[name] = [name]
            continue
        pp = 1 if where == "language" else sizes[where]["pp"]
        width = stage if where == "language" else ranks(sizes[where]) // pp
        tp = draw(st.sampled_from([tp for tp in (1, 2, 4) if width % tp == 0]))
        sizes[name] = {"tp": tp, "dp": width // tp, "pp": pp}
        blocks[where].append(name)
    sizes["language"] = language
    for name, of in sizes.items():
        # The images of `images` are ten tokens each.
        if of["tp"] == 2 or (of["tp"] == 4 and name != "images"):
            of["sp"] = draw(st.booleans())
    if not encoders and language["pp"] == 2 and draw(st.booleans()):
        language["vpp"] = 2
    more = draw(st.sampled_from([change for change in CHANGES if encoders or "images" not in str(change)]))
    return draw(_on_nodes(draw(_placed(Layout(sizes, more=more), blocks))))


@st.composite
def _sizes(draw, most: int, axes: tuple[str, ...]) -> dict[str, int]:
    sizes = dict.fromkeys(axes, 1)
    for axis in draw(st.permutations(axes)):
        choices = [1, 2, 4] if axis in ("tp", "dp") else [1, 2]
        sizes[axis] = draw(st.sampled_from([size for size in choices if ranks(sizes) * size <= most]))
    return sizes


@st.composite
def _placed(draw, layout: Layout, blocks: dict[str, list[str]]) -> Layout:
    """At first ranks of its own, or as a mode places it where that is the same."""
    modes = ["first ranks"]
    if len(blocks) == len(layout.sizes):
        modes.append("disjoint")
    if len(blocks) == 1:
        modes.append("shared")
    mode = draw(st.sampled_from(modes))
    if mode != "first ranks":
        return replace(layout, mode=mode)
    first, following = {}, 0
    idle = draw(st.booleans())
    for head in draw(st.permutations(list(blocks))):
        following += draw(st.integers(0, 2)) if idle else 0
        first |= dict.fromkeys(blocks[head], following)
        following += max(ranks(layout.sizes[name]) for name in blocks[head])
    return replace(layout, first=first, more=layout.more | {"placement.allow_idle": idle})


@st.composite
def _on_nodes(draw, layout: Layout) -> Layout:
    node = draw(st.integers(0, 8))
    if node == 0 or (layout.first and min(layout.first.values()) >= node):
        return layout
    across = not keeps_to_nodes(layout, node) or draw(st.booleans())
    nodes = {"placement.ranks_per_node": node, "placement.tp_across_nodes": across}
    return replace(layout, more=layout.more | nodes)


@dataclass(frozen=True)
class Broken:
    """A layout that breaks one rule, and how the key begins that must be named."""

    layout: Layout
    key: str


@st.composite
def illegal_layouts(draw, most_ranks: int = 6) -> Broken:
    """Legal layouts with one rule broken."""
    return draw(st.sampled_from(_breaks(draw(legal_layouts(most_ranks)))))


def _breaks(layout: Layout) -> list[Broken]:
    """Every way to break one rule of a legal layout."""
    found = [
        *(_resized(layout, name, axis, 0) for name in layout.sizes for axis in ("tp", "dp", "pp", "cp")),
        *(_resized(layout, name, "tp", 3) for name in layout.sizes),
        *(_resized(layout, name, "pp", layers(layout.sizes) + 1) for name in layout.sizes),
        *(_resized(layout, name, "ep", 2) for name in layout.sizes),
        *(_resized(layout, name, axis, 2) for name in layout.sizes if name != "language" for axis in ("cp", "vpp")),
        _with(layout, "train.global_batch_size", BATCH + 1),
        _with(layout, "train.micro_batch_size", 0),
        _with(layout, "placement.mode", "stacked"),
        _with(layout, "placement.ranks_per_node", -1),
        _with(layout, "data.sequence_length", 71 if layout.sizes["language"].get("cp", 1) > 1 else 0),
    ]
    if len(layout.sizes) > 1:
        found.append(_resized(layout, "language", "vpp", 2))
    for name, sizes in layout.sizes.items():
        if sizes.get("tp", 1) > 1 and layout.more.get("placement.ranks_per_node", 0) == 0:
            nodes = {"placement.ranks_per_node": 1, "placement.tp_across_nodes": False}
            if min(layout.first.values(), default=0) == 0:
                found.append(Broken(replace(layout, more=layout.more | nodes), f"modules.{name}.layout.tp"))
    if layout.first:
        found += _misplaced(layout)
    elif layout.mode == "shared":
        found.append(Broken(replace(layout, first=dict.fromkeys(layout.sizes, 0)), "placement.first_rank"))
        for name, sizes in layout.sizes.items():
            if name != "language" and sizes["dp"] < MICROBATCH:
                found.append(_resized(layout, name, "dp", 2 * sizes["dp"]))
    return found


def _misplaced(layout: Layout) -> list[Broken]:
    def moved(first: dict[str, int], key: str = "", **more: Any) -> Broken:
        return Broken(
            replace(layout, first=first, more=layout.more | more),
            f"placement.first_rank{key}",
        )

    first, size = layout.first, {name: ranks(sizes) for name, sizes in layout.sizes.items()}
    behind = max(first[name] + size[name] for name in first)
    found = [
        moved({name: at + 1 for name, at in first.items()}, **{"placement.allow_idle": False}),
        moved(first | {"language": -1}, ".language"),
        moved(first | {"sounds": behind}, ".sounds"),
        moved(
            {name: at + 9 for name, at in first.items()},
            **{"placement.allow_idle": True, "placement.ranks_per_node": 4, "placement.tp_across_nodes": True},
        ),
    ]
    if len(first) > 1:
        found.append(moved({name: at for name, at in first.items() if name != "language"}))
    stage = size["language"] // layout.sizes["language"]["pp"]
    for name in first:
        over = first["language"] + size["language"] - 1
        if name != "language" and (over, size[name]) != (first["language"], stage):
            key = "" if over != first["language"] else None
            if key is not None:
                found.append(moved(first | {name: over}, **{"placement.allow_idle": True}))
    return found


def _resized(layout: Layout, name: str, axis: str, size: int) -> Broken:
    sizes = layout.sizes | {name: layout.sizes[name] | {axis: size}}
    return Broken(replace(layout, sizes=sizes), f"modules.{name}.layout")


def _with(layout: Layout, key: str, value: Any) -> Broken:
    return Broken(replace(layout, more=layout.more | {key: value}), key)

"""Legal layouts drawn at random, as config overrides."""

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
    {"modules.images.balance": "images"},
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

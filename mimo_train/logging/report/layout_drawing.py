"""Drawing of a layout for templates/layout.html.j2: a box per rank, coloured by module, with coordinates."""

from dataclasses import dataclass

from data.text_format import plural
from mimo_train.config.parts import LANGUAGE
from mimo_train.layout.ranks import ModuleLayout, RunLayout
from mimo_train.layout.run import Run

_MAX_BOXES = 64
"""Most ranks drawn per module; the rest is shown as a number."""


@dataclass(frozen=True)
class Part:
    """The part of one module on a rank; `coordinates` such as "tp 0 · pp 1 · dp 0"."""

    module: str
    coordinates: str
    color: int
    takes_features: bool
    """True if the parts above it on the same rank send it their features."""


@dataclass(frozen=True)
class RankBox:
    """A rank of the launcher, its node if there are several, and its parts."""

    rank: int
    node: int | None
    parts: list[Part]


@dataclass(frozen=True)
class Block:
    """Modules on the same ranks."""

    modules: list[ModuleLayout]
    color: int | None
    """None for several modules: each part has its own."""
    boxes: list[RankBox]
    not_drawn: int
    """Number of ranks beyond those in `boxes`."""


@dataclass(frozen=True)
class LayoutDrawing:
    """Encoders on their own ranks, the language model with modules on its ranks, and a summary of the sizes."""

    encoders: list[Block]
    language: Block
    summary: str


def coordinates(module: ModuleLayout, rank: int) -> dict[str, int]:
    """Return the coordinates of `rank` in a module's grid: tp changes fastest, then cp, dp, pp (as in `layout`)."""
    assert rank in module.ranks, f"rank {rank} is not on {module.name} ({module.ranks})"
    rest, found = rank - module.first_rank, {}
    for axis in ("tp", "cp", "dp", "pp"):
        rest, found[axis] = divmod(rest, getattr(module, axis))
    return found


def module_colors(layout: RunLayout) -> dict[str, int]:
    """Return a colour number (0 to 5) for each module; the language module is always 0."""
    others = [name for name in layout.modules if name != LANGUAGE]
    return {LANGUAGE: 0} | {name: 1 + index % 5 for index, name in enumerate(others)}


def layout_drawing(run: Run) -> LayoutDrawing:
    """Return the drawing of a run's layout. Ranks are the launcher's."""
    layout = run.layout
    inside = [edge.source for edge in layout.shared_edges if edge.destination == LANGUAGE]
    apart = _sharing(layout, [name for name in layout.modules if name not in (*inside, LANGUAGE)])
    return LayoutDrawing(
        encoders=[_block(layout, names) for names in apart],
        language=_block(layout, [*inside, LANGUAGE]),
        summary=_summary(run, shares_ranks=bool(inside) or any(len(names) > 1 for names in apart)),
    )


def _summary(run: Run, shares_ranks: bool) -> str:
    layout, batch = run.layout, run.batch
    said = "1 process" if layout.world_size == 1 else f"{layout.world_size} processes"
    if len(layout.modules) > 1:
        said += ", modules share ranks" if shares_ranks else ", each module on its own ranks"
    idle = sorted(set(range(layout.processes[-1])) - set(layout.processes))
    if idle:
        said += f"; idle: {', '.join(map(str, idle[:_MAX_BOXES]))}{' ...' if len(idle) > _MAX_BOXES else ''}"
    if _has_nodes(layout):
        said += f"; {layout.ranks_per_node} a node"
    count = batch.num_microbatches
    samples = plural(batch.global_batch_size, "sample")
    return f"{said}. A step is {samples}: {plural(count, 'microbatch')} of {batch.microbatch_samples:,}."


def _has_nodes(layout: RunLayout) -> bool:
    return bool(layout.ranks_per_node) and layout.processes[-1] >= layout.ranks_per_node


def _sharing(layout: RunLayout, names: list[str]) -> list[list[str]]:
    blocks: dict[int, list[str]] = {}
    for name in names:
        blocks.setdefault(layout.modules[name].first_rank, []).append(name)
    return list(blocks.values())


def _block(layout: RunLayout, names: list[str]) -> Block:
    """Return the ranks of these modules, each with its parts: encoders above the language model."""
    colors, modules = module_colors(layout), [layout.modules[name] for name in names]
    ranks = max((module.ranks for module in modules), key=len)
    boxes = []
    for rank in ranks[:_MAX_BOXES]:
        here = [module for module in modules if rank in module.ranks]
        process = layout.processes[rank]
        node = process // layout.ranks_per_node if _has_nodes(layout) else None
        takes = [module.name == LANGUAGE and len(here) > 1 for module in here]
        parts = [
            Part(module.name, _written(module, rank), colors[module.name], taking)
            for module, taking in zip(here, takes, strict=True)
        ]
        boxes.append(RankBox(process, node, parts))
    color = colors[names[0]] if len(names) == 1 else None
    return Block(modules, color, boxes, max(0, len(ranks) - _MAX_BOXES))


def _written(module: ModuleLayout, rank: int) -> str:
    found = coordinates(module, rank)
    return " · ".join(f"{axis} {found[axis]}" for axis in ("tp", "pp", "dp", "cp") if axis != "cp" or module.cp > 1)

"""Drawing of a layout for templates/layout.html.j2: a box per rank, coloured by module, with coordinates."""

from dataclasses import dataclass
from typing import NamedTuple

from data.text_format import listed, plural
from mimo_train.config.parts import LANGUAGE
from mimo_train.layout.ranks import ModuleLayout, RunLayout
from mimo_train.layout.run import Run

_MAX_BOXES = 64
"""Most ranks drawn per module; the rest is shown as a number."""


class RankBox(NamedTuple):
    """A rank of the launcher, its node if there are several, and (module, coordinates) of its parts."""

    rank: int
    node: int | None
    parts: list[tuple[str, str]]


class Block(NamedTuple):
    """Modules on the same ranks. `not_drawn` is the number of ranks beyond `boxes`."""

    modules: list[ModuleLayout]
    boxes: list[RankBox]
    not_drawn: int


@dataclass(frozen=True)
class LayoutDrawing:
    """Encoders on their own ranks, the language model with modules on its ranks, the colour of each module, and a
    summary of the sizes."""

    encoders: list[Block]
    language: Block
    colors: dict[str, int]
    summary: str


def coordinates(module: ModuleLayout, rank: int) -> dict[str, int]:
    """Return the coordinates of `rank` in a module's grid: tp changes fastest, then cp, dp, pp (as in `layout`)."""
    rest, position = rank - module.first_rank, {}
    for axis in ("tp", "cp", "dp", "pp"):
        rest, position[axis] = divmod(rest, getattr(module, axis))
    return position


def module_colors(layout: RunLayout) -> dict[str, int]:
    """Return a colour number (0 to 5) for each module; the language module is always 0."""
    others = [name for name in layout.modules if name != LANGUAGE]
    return {LANGUAGE: 0} | {name: 1 + index % 5 for index, name in enumerate(others)}


def layout_drawing(run: Run) -> LayoutDrawing:
    """Return the drawing of a run's layout. Ranks are the launcher's."""
    layout, batch = run.layout, run.batch
    has_nodes = bool(layout.ranks_per_node) and layout.processes[-1] >= layout.ranks_per_node
    inside = [edge.source for edge in layout.shared_edges if edge.destination == LANGUAGE]
    apart: dict[int, list[str]] = {}
    for name, module in layout.modules.items():
        if name not in (*inside, LANGUAGE):
            apart.setdefault(module.first_rank, []).append(name)
    sentences = [plural(layout.world_size, "process")]
    if len(layout.modules) > 1:
        shares_ranks = inside or any(len(names) > 1 for names in apart.values())
        sentences[0] += ", modules share ranks" if shares_ranks else ", each module on its own ranks"
    if idle := sorted(set(range(layout.processes[-1])) - set(layout.processes)):
        sentences.append(f"idle: {listed([str(rank) for rank in idle], _MAX_BOXES)}")
    if has_nodes:
        sentences.append(f"{layout.ranks_per_node} a node")
    microbatches = f"{plural(batch.num_microbatches, 'microbatch')} of {batch.microbatch_samples:,}"
    return LayoutDrawing(
        encoders=[_block(layout, names, has_nodes) for names in apart.values()],
        language=_block(layout, [*inside, LANGUAGE], has_nodes),
        colors=module_colors(layout),
        summary=f"{'; '.join(sentences)}. A step is {plural(batch.global_batch_size, 'sample')}: {microbatches}.",
    )


def _block(layout: RunLayout, names: list[str], has_nodes: bool) -> Block:
    """Return the ranks of these modules, each with its parts: encoders above the language model."""
    modules = [layout.modules[name] for name in names]
    ranks = max((module.ranks for module in modules), key=len)
    boxes = []
    for rank in ranks[:_MAX_BOXES]:
        process = layout.processes[rank]
        parts = [(module.name, _written(module, rank)) for module in modules if rank in module.ranks]
        boxes.append(RankBox(process, process // layout.ranks_per_node if has_nodes else None, parts))
    return Block(modules, boxes, max(0, len(ranks) - _MAX_BOXES))


def _written(module: ModuleLayout, rank: int) -> str:
    position = coordinates(module, rank)
    return " · ".join(f"{axis} {position[axis]}" for axis in ("tp", "pp", "dp", "cp") if axis != "cp" or module.cp > 1)

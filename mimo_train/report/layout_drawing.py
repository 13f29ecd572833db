"""The layout of a run as HTML: a box for each rank, coloured by module, with its coordinates. Imports no torch."""

from html import escape

from mimo_train.config.schema import LANGUAGE
from mimo_train.plan.layout import ModuleLayout, RunLayout

_MAX_BOXES = 64
"""Ranks drawn of a module; the rest is a number, because nobody reads a thousand boxes."""


def coordinates(module: ModuleLayout, rank: int) -> dict[str, int]:
    """Where `rank` stands in the grid of `module`: tp changes fastest, then cp, dp, pp (the order of `layout`)."""
    assert rank in module.ranks, f"rank {rank} is not on {module.name} ({module.ranks})"
    rest, found = rank - module.first_rank, {}
    for axis in ("tp", "cp", "dp", "pp"):
        rest, found[axis] = divmod(rest, getattr(module, axis))
    return found


def module_colors(layout: RunLayout) -> dict[str, int]:
    """A colour number (0 to 5) for each module; the language module is 0 in every run."""
    others = [name for name in layout.modules if name != LANGUAGE]
    return {LANGUAGE: 0} | {name: 1 + index % 5 for index, name in enumerate(others)}


def draw_layout(layout: RunLayout) -> str:
    """The drawing and a sentence of arithmetic. Ranks are the launcher's."""
    apart = _sharing(layout, layout.apart_encoders)
    language = _block(layout, [*layout.local_encoders, LANGUAGE])
    drawing = language
    if apart:
        blocks = "".join(_block(layout, names) for names in apart)
        drawing = f'<div class="encoders">{blocks}</div>{_arrow("features")}{language}'
    return f'<div class="layout">{drawing}</div><p class="note">{_sentences(layout, apart)}</p>'


def _sentences(layout: RunLayout, apart: list[list[str]]) -> str:
    said = "1 process" if layout.world_size == 1 else f"{layout.world_size} processes"
    if len(layout.modules) > 1:
        shares = layout.local_encoders or any(len(names) > 1 for names in apart)
        said += ", modules share ranks" if shares else ", each module on ranks of its own"
    idle = sorted(set(range(layout.processes[-1])) - set(layout.processes))
    if idle:
        said += f"; idle: {', '.join(map(str, idle[:_MAX_BOXES]))}{' ...' if len(idle) > _MAX_BOXES else ''}"
    if layout.ranks_per_node and layout.processes[-1] >= layout.ranks_per_node:
        said += f"; {layout.ranks_per_node} a node"
    count = layout.num_microbatches
    microbatches = "1 microbatch" if count == 1 else f"{count} microbatches"
    return f"{said}. A step is {layout.global_batch_size} samples: {microbatches} of {layout.microbatch_samples}."


def _sharing(layout: RunLayout, names: list[str]) -> list[list[str]]:
    """Modules by the ranks they stand on: those of one list stand on the same."""
    blocks: dict[int, list[str]] = {}
    for name in names:
        blocks.setdefault(layout.modules[name].first_rank, []).append(name)
    return list(blocks.values())


def _block(layout: RunLayout, names: list[str]) -> str:
    """Ranks on which these modules stand, each with its part of every module, encoders above the language model."""
    colors, modules = module_colors(layout), [layout.modules[name] for name in names]
    ranks = max((module.ranks for module in modules), key=len)
    boxes = []
    for rank in ranks[:_MAX_BOXES]:
        chips = [_chip(module, rank, colors[module.name], len(names) > 1) for module in modules if rank in module.ranks]
        down = '<span class="down" aria-label="to">↓</span>' if LANGUAGE in names else ""
        process, node = layout.processes[rank], ""
        if layout.ranks_per_node and layout.processes[-1] >= layout.ranks_per_node:
            node = f" · node {process // layout.ranks_per_node}"
        boxes.append(f'<li><span class="rank">rank {process}{node}</span>{down.join(chips)}</li>')
    more = f'<li class="more">and {len(ranks) - _MAX_BOXES:,} more</li>' if len(ranks) > _MAX_BOXES else ""
    titles = " + ".join(f"{escape(module.name)} <small>{escape(str(module))}</small>" for module in modules)
    kind = "shared" if len(names) > 1 else f"c{colors[names[0]]}"
    return f'<section class="module {kind}"><h3>{titles}</h3><ol class="ranks">{"".join(boxes)}{more}</ol></section>'


def _chip(module: ModuleLayout, rank: int, color: int, named: bool) -> str:
    found = coordinates(module, rank)
    axes = [f"{axis} {found[axis]}" for axis in ("tp", "pp", "dp", "cp") if axis != "cp" or module.cp > 1]
    name = f"<b>{escape(module.name)}</b> " if named else ""
    return f'<span class="chip c{color}">{name}{" · ".join(axes)}</span>'


def _arrow(text: str) -> str:
    return (
        f'<div class="arrow"><span>{text}</span><svg viewBox="0 0 64 16" width="64" height="16" role="img" '
        'aria-label="encoders send features to the language model">'
        '<path d="M1 8H60M53 2L61 8L53 14" fill="none" stroke="currentColor" stroke-width="1.6" '
        'stroke-linecap="round" stroke-linejoin="round"/></svg></div>'
    )

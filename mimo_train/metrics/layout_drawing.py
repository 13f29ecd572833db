"""The layout of a run as HTML: a box for each rank, coloured by module, with its coordinates. Imports no torch."""

from html import escape

from mimo_train.config import LANGUAGE
from mimo_train.layout import ModuleLayout, RunLayout

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
    """The drawing and a sentence of arithmetic."""
    shares = sum(module.size for module in layout.modules.values()) > layout.world_size
    drawing = _shared(layout) if shares else _disjoint(layout)
    processes = "1 process" if layout.world_size == 1 else f"{layout.world_size} processes"
    count = layout.num_microbatches
    microbatches = "1 microbatch" if count == 1 else f"{count} microbatches"
    if len(layout.modules) > 1:
        processes += ", modules share ranks" if shares else ", each module on ranks of its own"
    return (
        f'<div class="layout">{drawing}</div><p class="note">{processes}. '
        f"A step is {layout.global_batch_size} samples: {microbatches} of {layout.microbatch_samples}.</p>"
    )


def _disjoint(layout: RunLayout) -> str:
    colors = module_colors(layout)
    encoders = [_module(module, colors[name]) for name, module in layout.modules.items() if name != LANGUAGE]
    language = _module(layout.language, colors[LANGUAGE])
    if not encoders:
        return language
    return f'<div class="encoders">{"".join(encoders)}</div>{_arrow("features")}{language}'


def _module(module: ModuleLayout, color: int) -> str:
    boxes = "".join(_box(rank, _chip(module, rank, color)) for rank in module.ranks[:_MAX_BOXES])
    return (
        f'<section class="module c{color}"><h3>{escape(module.name)} <small>{escape(str(module))}</small></h3>'
        f'<ol class="ranks">{boxes}{_more(module.size)}</ol></section>'
    )


def _shared(layout: RunLayout) -> str:
    """One row of ranks, each with its part of every module, encoders above the language model."""
    colors = module_colors(layout)
    ordered = [module for name, module in layout.modules.items() if name != LANGUAGE] + [layout.language]
    boxes = []
    for rank in range(min(layout.world_size, _MAX_BOXES)):
        chips = [_chip(module, rank, colors[module.name], named=True) for module in ordered if rank in module.ranks]
        boxes.append(_box(rank, '<span class="down" aria-label="to">↓</span>'.join(chips)))
    return f'<section class="module shared"><ol class="ranks">{"".join(boxes)}{_more(layout.world_size)}</ol></section>'


def _box(rank: int, chips: str) -> str:
    return f'<li><span class="rank">rank {rank}</span>{chips}</li>'


def _chip(module: ModuleLayout, rank: int, color: int, named: bool = False) -> str:
    found = coordinates(module, rank)
    axes = [f"{axis} {found[axis]}" for axis in ("tp", "pp", "dp", "cp") if axis != "cp" or module.cp > 1]
    name = f"<b>{escape(module.name)}</b> " if named else ""
    return f'<span class="chip c{color}">{name}{" · ".join(axes)}</span>'


def _more(size: int) -> str:
    return f'<li class="more">and {size - _MAX_BOXES:,} more</li>' if size > _MAX_BOXES else ""


def _arrow(text: str) -> str:
    return (
        f'<div class="arrow"><span>{text}</span><svg viewBox="0 0 64 16" width="64" height="16" role="img" '
        'aria-label="encoders send features to the language model">'
        '<path d="M1 8H60M53 2L61 8L53 14" fill="none" stroke="currentColor" stroke-width="1.6" '
        'stroke-linecap="round" stroke-linejoin="round"/></svg></div>'
    )

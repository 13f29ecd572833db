"""Placement of modules: edges, first ranks, shared ranks, idle processes and nodes.

An encoder is on other ranks than the language model, or on exactly the ranks of its first stage. Encoders on other
ranks may share these with each other, stage by stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from data.text_format import plural
from mimo_train.config.errors import Fault
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_distill import DISTILL, SFT
from mimo_train.config.schema_modules import LayoutConfig


@dataclass(frozen=True)
class Placement:
    """First ranks of modules, counted over the processes that have a module."""

    first_ranks: dict[str, int]
    processes: tuple[int, ...]
    """Launcher rank of each process with a module, in order; 0, 1, 2, ... unless processes are idle."""


def place(cfg: ConfigContainer) -> Placement:
    """Return the placement of the modules of a valid config."""
    spans = _spans(cfg)
    processes = sorted({process for span in (spans | teacher_spans(cfg)).values() for process in span})
    rank_of = {process: rank for rank, process in enumerate(processes)}
    return Placement({name: rank_of[span[0]] for name, span in spans.items()}, tuple(processes))


def placement_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield all faults of the placement, for sizes of at least 1 and a config with a language module."""
    faults = list(_key_faults(cfg))
    yield from faults
    if faults:
        return
    spans = _spans(cfg)
    faults = [*_overlap_faults(cfg, spans), *_idle_faults(cfg, spans | teacher_spans(cfg))]
    yield from faults
    if not faults:
        yield from _task_faults(cfg, spans)
        yield from node_faults(cfg, cfg.placement.ranks_per_node)
        yield from _dropout_faults(cfg, spans)


def node_faults(cfg: ConfigContainer, node: int) -> Iterator[Fault]:
    """Yield faults of the placement on nodes of `node` ranks; none if `node` is 0."""
    if not node:
        return
    spans = _spans(cfg)
    first = min(span[0] for span in spans.values())
    if first >= node:
        yield Fault(
            "placement.first_rank",
            f"no module is on the first node (ranks 0-{node - 1}), the lowest rank is {first}: processes meet "
            f"there, and its launcher ends with its last process; let a module start below rank {node}",
        )
    if not cfg.placement.tp_across_nodes:
        for name, span in spans.items():
            if group := _crossing(cfg, name, span[0], node):
                yield _crossing_fault(name, cfg.modules[name].layout.tp, group, node)


def moved_for_nodes(cfg: ConfigContainer) -> str:
    """Return a message if modules are reordered so that no tensor-parallel group crosses a node; else ""."""
    order = _order(cfg)
    if order == tuple(cfg.modules) or cfg.placement.mode == "shared" or cfg.placement.first_rank:
        return ""
    return (
        f"modules are placed in the order {', '.join(order)}: in the config's order ({', '.join(cfg.modules)}) a "
        f"tensor-parallel group would be on two nodes of {cfg.placement.ranks_per_node} ranks"
    )


def span_text(ranks: range) -> str:
    """Return ranks as text: 3, or 0-3."""
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _size(sizes: LayoutConfig) -> int:
    return sizes.tp * sizes.pp * sizes.dp * sizes.cp


def _spans(cfg: ConfigContainer) -> dict[str, range]:
    firsts = dict(cfg.placement.first_rank)
    if cfg.placement.mode == "shared":
        firsts = dict.fromkeys(cfg.modules, 0)
    if not firsts:
        firsts = _one_after_the_other(cfg, _order(cfg))
    return {name: range(firsts[name], firsts[name] + _size(module.layout)) for name, module in cfg.modules.items()}


def teacher_layout(cfg: ConfigContainer) -> LayoutConfig:
    """Return the layout of a teacher's language model: the student's unless `distill.layout` has it."""
    student = cfg.language.layout
    return cfg.distill.layout.get(LANGUAGE) or replace(student, vpp=1, ep=1, etp=1, fsdp=False)


def teacher_spans(cfg: ConfigContainer) -> dict[str, range]:
    """Return the processes of a teacher's modules, as far as the config names them: the others are on the first stage
    of its language model. Empty without a teacher."""
    if cfg.train.task != DISTILL:
        return {}
    layouts = {**cfg.distill.layout, LANGUAGE: teacher_layout(cfg)}
    firsts = cfg.distill.first_rank
    language = firsts.get(LANGUAGE, _spans(cfg)[LANGUAGE][0])
    spans = {name: (firsts.get(name, language), _size(layout)) for name, layout in layouts.items()}
    return {f"{name} of the teacher": range(first, first + size) for name, (first, size) in spans.items()}


def _task_faults(cfg: ConfigContainer, spans: dict[str, range]) -> Iterator[Fault]:
    apart = {rank for span in teacher_spans(cfg).values() for rank in span} - {*chain.from_iterable(spans.values())}
    if apart and "grad_norms" in cfg.log.metrics:
        text = f"grad_norms requires a module on every rank, and rank {min(apart)} has the teacher alone. Remove it"
        yield Fault("log.metrics", text)
    if cfg.train.task != SFT and getattr(cfg.llm, "is_balanced", False):
        text = f"has output_router_logits, a loss that train.task={cfg.train.task} does not have. Set it to false"
        yield Fault(f"modules.{LANGUAGE}.llm.model_config", f"{text} in config.json")


def _one_after_the_other(cfg: ConfigContainer, order: tuple[str, ...]) -> dict[str, int]:
    firsts: dict[str, int] = {}
    following = 0
    for name in order:
        firsts[name] = following
        following += _size(cfg.modules[name].layout)
    return firsts


def _order(cfg: ConfigContainer) -> tuple[str, ...]:
    """Return the first order of modules, starting from the config's, in which no tensor-parallel group crosses a node.
    This is the config's order if there is none, or if groups may cross nodes."""
    node, dead_ends = cfg.placement.ranks_per_node, set()

    def complete(order: tuple[str, ...], following: int) -> tuple[str, ...] | None:
        rest = tuple(name for name in cfg.modules if name not in order)
        if not rest:
            return order
        if rest not in dead_ends:
            for name in rest:
                if not _crossing(cfg, name, following, node):
                    rest_order = complete((*order, name), following + _size(cfg.modules[name].layout))
                    if rest_order:
                        return rest_order
            dead_ends.add(rest)
        return None

    if not node or cfg.placement.tp_across_nodes:
        return tuple(cfg.modules)
    return complete((), 0) or tuple(cfg.modules)


def _crossing(cfg: ConfigContainer, name: str, first: int, node: int) -> range | None:
    """Return the first tensor-parallel group of a module at `first` that crosses nodes."""
    sizes = cfg.modules[name].layout
    groups = (range(start, start + sizes.tp) for start in range(first, first + _size(sizes), sizes.tp))
    return next((group for group in groups if group[0] // node != group[-1] // node), None)


def _key_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    placement = cfg.placement
    yield from placement.faults()
    for name in placement.first_rank:
        if name not in cfg.modules:
            yield Fault(f"placement.first_rank.{name}", f"no such module; modules are {', '.join(cfg.modules)}")
    missing = set(cfg.modules) - set(placement.first_rank)
    if placement.first_rank and missing:
        yield Fault(
            "placement.first_rank", f"gives no rank for {', '.join(sorted(missing))}: name every module or none"
        )


def _overlap_faults(cfg: ConfigContainer, spans: dict[str, range]) -> Iterator[Fault]:
    """Yield faults of common ranks: a source must be on exactly the ranks of its destination's first stage."""
    shared: set[str] = set()
    for source, destination in connections(cfg):
        span, of_destination, sizes = spans[source], spans[destination], cfg.modules[destination].layout
        first_stage = of_destination[: len(of_destination) // sizes.pp]
        if not (cfg.placement.mode == "shared" or set(span) & set(of_destination)):
            continue
        shared.add(source)
        if span != first_stage:
            same_start = cfg.placement.mode == "shared" or span[0] == of_destination[0]
            yield Fault(
                f"modules.{source}.layout" if same_start else f"placement.first_rank.{source}",
                f"{source} has {plural(len(span), 'rank')} ({span_text(span)}), the first stage of {destination} "
                f"{len(first_stage)} ({span_text(first_stage)}): make them the same, with tp x dp "
                f"{len(first_stage)} and first rank {first_stage[0]}, or put {source} on ranks that {destination} "
                f"({span_text(of_destination)}) does not have",
            )
        elif (pp := cfg.modules[source].layout.pp) > 1:
            yield Fault(
                f"modules.{source}.layout.pp",
                f"an encoder on the ranks of {destination} has one stage, pp is {pp}: set it to 1, or put {source} on "
                "other ranks",
            )
    apart = [name for name in cfg.encoders if name not in shared]
    for index, name in enumerate(apart):
        for other in apart[:index]:
            yield from _partial_overlap(cfg, spans, name, other)


def _partial_overlap(cfg: ConfigContainer, spans: dict[str, range], name: str, other: str) -> Iterator[Fault]:
    """Yield the fault of two encoders that share only some ranks, or share them with different stages."""
    pp, pp_of_other = cfg.modules[name].layout.pp, cfg.modules[other].layout.pp
    same = spans[other] == spans[name] and pp_of_other == pp
    if set(spans[other]) & set(spans[name]) and not same:
        yield Fault(
            f"placement.first_rank.{name}",
            f"{name} (ranks {span_text(spans[name])}, pp {pp}) and {other} (ranks {span_text(spans[other])}, pp "
            f"{pp_of_other}) share some ranks: give both the same first rank, number of ranks and pp, or no rank in "
            "common",
        )


def _idle_faults(cfg: ConfigContainer, spans: dict[str, range]) -> Iterator[Fault]:
    used = {process for span in spans.values() for process in span}
    idle = sorted(set(range(max(used))) - used)
    if idle and not cfg.placement.allow_idle:
        behind = min((name for name in spans if spans[name][0] > idle[0]), key=lambda name: spans[name][0])
        yield Fault(
            "placement.first_rank",
            f"no module is on rank {idle[0]}: {len(idle)} idle of {max(used) + 1}. Move {behind} from rank "
            f"{spans[behind][0]} to {idle[0]}, or set placement.allow_idle=true",
        )


def _crossing_fault(name: str, tp: int, group: range, node: int) -> Fault:
    if tp > node:
        change = f"tp {tp} is more than a node has: use at most {node}"
    elif node % tp:
        change = f"tp {tp} does not divide a node: use a divisor of {node}"
    else:
        change = f"let it start at a multiple of {tp} with placement.first_rank, and placement.allow_idle for a gap"
    return Fault(
        f"modules.{name}.layout.tp",
        f"ranks {span_text(group)} of {name} are one tensor-parallel group (tp {tp}) on two nodes of {node} ranks: "
        f"{change}, or set placement.tp_across_nodes=true",
    )


def _dropout_faults(cfg: ConfigContainer, spans: dict[str, range]) -> Iterator[Fault]:
    """Yield faults of dropout on shared ranks. A rank has one random generator: ranks that must draw equal masks for
    one module would draw different masks for the other."""
    dropout = {name: module.encoder.dropout for name, module in cfg.encoders.items()}
    dropout[LANGUAGE] = cfg.llm.dropout
    names = list(spans)
    for index, name in enumerate(names):
        for other in names[:index]:
            first, second = cfg.modules[name].layout, cfg.modules[other].layout
            same = (first.tp, first.dp, first.cp) == (second.tp, second.dp, second.cp)
            if set(spans[name]) & set(spans[other]) and not same and (dropout[name] or dropout[other]):
                yield Fault(
                    f"modules.{name}.layout",
                    f"{name} (tp {first.tp}, dp {first.dp}) shares ranks with {other} (tp {second.tp}, dp "
                    f"{second.dp}), and there is dropout ({name} {dropout[name]}, {other} {dropout[other]}): "
                    "set it to 0, or give both the same tp and dp, or other ranks",
                )


EdgePlacement = Literal["disjoint", "shared"]
"""disjoint: the source's last stage sends to the destination's first stage, on other ranks. shared: the source runs on
the ranks of the destination's first stage, inside its forward pass."""


@dataclass(frozen=True)
class Edge:
    """An edge that carries features from source to destination in forward, and their gradients back."""

    source: str
    destination: str
    placement: EdgePlacement

    @property
    def is_shared(self) -> bool:
        """True if the source is on the ranks of the destination's first stage."""
        return self.placement == "shared"


def connections(cfg: ConfigContainer) -> list[tuple[str, str]]:
    """Return (source, destination) of every edge, in the order of the config: all encoders feed the language model."""
    return [(name, LANGUAGE) for name in cfg.encoders] if LANGUAGE in cfg.modules else []

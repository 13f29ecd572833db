"""The table of ranks: the module stages on each process and node, and the routes of features."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from mimo_train.config.schema import ConfigContainer
from mimo_train.layout import placement
from mimo_train.layout.placement import Edge
from mimo_train.layout.ranks import RunLayout
from mimo_train.preflight.check.findings import Report, Table


def add_ranks(report: Report, cfg: ConfigContainer, layout: RunLayout) -> None:
    """One row per range of equal ranks; ranks are the launcher's, idle ones included."""
    node = cfg.placement.ranks_per_node
    rows = []
    for here, span in _spans(layout):
        where = (placement.span_text(range(span[0] // node, span[-1] // node + 1)),) if node else ()
        rows.append((placement.span_text(span), *where, here))
    notes = [_way(layout, edge) for edge in layout.edges]
    moved = placement.moved_for_nodes(cfg)
    if moved:
        notes.append(moved)
    if not node and any(module.tp > 1 for module in layout.modules.values()):
        notes.append(
            "on one node; with several, placement.ranks_per_node shows here what the launcher's nodes will change"
        )
    header = ("ranks", *(("nodes",) if node else ()), "modules")
    report.tables.append(Table("Ranks", header, rows, notes))


def _spans(layout: RunLayout) -> Iterator[tuple[str, range]]:
    """Ranges of processes with equal contents, and these contents."""
    here: dict[int, list[str]] = {process: [] for process in range(layout.processes[-1] + 1)}
    for name, module in layout.modules.items():
        for stage in range(module.pp):
            title = f"{name}, stage {stage + 1} of {module.pp}" if module.pp > 1 else name
            for process in layout.processes_of(module.stage_ranks(stage)):
                here[process].append(title)
    for titles, processes in groupby(here, lambda process: here[process]):
        found = [*processes]
        yield " + ".join(titles) or "idle", range(found[0], found[-1] + 1)


def _way(layout: RunLayout, edge: Edge) -> str:
    """The route of features along an edge, in words."""
    source, destination = layout.modules[edge.source], layout.modules[edge.destination]
    taking = placement.span_text(layout.processes_of(destination.stage_ranks(0)))
    if edge.is_shared:
        stage = replace(destination, pp=1, ep=1, etp=1, sp=False)
        same = (source.tp, source.dp) == (stage.tp, stage.dp)
        dealt = "stay where they are" if same else f"are redistributed, from {replace(source, sp=False)} to {stage}"
        return f"features of {source.name} {dealt}: it is on the first ranks of {destination.name} ({taking})"
    giving = placement.span_text(layout.processes_of(source.stage_ranks(source.pp - 1)))
    return f"features of {source.name} are sent from ranks {giving} to {taking}"

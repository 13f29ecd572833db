"""Random legal layouts have no fault, and divide ranks and samples."""

from hypothesis import HealthCheck, given, settings

from mimo_train.config.compose import load
from mimo_train.layout.run import config_faults, resolve
from mimo_train.logging.report.layout_drawing import coordinates
from tests.random_layouts import MICROBATCH, legal_layouts

drawn = settings(suppress_health_check=[HealthCheck.too_slow])


@settings(drawn, max_examples=30)
@given(drawn_layout=legal_layouts())
def test_a_legal_layout_divides_ranks_and_samples(drawn_layout):
    cfg = load(drawn_layout.config, drawn_layout.overrides)
    assert [str(fault) for fault in config_faults(cfg)] == []
    run = resolve(cfg)
    layout = run.layout
    assert layout.world_size <= 6
    assert all(layout.on_rank(rank) for rank in range(layout.world_size))
    assert sorted(set(layout.processes)) == list(layout.processes)
    for name, module in layout.modules.items():
        grid = [tuple(coordinates(module, rank).values()) for rank in module.ranks]
        assert len(set(grid)) == module.tp * module.cp * module.dp * module.pp
        assert module.ranks == range(module.first_rank, layout.modules[name].ranks[-1] + 1)
        assert [rank for stage in range(module.pp) for rank in module.stage_ranks(stage)] == list(module.ranks)
        assert run.batch.microbatch_samples == MICROBATCH and MICROBATCH % module.dp == 0
    assert sorted(edge.source for edge in layout.edges) == sorted(cfg.encoders)
    for edge in layout.shared_edges:
        source, destination = layout.modules[edge.source], layout.modules[edge.destination]
        assert source.ranks == destination.stage_ranks(0) and source.pp == 1
    for edge in layout.disjoint_edges:
        assert not set(layout.modules[edge.source].ranks) & set(layout.modules[edge.destination].ranks)
    sources = [edge.source for edge in layout.disjoint_edges]
    assert sorted(layout.piped_modules) == sorted([*sources, "language"]) and layout.piped_modules[-1] == "language"
    for name, first in drawn_layout.first.items():
        assert layout.processes_of(layout.modules[name].ranks)[0] == first
    node = cfg.placement.ranks_per_node
    if node and not cfg.placement.tp_across_nodes:
        for module in layout.modules.values():
            for at in range(0, module.size, module.tp):
                group = layout.processes_of(module.ranks[at : at + module.tp])
                assert group[0] // node == group[-1] // node

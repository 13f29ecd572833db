"""The benchmark's own arithmetic; its runs need a quiet machine."""

import pytest

from benchmarks import planner


def seconds(cfg, cores: float, process: float = 0.0) -> float:
    return planner.predicted(cfg, planner.Machine(planner.Messages(1e-4, 1e9), cores), process)


def test_ranks_are_compared():
    assert planner.rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == 1
    assert planner.rank_correlation([1.0, 2.0, 3.0], [30.0, 20.0, 10.0]) == -1
    assert planner.rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]) == pytest.approx(0.8)


@pytest.mark.parametrize(("shape", "replicas"), [("gpt", "dp2"), ("vlm", "shared dp2"), ("demo", "shared dp2")])
def test_every_layout_is_predicted_and_cores_are_shared(shape, replicas):
    assert set(planner.SHAPES) == {"gpt", "vlm", "demo"}
    for layout in planner.LAYOUTS[shape]:
        cfg = planner.config(shape, layout)
        few, many = (seconds(cfg, cores) for cores in (1.0, 8.0))
        assert 0.01 < many <= few < 30, layout
    one, two = (planner.config(shape, layout) for layout in ("one", replicas))
    # Two replicas on one core take no less than one, on two cores about half.
    assert seconds(two, 1.0) >= 0.99 * seconds(one, 1.0)
    assert seconds(two, 2.0) < 0.6 * seconds(one, 2.0)
    # What a process does beside layers is done by each, and shares the cores too.
    assert seconds(two, 1.0, 0.5) - seconds(two, 1.0) == pytest.approx(2 * 0.5)
    assert seconds(two, 2.0, 0.5) - seconds(two, 2.0) == pytest.approx(0.5)

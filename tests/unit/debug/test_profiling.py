"""Values of `profiling` that cannot be, named before a run starts."""

import pytest

from mimo_train.layout.run import config_faults
from tests.unit.configs import changed, load


def test_an_impossible_value_counts_only_where_a_profiler_is_on():
    wrong = {"profiling.step_start": 5, "profiling.step_end": 4, "profiling.ranks": [9]}
    assert not config_faults(changed(wrong))
    assert {fault.key for fault in config_faults(changed({**wrong, "profiling.torch": True}))} == {
        "profiling.step_end",
        "profiling.ranks",
    }


@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        ({"profiling.step_start": 0}, "profiling.step_start", "must be at least 1, is 0"),
        ({"profiling.step_start": 20, "profiling.step_end": 19}, "profiling.step_end", "step_start 20, is 19"),
        ({"train.iters": 9}, "profiling.step_start", "is 10, but the run ends at train.iters 9"),
        ({"profiling.ranks": []}, "profiling.ranks", "at least one rank, each from 0 to 1, is []"),
        ({"profiling.ranks": [0, 2]}, "profiling.ranks", "each from 0 to 1, is [0, 2]"),
        ({"profiling.ranks": [-1]}, "profiling.ranks", "must be at least 0 and at most 1048576, has -1"),
        ({"profiling.nsys": True}, "profiling.nsys", "cannot record at once: set profiling.torch=false"),
    ],
)
def test_each_fault_is_named_with_its_numbers(values, key, message):
    (fault,) = config_faults(changed({"profiling.torch": True, **values}))
    assert fault.key == key and message in fault.message


@pytest.mark.parametrize("name", ["nsys", "memory_history"])
def test_what_needs_cuda_is_refused_on_a_cpu_run(name):
    values = {f"profiling.{name}": True}
    (fault,) = config_faults(changed({**values, "run.device": "cpu"}))
    assert fault.key == f"profiling.{name}" and f"set profiling.{name}=false" in fault.message
    # Whether `auto` is a GPU is known on the machine of the run only.
    cfg = changed({**values, "run.device": "auto"})
    assert not config_faults(cfg)
    assert [fault.key for fault in cfg.profiling.faults("cpu", cfg.train.iters)] == [f"profiling.{name}"]
    assert not [*cfg.profiling.faults("cuda", cfg.train.iters)]


def test_ranks_are_not_counted_in_a_layout_that_cannot_be():
    cfg = load("vlm_digits", "profiling.torch=true", "profiling.ranks=[7]", "modules.language.layout.tp=3")
    assert "profiling.ranks" not in {fault.key for fault in config_faults(cfg)}

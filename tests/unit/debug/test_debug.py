"""Slowest and fastest ranks, profilers, and the command of a replay."""

import math
import shlex
from types import SimpleNamespace

import numpy
import pytest

from mimo_train.config import compose
from mimo_train.debug import nan_policy
from mimo_train.layout.run import config_faults, resolve
from mimo_train.logging.stopwatch import StragglerTimer
from tests.unit.configs import changed, load


class Lines:
    """A console that keeps its messages."""

    def __init__(self):
        self.said = []

    def message(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def layout():
    """images on ranks 0 and 1, language on 2 and 3."""
    return resolve(load("vlm_digits", "layout=images_dp2_language_dp2")).layout


def test_every_module_has_its_own_slowest_rank(layout):
    console = Lines()
    timer = StragglerTimer(layout, console)
    matrix = numpy.array([[2.0, 9], [1.0, 9], [4.0, 9], [12.0, 9]])
    assert timer.observe(dict(enumerate(matrix[:, 0])), steps=4, flops=38e12) == {
        "straggler/images/slowest_rank": 0,
        "straggler/images/slowest_over_median": pytest.approx(2 / 1.5),
        "straggler/language/slowest_rank": 3,
        "straggler/language/slowest_over_median": pytest.approx(12 / 8),
    }
    with timer(bdata=True), timer:  # as a forward step that measures with Megatron-Core's detector
        pass
    timer.report()
    assert console.said == [
        "stragglers:  images rank 0 slowest (0.5 s/step, 1.33 of the median), rank 1 fastest (0.25 s/step);  "
        "language rank 3 slowest (3 s/step, 1.50 of the median), rank 2 fastest (1 s/step);  "
        "2 TFLOP/s per device while it computes"
    ]
    timer.report()
    assert len(console.said) == 1, "times are reported once"


def test_modules_that_share_ranks_are_compared_over_the_same_ranks():
    layout = resolve(load("vlm_digits", "layout=one_process")).layout
    values = StragglerTimer(layout, Lines()).observe({0: 3.0}, steps=1)
    assert values["straggler/images/slowest_rank"] == values["straggler/language/slowest_rank"] == 0
    assert values["straggler/language/slowest_over_median"] == 1


def test_an_interval_without_computation_gives_no_number(layout):
    values = StragglerTimer(layout, Lines()).observe(dict.fromkeys(range(4), 0.0), steps=1)
    assert math.isnan(values["straggler/images/slowest_over_median"])


def test_seconds_of_a_step_are_those_of_the_interval_that_was_observed(layout):
    """Also of a partial one: the last of a run, or the first after a resume."""
    console = Lines()
    timer = StragglerTimer(layout, console)
    for seconds, steps, said in ((8.0, 4, "2 s/step"), (6.0, 2, "3 s/step")):
        timer.observe(dict.fromkeys(range(4), seconds), steps)
        timer.report()
        assert console.said[-1].count(said) == 4 and "TFLOP" not in console.said[-1]


def test_an_impossible_value_counts_only_where_a_profiler_is_on():
    wrong = {"profiling.steps": [5, 4], "profiling.ranks": [9]}
    assert not config_faults(changed(wrong))
    assert {fault.key for fault in config_faults(changed({**wrong, "profiling.record": ["torch"]}))} == {
        "profiling.steps",
        "profiling.ranks",
    }


@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        ({"profiling.steps": [20, 19]}, "profiling.steps", "must be the first and the last step, [10, 12], is [20"),
        ({"train.iters": 9}, "profiling.steps", "begins at 10, but the run ends at train.iters 9"),
        ({"profiling.ranks": []}, "profiling.ranks", "at least one rank, each from 0 to 1, is []"),
        ({"profiling.ranks": [0, 2]}, "profiling.ranks", "each from 0 to 1, is [0, 2]"),
        ({"profiling.record": ["torch", "nsys"]}, "profiling.record", "torch and nsys cannot record at once"),
    ],
)
def test_each_fault_is_named_with_its_numbers(values, key, message):
    (fault,) = config_faults(changed({"profiling.record": ["torch"], **values}))
    assert fault.key == key and message in fault.message


@pytest.mark.parametrize("name", ["nsys", "memory_history"])
def test_what_needs_cuda_is_refused_on_a_cpu_run(name):
    values = {"profiling.record": [name]}
    (fault,) = config_faults(changed({**values, "run.device": "cpu"}))
    assert fault.key == "profiling.record" and f"{name} requires CUDA" in fault.message
    # Whether `auto` is a GPU is known on the machine of the run only.
    cfg = changed({**values, "run.device": "auto"})
    assert not config_faults(cfg)
    assert [fault.key for fault in cfg.profiling.faults("cpu", cfg.train.iters)] == ["profiling.record"]
    assert not [*cfg.profiling.faults("cuda", cfg.train.iters)]


def test_a_replay_writes_into_no_folder_of_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(nan_policy.dist, "barrier", lambda: None)
    cfg = compose.load("gpt_tiny", ["checkpoint.dir=s3://bucket/run"])
    state = SimpleNamespace(
        cfg=cfg,
        run_dir=tmp_path,
        train_state=SimpleNamespace(step=3),
        layout=SimpleNamespace(processes=range(1)),
        is_logging_rank=False,
    )
    _, command = nan_policy.write_replay(
        state, SimpleNamespace(current=None), {}, None, None, tmp_path / "step_00000003"
    )
    words = shlex.split(command)
    again = compose.load("gpt_tiny", words[words.index("train") + 2 :])
    assert again.checkpoint.dir == "" and again.run.dir == str(tmp_path / "replay" / "step_00000004")

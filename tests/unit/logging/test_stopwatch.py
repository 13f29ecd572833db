import pytest

from mimo_train.layout.run import resolve
from mimo_train.logging import stopwatch
from mimo_train.logging.stopwatch import INTERVALS, PARTS, Busiest, Stopwatch, time_split
from tests.unit.configs import changed


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until it is moved: `clock[0] += seconds`."""
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    return now


def step(watch, clock, scale=1):
    """Data 2, forward and backward 10 around 3 of bridge and 5 of stages, reduce 4, optimizer 6, and 7 of nothing."""
    with watch("step"):
        with watch("data_wait"):
            clock[0] += 2 * scale
        with watch("forward_backward"):
            clock[0] += 8 * scale
            with watch("bridge_wait"):
                clock[0] += 3 * scale
            clock[0] += 2 * scale
            with watch("pipeline_wait"):
                clock[0] += 5 * scale
            with watch("reduce"):
                clock[0] += 4 * scale
        clock[0] += 7 * scale
        with watch("optimizer"):
            clock[0] += 6 * scale


OWN = {
    "step": 7,
    "forward_backward": 10,
    "data_wait": 2,
    "bridge_wait": 3,
    "pipeline_wait": 5,
    "reduce": 4,
    "optimizer": 6,
}


def test_what_happens_outside_of_a_step_is_not_counted(clock):
    watch = Stopwatch()
    with watch("forward_backward"):  # an evaluation
        clock[0] += 5
        with watch("bridge_wait"):
            clock[0] += 5
    step(watch, clock)
    assert watch.read_and_reset() == pytest.approx(OWN)


def test_an_error_inside_closes_its_intervals(clock):
    watch = Stopwatch()
    with pytest.raises(KeyError), watch("step"), watch("optimizer"):
        clock[0] += 1
        raise KeyError
    assert watch.read_and_reset()["optimizer"] == 1


class Event:
    """Stands in for torch.cuda.Event: the device reaches it 0.5 s after the host made it."""

    made = synchronized = 0
    now = [0.0]

    def __init__(self, enable_timing):
        assert enable_timing
        Event.made += 1

    def record(self):
        self.at = self.now[0] + 0.5

    def synchronize(self):
        Event.synchronized += 1

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


def test_on_cuda_nothing_waits_before_the_reading_and_events_are_used_again(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch(cuda=True)
    step(watch, Event.now)
    step(watch, Event.now)
    assert Event.synchronized == 0
    made = Event.made
    assert watch.read_and_reset() == pytest.approx(OWN) and Event.synchronized == 1
    step(watch, Event.now)
    assert watch.read_and_reset() == pytest.approx(OWN) and Event.made == made


def layout(images, language, mode="disjoint"):
    """Modules on so many devices each."""
    sizes = {"modules.images.layout.dp": images, "modules.language.layout.dp": language, "placement.mode": mode}
    return resolve(changed({**sizes, "train.global_batch_size": 8, "train.micro_batch_size": 1})).layout


def row(**seconds):
    return [seconds.get(name, 0.0) for name in INTERVALS]


def test_the_parts_of_a_module_are_means_over_its_devices_and_sum_to_the_step():
    placed = layout(images=1, language=2)
    rows = [
        row(step=1, forward_backward=2, bridge_wait=5, reduce=1, optimizer=1),
        row(step=1, forward_backward=6, pipeline_wait=1, data_wait=1, optimizer=1),
        row(step=0, forward_backward=8, pipeline_wait=2),
    ]
    split = time_split(rows, placed)
    images = {"compute": 2, "bubble": 1, "bridge_wait": 5, "data_wait": 0, "reduce": 1, "optimizer": 1}
    language = {"compute": 7, "bubble": 2, "bridge_wait": 0, "data_wait": 0.5, "reduce": 0, "optimizer": 0.5}
    assert split == {f"time/images/{part}": images[part] for part in PARTS} | {
        f"time/language/{part}": language[part] for part in PARTS
    }
    for name, devices in placed.modules.items():
        total = sum(split[f"time/{name}/{part}"] for part in PARTS) * devices.size
        assert total == pytest.approx(10 * devices.size)  # seconds of the step x devices


def test_a_shared_device_is_divided_by_work():
    rows = [row(forward_backward=8, optimizer=2), row(forward_backward=6, optimizer=4)]
    split = time_split(rows, layout(2, 2, "shared"), {"images": 1e9, "language": 3e9})
    assert (split["time/images/compute"], split["time/language/compute"]) == (1.75, 5.25)
    assert (split["time/images/optimizer"], split["time/language/optimizer"]) == (0.75, 2.25)
    assert sum(split.values()) == 10


IMAGES, LANGUAGE = "modules.images.layout.", "modules.language.layout."
BATCH = {"train.global_batch_size": 8, "train.micro_batch_size": 2}


def named(rows, keys) -> str:
    return Busiest(resolve(changed(keys | BATCH)).layout).name(rows)


def test_a_stage_with_the_least_time_to_spare_is_named_whatever_others_wait_for():
    keys = {f"{IMAGES}dp": 2, f"{LANGUAGE}pp": 2, "placement.mode": "disjoint"}
    rows = [
        row(forward_backward=6, bridge_wait=4),
        row(forward_backward=9, bridge_wait=1),  # one slow rank of a kind: on average it waits
        row(forward_backward=5, pipeline_wait=5),
        row(forward_backward=7, optimizer=1, reduce=1, step=1),
    ]
    assert named(rows, keys) == "busiest: language, stage 2 of 2 (80%, computes)"
    rows[0] = row(forward_backward=2, data_wait=7, bridge_wait=1)
    assert named(rows, keys) == "busiest: images (90%, computes)"
    rows[1] = row(forward_backward=2, data_wait=8)
    assert named(rows, keys) == "busiest: images (95%, waits for data)"


def test_ranks_of_one_kind_and_steps_without_a_time_name_none():
    assert (
        named([row(forward_backward=1)] * 2, {f"{IMAGES}dp": 2, f"{LANGUAGE}dp": 2, "placement.mode": "shared"}) == ""
    )
    assert named([row()] * 2, {"placement.mode": "disjoint"}) == ""

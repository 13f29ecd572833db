"""The kind of rank that the others wait for is named."""

import io

import pytest

from mimo_train.layout.run import resolve
from mimo_train.logging.console import Console
from mimo_train.logging.stopwatch import INTERVALS, Busiest
from tests.unit.configs import changed

IMAGES, LANGUAGE = "modules.images.layout.", "modules.language.layout."
BATCH = {"train.global_batch_size": 8, "train.micro_batch_size": 2}


def row(**seconds):
    return [seconds.get(name, 0.0) for name in INTERVALS]


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


@pytest.mark.parametrize(("mode", "kinds"), [("shared", ["images + language"]), ("disjoint", ["images", "language"])])
def test_ranks_are_of_the_kinds_of_their_modules(mode, kinds):
    layout = resolve(changed({f"{IMAGES}dp": 2, f"{LANGUAGE}dp": 2, "placement.mode": mode} | BATCH)).layout
    assert list(dict.fromkeys(map(layout.kind_of, range(layout.world_size)))) == kinds


def test_ranks_of_one_kind_and_steps_without_a_time_name_none():
    assert (
        named([row(forward_backward=1)] * 2, {f"{IMAGES}dp": 2, f"{LANGUAGE}dp": 2, "placement.mode": "shared"}) == ""
    )
    assert named([row()] * 2, {"placement.mode": "disjoint"}) == ""


def test_it_is_the_end_of_a_step_s_line():
    stream = io.StringIO()
    console = Console(1, 0, stream)
    console.step(1, {"lm loss": 1.0}, "busiest: images (90%, computes)")
    console.step(1, {"lm loss": 1.0})
    first, second = stream.getvalue().splitlines()
    assert first == f"{second}  busiest: images (90%, computes)"

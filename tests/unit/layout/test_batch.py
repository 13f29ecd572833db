"""Batch ramp-up: Megatron-Core's sizes at every sample, and faults with their numbers."""

import math
import re

import pytest

from mimo_train.layout.batch import Batch, rampup_faults
from tests.unit.configs import load


@pytest.mark.parametrize(("first", "increment", "samples", "full"), [(8, 8, 200, 32), (2, 2, 77, 10), (4, 12, 0, 16)])
def test_sizes_are_those_of_megatron_core(first, increment, samples, full):
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    # Megatron-Core takes a table of (consumed samples: size); the ramp is a table with equal distances.
    steps_up = (full - first) // increment
    table = [f"{math.ceil(step * samples / steps_up)}:{first + step * increment}" for step in range(steps_up + 1)]
    schedule = " ".join(table) if samples else f"0:{full}"
    oracle = StepBatchsizeNumMicroBatchesCalculator(2, 1, False, 0, schedule)
    sizes = Batch(full, 2, 1, first, increment, samples)
    seen = set()
    for consumed in range(1, 2 * samples + 5):
        oracle.update(consumed, consistency_check=False)
        assert sizes.size_at(consumed) == oracle.get_current_global_batch_size(), consumed
        seen.add(sizes.size_at(consumed))
    assert seen <= set(sizes.sizes()) and full in seen


def test_samples_of_a_run():
    sizes = Batch(16, 2, 1, 8, 8, 20)
    # 0 -> 8, 8 -> 8, 16 -> 8 (up to 20), 24 -> 16, ...
    assert [sizes.samples_of(steps) for steps in range(6)] == [0, 8, 16, 24, 40, 56]
    assert Batch(16, 2, 1).samples_of(3) == 48


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[8, 8]", r"has 2 numbers"),
        ("[0, 8, 100]", r"at least 1"),
        ("[8, 5, 100]", r"steps of 5 do not lead from 8 to train.global_batch_size 32.*divides 24"),
        ("[64, 8, 100]", r"do not lead from 64"),
        ("[4, 4, 100]", r"a step of 4 samples is not a multiple of 8 \(train.micro_batch_size 8 x .*dp 1\)"),
    ],
)
def test_faults_name_the_numbers(value, message):
    cfg = load("vlm_digits", f"train.rampup_batch_size={value}")
    (fault,) = rampup_faults(cfg)
    assert fault.key == "train.rampup_batch_size"
    assert re.search(message, fault.message), fault.message
    assert not list(rampup_faults(load("vlm_digits", "train.rampup_batch_size=[8, 8, 100]")))

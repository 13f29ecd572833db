"""Seconds of messages by hand, and never more over faster links."""

from dataclasses import replace

import pytest

from mimo_train.estimate import devices
from mimo_train.estimate.devices import DEVICES, Links
from mimo_train.logging.throughput import PEAK_TFLOPS


def links(inside: float = 100e9, across: float = 10e9, node: int = 8) -> Links:
    return Links(replace(DEVICES["h100"], inside=inside, across=across), node)


def test_a_gather_passes_every_rank_around_a_ring():
    # Three of four parts of 8 GB at 75 GB/s, in three messages.
    expected = 3 * devices.LATENCY_INSIDE + 6e9 / (100e9 * devices.LINKS)
    assert links().gather(8e9, 4, 4) == pytest.approx(expected)
    assert links().gather(8e9, 1, 1) == 0


def test_ranks_of_several_nodes_have_the_slower_links():
    one, two = links().gather(8e9, 8, 8), links().gather(8e9, 16, 16)
    assert two > 5 * one
    # Four lanes of a node share the load: at most as fast as inside a node.
    assert links().gather(8e9, 16, 16, 4) == pytest.approx(two / 4, rel=0.01)
    assert links().gather(8e9, 16, 16, 64) >= links(across=100e9).gather(8e9, 16, 16) * 0.99


def test_the_table_says_what_data_sheets_say():
    h100 = DEVICES["h100"]
    assert (h100.memory, h100.half, h100.traffic) == (80e9, 989e12, 3350e9)
    assert h100.rate("bf16") == h100.rate("fp16") == h100.half and h100.rate("fp32") == h100.single
    for name, device in DEVICES.items():
        half, single, eighth = PEAK_TFLOPS[name.partition("-")[0].upper()]
        assert (device.half, device.single, device.eighth) == (half * 1e12, single * 1e12, (eighth or 0) * 1e12)
        assert device.half > device.single and device.traffic > device.inside >= device.across > 0

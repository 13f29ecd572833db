"""The stopwatch on a real device."""

import pytest
import torch

from mimo_train.logging.stopwatch import Stopwatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_device_s_own_time_is_measured_and_sums_to_the_step():
    watch = Stopwatch(cuda=True)
    for _ in range(2):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with watch("step"):
            first.record()
            with watch("forward_backward"):
                torch.cuda._sleep(20_000_000)
                with watch("bridge_wait"):
                    torch.cuda._sleep(5_000_000)
            with watch("optimizer"):
                pass
            last.record()
        seconds = watch.read_and_reset()
        assert seconds["forward_backward"] > seconds["bridge_wait"] > seconds["optimizer"] >= 0
        assert sum(seconds.values()) >= first.elapsed_time(last) / 1000 * 0.999

"""Python's collector while a program is imported."""

import gc

import pytest

from mimo_train.launch.collector import collector_waits


@pytest.mark.parametrize("collects", [True, False])
def test_it_waits_and_then_goes_on_as_before(collects):
    was_on = gc.isenabled()
    gc.enable() if collects else gc.disable()
    try:
        with pytest.raises(ImportError), collector_waits():
            assert not gc.isenabled()
            kept = [[]]
            raise ImportError
        assert gc.isenabled() == collects
        assert gc.get_freeze_count() and not any(one is kept for one in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.enable() if was_on else gc.disable()

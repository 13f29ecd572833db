"""The end of a run waits for what it writes, but not for a file system that hangs."""

import threading

import pytest

from mimo_train.checkpoint import in_flight


@pytest.mark.parametrize("hangs", [True, False])
def test_the_end_of_a_run_does_not_wait_for_a_file_system_that_hangs(hangs, tmp_path, monkeypatch):
    monkeypatch.setattr(in_flight.dist, "get_rank", lambda: 0)
    gate, done = threading.Event(), []
    if hangs:
        monkeypatch.setattr(in_flight, "LONGEST_CLOSE", 0.1)
    else:
        threading.Timer(0.1, gate.set).start()

    def commit() -> None:
        done.append("complete")

    save = in_flight.InFlight(tmp_path, tmp_path, gate.wait, commit, list, lambda: True, beside=True)
    closing = threading.Thread(target=save.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive(), "it waits for what never ends"
    assert done == ([] if hangs else ["complete"])
    gate.set()

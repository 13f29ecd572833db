"""The watch around a rank."""

from types import SimpleNamespace

import pytest

from mimo_train.launch import rank_monitor as module


@pytest.mark.parametrize("writable", [True, False])
def test_there_is_one_watch_also_where_nothing_can_be_recorded(tmp_path, monkeypatch, writable):
    watches = []

    def watch(*_given, **_named):
        watches.append(SimpleNamespace(close=lambda: None))
        return watches[-1]

    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MIMO_SCRATCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "Watch", watch)
    run_dir = tmp_path / "run"
    if not writable:
        run_dir.touch()
    settings = SimpleNamespace(hang_report_seconds=1.0, inprocess_restarts=0)
    layout = SimpleNamespace(world_size=1, processes=(0,))
    run = SimpleNamespace(dir=run_dir, layout=layout, cfg=SimpleNamespace(run=settings))
    with module.watched(run), module.watched(run):
        assert (module.RECORDER.folder is not None) == writable
    assert len(watches) == 1
    with module.watched(run):
        pass
    assert len(watches) == 2

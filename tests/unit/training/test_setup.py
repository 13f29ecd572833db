"""What setup leaves behind when it fails."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from mimo_train.config.errors import PeersError
from mimo_train.training import setup as module
from tests.unit.configs import load


def test_the_lock_is_given_back_where_another_rank_cannot_make_the_folder(tmp_path, monkeypatch):
    @contextmanager
    def agreed(_told):
        yield []
        raise PeersError("run.dir: cannot be made", "UserError")

    monkeypatch.setattr(module, "start_processes", lambda cfg, store: ("cpu", torch.device("cpu")))
    monkeypatch.setattr(module, "agreed", agreed)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    locks = []

    class Lock(module.RunLock):
        def __init__(self, *given):
            super().__init__(*given)
            locks.append(self)

        def close(self):
            super().close()
            locks.remove(self)

    monkeypatch.setattr(module, "RunLock", Lock)
    run = SimpleNamespace(cfg=load("vlm_digits"), dir=tmp_path / "run", checkpoints=tmp_path / "run")
    with pytest.raises(PeersError, match="cannot be made"):
        module.setup(run, None, start_time=0.0)
    assert (tmp_path / "run").exists() and not locks

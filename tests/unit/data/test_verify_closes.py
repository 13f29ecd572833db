"""`shards verify CONFIG` closes what it reads, also where a set cannot be read."""

from data.errors import ShardError
from mimo_train.preflight.check import verify_run as module
from tests.unit.configs import load


def test_a_set_that_cannot_be_read_is_closed(monkeypatch, capsys):
    class Samples:
        closed = False

        def close(self):
            self.closed = True

    opened = []

    def fails(*_given):
        raise ShardError("a.tar: damaged")

    monkeypatch.setattr(module.compose, "load", lambda config, overrides: load(config))
    monkeypatch.setattr(module, "_open", lambda *_given: None)
    monkeypatch.setattr(module, "_dataset_of", lambda *_given: opened.append(Samples()) or opened[-1])
    monkeypatch.setattr(module, "_verify_set", fails)
    assert module.verify_run("vlm_digits", [], 1) == 1
    assert "bad shard: a.tar: damaged" in capsys.readouterr().out
    assert opened and all(one.closed for one in opened)

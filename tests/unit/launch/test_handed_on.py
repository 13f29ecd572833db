"""The ranks of a node have the config that its first one has composed."""

import threading

import pytest

from mimo_train.config.compose import load
from mimo_train.config.errors import ConfigError, Fault
from mimo_train.launch import config_broadcast
from mimo_train.launch.config_broadcast import config_of_node


@pytest.fixture
def node(monkeypatch, tmp_path):
    """Calls `config_of_node` as one of two ranks of a node; counts how often a config was composed."""
    monkeypatch.setenv("MIMO_SCRATCH", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("MIMO_RESTART", raising=False)
    composed = []

    def call(rank: int, *overrides: str, wrong: bool = False):
        monkeypatch.setenv("LOCAL_RANK", str(rank))

        def compose():
            composed.append(rank)
            if wrong:
                raise ConfigError([Fault("train.iters", "is wrong")])
            return load("vlm_digits", overrides)

        return config_of_node(compose)

    call.composed = composed
    return call


def test_only_the_first_rank_reads_files(node):
    first = node(0, "train.iters=7")
    assert node(1) == first and first.train.iters == 7
    assert node.composed == [0]


def test_a_rank_waits_for_the_first(node, monkeypatch):
    found = []
    waits = threading.Thread(target=lambda: found.append(node(1)))
    sleeping = threading.Event()
    pause = config_broadcast.time.sleep
    monkeypatch.setattr(config_broadcast.time, "sleep", lambda seconds: sleeping.set() or pause(seconds))
    waits.start()
    assert sleeping.wait(30)
    first = node(0)
    waits.join(30)
    assert found == [first] and node.composed == [0]


def test_every_rank_finds_a_fault_by_itself(node):
    for rank in (0, 1):
        with pytest.raises(ConfigError):
            node(rank, wrong=True)
    assert node.composed == [0, 1]


def test_a_rank_does_not_wait_for_ever(node, monkeypatch):
    monkeypatch.setattr(config_broadcast, "PATIENCE", 0.1)
    assert node(1).train.iters == node(0).train.iters
    assert node.composed == [1, 0]


def test_a_run_that_starts_again_reads_its_config_again(node, monkeypatch):
    assert node(0, "train.iters=7") == node(1)
    monkeypatch.setenv("MIMO_RESTART", "1")
    assert node(0, "train.iters=8") == node(1)
    assert node.composed == [0, 0]


@pytest.mark.parametrize("missing", ["MIMO_SCRATCH", "LOCAL_WORLD_SIZE"])
def test_without_the_launcher_or_with_one_rank_nothing_is_handed_on(node, missing, monkeypatch, tmp_path):
    monkeypatch.delenv(missing)
    node(1)
    node(0)
    assert node.composed == [1, 0] and not list(tmp_path.iterdir())

"""Launchers of several nodes, here threads of this process, meet at a port."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from mimo_train.config.errors import UserError
from mimo_train.launch import rendezvous
from tests.hang import HANG_SECONDS


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def said_by(*nodes: tuple[int, int], port: int, again: bool = False, leaving: tuple[int, ...] = ()) -> list[str]:
    """What the launchers raise or agree on, each given (number of nodes, its own)."""

    def join(size: int, node: int) -> str:
        try:
            return rendezvous.meet("localhost", port, size, node, again=again, leaves=node in leaving)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(nodes)) as pool:
        return [future.result(HANG_SECONDS) for future in [pool.submit(join, *node) for node in nodes]]


def test_all_nodes_meet_and_the_port_is_free_again():
    port = free_port()
    words = set()
    for _ in range(2):
        (word,) = {*said_by((3, 2), (3, 0), (3, 1), port=port)}
        words.add(word)
    assert len(words) == 2 and all(word.isalnum() for word in words)
    with socket.create_server(("localhost", port)):
        pass


def test_a_port_in_use_ends_all_nodes(monkeypatch):
    monkeypatch.setattr(rendezvous, "ANSWER", 0.5)
    with socket.create_server(("", 0)) as holder:
        port = holder.getsockname()[1]
        first, other = said_by((2, 0), (2, 1), port=port)
    assert f"MASTER_PORT is {port}, which is in use on node 0" in first
    assert f"process {os.getpid()} (" in first
    assert f"MASTER_PORT is {port}: a program at localhost that is not mimo-train's launcher has it" in other


@pytest.mark.parametrize("options", [[], ["--nnodes=1"]])
def test_a_port_in_use_ends_one_node(options):
    from torch.distributed import run

    from mimo_train.launch.torchrun import _meet

    with socket.create_server(("", 0)) as holder:
        port = holder.getsockname()[1]
        given = run.parse_args([*options, f"--master-port={port}", "rank.py"])
        with pytest.raises(UserError) as raised:
            _meet(given)
        _meet(run.parse_args([*options, "--standalone", f"--master-port={port}", "rank.py"]))
    here = f"on this node ({socket.gethostname()}) by process {os.getpid()} ("
    assert str(raised.value).startswith(f"MASTER_PORT is {port}, which is in use {here}")
    assert str(raised.value).endswith("or start with --standalone, which takes one by itself")
    _meet(given)


def test_different_numbers_of_nodes_are_told():
    first, other = said_by((2, 0), (3, 1), port=free_port())
    assert first == "node 1 was started for 3 nodes, and node 0 for 2: give both one NNODES"
    assert other == "this node was started for 3 nodes, and node 0 for 2"


def test_a_node_that_does_not_come_is_told(monkeypatch):
    monkeypatch.setattr(rendezvous, "LONGEST_MEETING", 0.2)
    port = free_port()
    assert said_by((2, 0), port=port) == ["nodes [1] of 2 did not start within 0.2 s"]
    (said,) = said_by((2, 1), port=port)
    assert said.startswith("node 0 does not answer at MASTER_ADDR localhost")


@pytest.mark.parametrize("leaving", [(0,), (1,), (2, 1)])
def test_after_a_failure_all_start_again_or_none(leaving):
    port = free_port()
    nodes = (3, 0), (3, 1), (3, 2)
    assert len({*said_by(*nodes, port=port, again=True)}) == 1
    said = said_by(*nodes, port=port, again=True, leaving=leaving)
    assert said == [f"node {min(leaving)} does not start its ranks again, and says why: this node ends too"] * 3


def test_a_node_that_is_early_waits_for_what_node_0_still_has_at_the_port(monkeypatch):
    """The store of the attempt before, which answers nobody: those that come are told nothing, and come again."""
    monkeypatch.setattr(rendezvous, "ANSWER", 5.0)
    with ThreadPoolExecutor(2) as pool, socket.create_server(("", 0)) as store:
        port = store.getsockname()[1]
        early = pool.submit(rendezvous.meet, "localhost", port, 2, 1, again=True)
        store.accept()[0].close()
        first = pool.submit(rendezvous.meet, "localhost", port, 2, 0, again=True)
        store.accept()[0].close()
        store.close()
        assert early.result(HANG_SECONDS) == first.result(HANG_SECONDS)

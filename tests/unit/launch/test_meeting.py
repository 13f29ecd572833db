"""Launchers of several nodes, here threads of this process, meet at a port."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

from mimo_train.config.fault import UserError
from mimo_train.launch import meeting
from tests.hang import HANG_SECONDS


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def said_by(*nodes: tuple[int, int], port: int) -> list[str]:
    """What the launchers raise or agree on, each given (number of nodes, its own)."""

    def join(size: int, node: int) -> str:
        try:
            return meeting.meet("localhost", port, size, node)
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
    monkeypatch.setattr(meeting, "ANSWER", 0.5)
    with socket.create_server(("", 0)) as holder:
        port = holder.getsockname()[1]
        first, other = said_by((2, 0), (2, 1), port=port)
    assert f"MASTER_PORT is {port}, which is in use on node 0" in first
    assert f"process {os.getpid()} (" in first
    assert f"MASTER_PORT is {port}: a program at localhost that is not mimo-train's launcher has it" in other


def test_different_numbers_of_nodes_are_told():
    first, other = said_by((2, 0), (3, 1), port=free_port())
    assert first == "node 1 was started for 3 nodes, and node 0 for 2: give both one NNODES"
    assert other == "this node was started for 3 nodes, and node 0 for 2"


def test_a_node_that_does_not_come_is_told(monkeypatch):
    monkeypatch.setattr(meeting, "LONGEST_MEETING", 0.2)
    port = free_port()
    assert said_by((2, 0), port=port) == ["nodes [1] of 2 did not start within 0.2 s"]
    (said,) = said_by((2, 1), port=port)
    assert said.startswith("node 0 does not answer at MASTER_ADDR localhost")

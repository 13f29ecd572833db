"""Launchers of several nodes meet at MASTER_ADDR:MASTER_PORT before torchrun opens its store there, and again after a
failure: all start their ranks again, or none does. Imports no torch.

Torchrun on node 0 fails with a traceback if the port is in use, and on the other nodes waits for whoever uses it. Here
node 0 says who holds the port, and the others, which get no answer from that program, end too.
"""

import errno
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple

from mimo_train.config.errors import UserError

LONGEST_MEETING = 900.0
"""Seconds that nodes wait for each other, as torchrun's store does."""
ANSWER = 10.0
"""Seconds in which node 0 answers a connection."""
PARTING = 60.0
"""Seconds that a launcher that ends waits for the others, to tell them."""
_HELLO, _GO, _ENDS, _LEAVES = b"mimo-train ", b"go ", b"ends ", b"ends"


class NodeEnds(UserError):
    """A launcher does not start its ranks again, so that none does."""


def meet(address: str, port: int, nodes: int, node: int, *, again: bool = False, leaves: bool = False) -> str:
    """Wait until the launchers of all nodes are there; the port is free again afterwards.

    Args:
        address, port: MASTER_ADDR and MASTER_PORT.
        nodes: number of nodes.
        node: this one, 0 to nodes - 1.
        again: whether the ranks have failed. Node 0 may still have torchrun's store at the port then.
        leaves: whether this launcher comes only to say that it ends.

    Returns:
        A word that is the same for all launchers, and new at each start.

    Raises:
        NodeEnds: one of them ends; also for itself.
        UserError: the port of node 0 is in use, a program that is no launcher answers there, nodes were started with
            different numbers of them, or do not come.
    """
    patience = PARTING if leaves else LONGEST_MEETING
    return (_host if node == 0 else _join)(address, port, nodes, node, again, leaves, patience)


def _server(port: int, patience: float) -> socket.socket:
    both, deadline = socket.has_dualstack_ipv6(), time.monotonic() + patience
    while True:
        try:
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", port), family=family, dualstack_ipv6=both)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def require_free(port: int, *, again: bool = False) -> None:
    """For one node, on which torchrun will open its store at a port: it would fail with a traceback.

    Args:
        again: as of `meet`.

    Raises:
        UserError: the port is in use, by whom.
    """
    _opened(port, "this node", "to a free port, or start with --standalone, which takes one by itself", again).close()


def _opened(port: int, where: str, instead: str, again: bool) -> socket.socket:
    """A server at MASTER_PORT, or UserError with who has it."""
    try:
        return _server(port, ANSWER if again else 0.0)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UserError(f"MASTER_PORT is {port}, which cannot be opened: {error.strerror}") from error
        who = ", ".join(_holders(port)) or "a process that is not to be seen from here"
        raise UserError(
            f"MASTER_PORT is {port}, which is in use on {where} ({socket.gethostname()}) by {who}: end it, or set "
            f"MASTER_PORT {instead}"
        ) from error


def _host(address: str, port: int, nodes: int, _node: int, again: bool, leaves: bool, patience: float) -> str:
    server = _opened(port, "node 0", "to another port on all nodes", again)
    greeted: SimpleQueue[_Greeted] = SimpleQueue()
    with closing(server):
        # Each connection in a thread: one that says nothing, as of a port scan, must not keep the others waiting.
        greeter = Thread(target=_greet_all, args=(server, nodes, greeted), daemon=True)
        greeter.start()
        try:
            return _met(f"{address}:{port}", nodes, greeted, leaves, patience)
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which would keep the port open
            greeter.join()


class _Greeted(NamedTuple):
    """A launcher that has come."""

    number: int
    nodes: int
    """That it was started for."""
    leaves: bool
    connection: socket.socket


def _met(here: str, nodes: int, greeted: SimpleQueue[_Greeted], leaves: bool, patience: float) -> str:
    """Wait for the other nodes, and give them a word, or say that one ends."""
    deadline, told = time.monotonic() + patience, time.monotonic() + ANSWER
    arrived: dict[int, _Greeted] = {}
    try:
        while len(arrived) < nodes - 1:
            missing = sorted(set(range(1, nodes)) - set(arrived))
            if time.monotonic() > deadline:
                raise UserError(f"nodes {missing} of {nodes} did not start within {patience:g} s")
            if time.monotonic() > told:
                told = float("inf")
                print(f"mimo-train: node 0 waits for nodes {missing} at {here}", file=sys.stderr, flush=True)
            with suppress(Empty):
                one = greeted.get(timeout=1.0)
                _require_new(one, nodes, arrived)
                arrived[one.number] = one
        leaving = [one.number for one in arrived.values() if one.leaves] + ([0] if leaves else [])
        stamp = secrets.token_hex(4)
        answer = _ENDS + str(min(leaving)).encode() if leaving else _GO + stamp.encode()
        for one in arrived.values():
            with suppress(OSError):
                one.connection.sendall(answer + b"\n")
        if leaving:
            raise _ended(min(leaving))
        return stamp
    finally:
        for one in arrived.values():
            one.connection.close()


def _ended(node: int) -> NodeEnds:
    return NodeEnds(f"node {node} does not start its ranks again, and says why: this node ends too")


def _greet_all(server: socket.socket, nodes: int, greeted: SimpleQueue[_Greeted]) -> None:
    """Accept whoever connects, until the socket is closed."""
    with suppress(OSError):
        while True:
            Thread(target=_greet, args=(server.accept()[0], nodes, greeted), daemon=True).start()


def _greet(connection: socket.socket, nodes: int, greeted: SimpleQueue[_Greeted]) -> None:
    """Answer a launcher, and put down what it says; drop what is none."""
    connection.settimeout(ANSWER)
    with suppress(OSError, ValueError):
        words = _line(connection).split()
        if 3 <= len(words) <= 4 and words[0] == _HELLO.strip():
            number, theirs = int(words[1]), int(words[2])
            connection.sendall(_HELLO + str(nodes).encode() + b"\n")
            greeted.put(_Greeted(number, theirs, words[3:] == [_LEAVES], connection))
            return
    connection.close()


def _require_new(one: _Greeted, nodes: int, arrived: dict[int, _Greeted]) -> None:
    """
    Raises:
        UserError: a launcher has another number of nodes, or a number that is none or that another one has.
    """
    if one.nodes != nodes:
        raise UserError(
            f"node {one.number} was started for {one.nodes} nodes, and node 0 for {nodes}: give both one NNODES"
        )
    if not 0 < one.number < nodes:
        raise UserError(f"a node was started with NODE_RANK {one.number}: the others of {nodes} have 1 to {nodes - 1}")
    if one.number in arrived and not _is_closed(arrived[one.number].connection):
        raise UserError(f"two nodes were started with NODE_RANK {one.number}: give each its own")


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other side has ended: it says nothing more before it is answered."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _join(address: str, port: int, nodes: int, node: int, again: bool, leaves: bool, patience: float) -> str:
    deadline, told, why = time.monotonic() + patience, time.monotonic() + ANSWER, ""
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((address, port), timeout=5.0)
        except OSError as error:  # node 0 is not there yet
            why = str(error.strerror or error)
            if time.monotonic() > told:
                told = float("inf")
                at = f"MASTER_ADDR {address}, MASTER_PORT {port}"
                print(f"mimo-train: node {node} waits for node 0 at {at}: {why}", file=sys.stderr, flush=True)
            time.sleep(0.5)
            continue
        with closing(connection):
            connection.settimeout(ANSWER)
            try:
                connection.sendall(_HELLO + f"{node} {nodes} ".encode() + (_LEAVES if leaves else b"") + b"\n")
                words = _line(connection).split()
            except OSError:
                words = []
            if len(words) != 2 or words[0] != _HELLO.strip():
                if again:  # node 0 is not there yet
                    why = "another program answers"
                    time.sleep(0.5)
                    continue
                raise UserError(
                    f"MASTER_PORT is {port}: a program at {address} that is not mimo-train's launcher has it. Set "
                    "MASTER_PORT to a free port on all nodes; node 0 says who holds this one"
                )
            if int(words[1]) != nodes:
                raise UserError(f"this node was started for {nodes} nodes, and node 0 for {int(words[1])}")
            connection.settimeout(max(1.0, deadline - time.monotonic()))
            try:
                answer = _line(connection)
            except OSError:
                answer = b""
            if answer.startswith(_ENDS):
                raise _ended(int(answer.removeprefix(_ENDS)))
            if not answer.startswith(_GO):
                raise UserError(f"node 0 ({address}:{port}) ended before all nodes were there")
            return answer.removeprefix(_GO).decode()
    raise UserError(f"node 0 does not answer at MASTER_ADDR {address}, MASTER_PORT {port} within {patience:g} s: {why}")


def _line(connection: socket.socket) -> bytes:
    raw = b""
    while not raw.endswith(b"\n") and len(raw) < 100:
        more = connection.recv(1)
        if not more:
            break
        raw += more
    return raw.strip()


def _holders(port: int) -> Iterator[str]:
    """Processes of this machine that listen on a port, as far as this user may see."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for folder in Path("/proc").glob("[0-9]*") if inodes else ():
        with suppress(OSError):
            if any(str(entry.readlink()) in inodes for entry in (folder / "fd").iterdir()):
                yield f"process {folder.name} ({(folder / 'comm').read_text().strip()})"

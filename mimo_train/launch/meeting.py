"""Launchers of several nodes meet at MASTER_ADDR:MASTER_PORT before torchrun opens its store there. Imports no torch.

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

from mimo_train.config.fault import UserError

LONGEST_MEETING = 900.0
"""Seconds that nodes wait for each other, as torchrun's store does."""
ANSWER = 10.0
"""Seconds in which node 0 answers a connection."""
_HELLO, _GO = b"mimo-train ", b"go "


def meet(address: str, port: int, nodes: int, node: int) -> str:
    """Wait until the launchers of all nodes are there; the port is free again afterwards.

    Args:
        address, port: MASTER_ADDR and MASTER_PORT.
        nodes: number of nodes.
        node: this one, 0 to nodes - 1.

    Returns:
        A word that is the same for all launchers, and new at each start.

    Raises:
        UserError: the port of node 0 is in use, a program that is no launcher answers there, nodes were started with
            different numbers of them, or do not come.
    """
    return (_host if node == 0 else _join)(address, port, nodes, node)


def _host(address: str, port: int, nodes: int, _node: int) -> str:
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UserError(f"MASTER_PORT is {port}, which cannot be opened: {error.strerror}") from error
        who = ", ".join(_holders(port)) or "a process that is not to be seen from here"
        raise UserError(
            f"MASTER_PORT is {port}, which is in use on node 0 ({socket.gethostname()}) by {who}: end it, or set "
            "MASTER_PORT to another port on all nodes"
        ) from error
    greeted: SimpleQueue[tuple[int, int, socket.socket]] = SimpleQueue()
    with closing(server):
        # Each connection in a thread: one that says nothing, as of a port scan, must not keep the others waiting.
        greeter = Thread(target=_greet_all, args=(server, nodes, greeted), daemon=True)
        greeter.start()
        try:
            return _met(f"{address}:{port}", nodes, greeted)
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which would keep the port open
            greeter.join()


def _met(here: str, nodes: int, greeted: SimpleQueue) -> str:
    """Wait for the other nodes, and give them a word."""
    deadline, told = time.monotonic() + LONGEST_MEETING, time.monotonic() + ANSWER
    arrived: dict[int, socket.socket] = {}
    try:
        while len(arrived) < nodes - 1:
            missing = sorted(set(range(1, nodes)) - set(arrived))
            if time.monotonic() > deadline:
                raise UserError(f"nodes {missing} of {nodes} did not start within {LONGEST_MEETING:g} s")
            if time.monotonic() > told:
                told = float("inf")
                print(f"mimo-train: node 0 waits for nodes {missing} at {here}", file=sys.stderr, flush=True)
            with suppress(Empty):
                number, theirs, connection = greeted.get(timeout=1.0)
                _require_new(number, theirs, nodes, arrived)
                arrived[number] = connection
        stamp = secrets.token_hex(4)
        for connection in arrived.values():
            with suppress(OSError):
                connection.sendall(_GO + stamp.encode() + b"\n")
        return stamp
    finally:
        for connection in arrived.values():
            connection.close()


def _greet_all(server: socket.socket, nodes: int, greeted: SimpleQueue) -> None:
    """Accept whoever connects, until the socket is closed."""
    with suppress(OSError):
        while True:
            Thread(target=_greet, args=(server.accept()[0], nodes, greeted), daemon=True).start()


def _greet(connection: socket.socket, nodes: int, greeted: SimpleQueue) -> None:
    """Answer a launcher, and put down its number and how many nodes it was started for; drop what is none."""
    connection.settimeout(ANSWER)
    with suppress(OSError, ValueError):
        words = _line(connection).split()
        if len(words) == 3 and words[0] == _HELLO.strip():
            number, theirs = int(words[1]), int(words[2])
            connection.sendall(_HELLO + str(nodes).encode() + b"\n")
            greeted.put((number, theirs, connection))
            return
    connection.close()


def _require_new(number: int, theirs: int, nodes: int, arrived: dict[int, socket.socket]) -> None:
    """
    Raises:
        UserError: a launcher has another number of nodes, or a number that is none or that another one has.
    """
    if theirs != nodes:
        raise UserError(f"node {number} was started for {theirs} nodes, and node 0 for {nodes}: give both one NNODES")
    if not 0 < number < nodes:
        raise UserError(f"a node was started with NODE_RANK {number}: the others of {nodes} have 1 to {nodes - 1}")
    if number in arrived and not _is_closed(arrived[number]):
        raise UserError(f"two nodes were started with NODE_RANK {number}: give each its own")


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other side has ended: it says nothing more before it is answered."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _join(address: str, port: int, nodes: int, node: int) -> str:
    deadline, told, why = time.monotonic() + LONGEST_MEETING, time.monotonic() + ANSWER, ""
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((address, port), timeout=5.0)
        except OSError as error:  # node 0 is not there yet
            why = str(error.strerror or error)
            if time.monotonic() > told:
                told = float("inf")
                print(
                    f"mimo-train: node {node} waits for node 0 at MASTER_ADDR {address}, MASTER_PORT {port}: {why}",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            time.sleep(0.5)
            continue
        with closing(connection):
            connection.settimeout(ANSWER)
            try:
                connection.sendall(_HELLO + f"{node} {nodes}\n".encode())
                words = _line(connection).split()
            except OSError:
                words = []
            if len(words) != 2 or words[0] != _HELLO.strip():
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
            if not answer.startswith(_GO):
                raise UserError(f"node 0 ({address}:{port}) ended before all nodes were there")
            return answer.removeprefix(_GO).decode()
    raise UserError(
        f"node 0 does not answer at MASTER_ADDR {address}, MASTER_PORT {port} within {LONGEST_MEETING:g} s: {why}"
    )


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

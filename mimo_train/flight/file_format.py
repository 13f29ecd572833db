"""File of a rank: a header, the open phases, the last message of every channel, and a ring of events.

Times are seconds of the machine's monotonic clock; the header holds the offset to Unix time. A *channel* is one
direction between two ranks of a group, or all collectives of a group.
"""

import struct
from ctypes import Structure, c_char, c_double, c_int32, c_uint8, c_uint16, c_uint32, c_uint64, sizeof

FOLDER = "flight"
"""Folder in `run.dir`, with a subfolder for each start of the run."""
REPORT = "report.txt"
"""Report of a hang, next to the ranks' files."""

MAGIC = b"MIMOFLY3"
MAX_DEPTH = 16
MAX_CHANNELS = 512
RING = 1024
NOTE_SIZE = 512
READING, ERROR = 0, 1
"""Notes: the files that threads are reading; the error that ends the rank."""


class Event(Structure):
    """A phase that began, or a message that was issued or awaited."""

    _fields_ = (
        ("number", c_uint64),
        ("at", c_double),
        ("nbytes", c_uint64),
        ("message", c_uint32),  # its number in its channel, counted from 1
        ("step", c_uint32),
        ("group", c_int32),
        ("peer", c_int32),  # -1: a collective
        ("microbatch", c_int32),
        ("place", c_uint16),  # an edge or module of the graph
        ("kind", c_uint8),
        ("what", c_uint8),  # phase or operation
        ("direction", c_uint8),
    )


class Last(Structure):
    """The last message that a rank issued in a channel."""

    _fields_ = (
        ("number", c_uint32),
        ("step", c_uint32),
        ("group", c_int32),
        ("peer", c_int32),
        ("operation", c_uint8),
        ("phase", c_uint8),
        ("direction", c_uint8),  # 0: collectives
    )


class Record(Structure):
    """The whole file."""

    _fields_ = (
        ("magic", c_char * 8),
        ("rank", c_uint32),
        ("world_size", c_uint32),
        ("pid", c_uint64),
        ("start", c_uint64),  # of the process, in clock ticks since boot
        ("launcher", c_uint64),  # its process id; 0 without one
        ("offset", c_double),  # Unix time minus monotonic time
        ("hostname", c_char * 64),
        ("beats", c_uint64),
        ("beat_at", c_double),
        ("events", c_uint64),  # signs of progress
        ("progressed_at", c_double),
        ("step", c_uint32),
        ("queued", c_uint8),  # 1: the host runs ahead of a device and does not wait for its messages
        ("depth", c_uint8),
        ("stack", Event * MAX_DEPTH),
        ("channels", Last * MAX_CHANNELS),
        ("ring", Event * RING),
        ("notes", c_char * NOTE_SIZE * 2),
    )


def packer(fields: type[Structure]) -> struct.Struct:
    """Return what stores all fields of a structure at once, six times as fast as ctypes."""
    return struct.Struct("".join(kind._type_ for _, kind in fields._fields_))  # type: ignore[union-attr, misc]


SIZE, EVENT_SIZE, LAST_SIZE = sizeof(Record), sizeof(Event), sizeof(Last)
STACK_AT, CHANNELS_AT, RING_AT, NOTES_AT = (
    Record.stack.offset,
    Record.channels.offset,
    Record.ring.offset,
    Record.notes.offset,
)

ENTER, WAIT, ISSUE = 1, 2, 3
"""Kinds of events: a phase begins, a wait for a message begins, a message is issued."""
FORWARD, BACKWARD = 1, 2
DIRECTIONS = {0: "", FORWARD: "forward", BACKWARD: "backward"}
SEND, RECEIVE = 1, 2

CALLER = "caller"
"""Phase between the calls of a program that makes the steps itself."""
PHASES = (
    "start",  # interpreter and imports
    "join",  # the processes meet
    "lock",
    "demo",
    "groups",
    "model",
    "optimizer build",
    "index",
    "load",
    "reference",
    "loop",
    CALLER,
    "step",
    "data_wait",
    "forward_backward",
    "pipeline_wait",
    "bridge_wait",
    "reduce",
    "optimizer",
    "evaluate",
    "save",
    "end",
)
NUMBER_OF = {name: number for number, name in enumerate(PHASES)}

OPERATIONS = (
    "send",
    "recv",
    "recv_anysource",
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "allgather_coalesced",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "gather",
    "scatter",
    "barrier",
)
EQUAL_BYTES = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce", "_allgather_base"})
"""Collectives whose first argument has the same size on every rank."""

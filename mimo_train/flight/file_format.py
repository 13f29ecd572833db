"""File format of a rank: a header, the open phases, the last message of every channel, and a ring of events.

All numbers are little-endian. Times are seconds of the machine's monotonic clock; the header holds the offset to Unix
time. A *channel* is one direction between two ranks of a group, or all collectives of a group.
"""

import struct

FOLDER = "flight"
"""Folder in `run.dir`, with a subfolder for each start of the run."""
REPORT = "report.txt"
"""Report of a hang, next to the ranks' files."""

MAGIC = b"MIMOFLY2"

HEAD = struct.Struct("<8sIIQQQd64s")
"""magic, rank, world size, process id, its start time (clock ticks since boot), launcher's process id, Unix time minus
monotonic time, host."""
LIVE = struct.Struct("<QdQdI")
"""Heartbeats, time of the last one, signs of progress, time of the last one, last step begun."""
EVENT = struct.Struct("<QdBBHbxiHiIQI")
"""number, time, kind, what (phase or operation), place, direction, microbatch, group, peer, number in its channel,
bytes, step."""
SLOT = struct.Struct("<HbBiIHiIdQ")
"""A channel: group, direction (0: collective), operation, peer, number of the last message, phase, microbatch, step,
time, bytes."""

STEP = struct.Struct("<I")
"""The last field of LIVE."""

HEAD_AT, QUEUED_AT, LIVE_AT, DEPTH_AT, FRAMES_AT = 0, 152, 160, 248, 256
STEP_AT = LIVE_AT + LIVE.size - STEP.size
"""The byte at QUEUED_AT is 1 if the host runs ahead of a device and does not wait for its messages."""
MAX_DEPTH = 16
EVENT_SIZE = 48
SLOT_SIZE = 40
MAX_SLOTS = 512
SLOTS_AT = FRAMES_AT + MAX_DEPTH * EVENT_SIZE
RING = 1024
RING_AT = SLOTS_AT + MAX_SLOTS * SLOT_SIZE
NOTES_AT = RING_AT + RING * EVENT_SIZE
NOTE_SIZE = 512
READING, ERROR = 0, 1
"""Notes: the files that threads are reading; the error that ends the rank."""
SIZE = NOTES_AT + 2 * NOTE_SIZE
assert EVENT.size <= EVENT_SIZE and SLOT.size <= SLOT_SIZE

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

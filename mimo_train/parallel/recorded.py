"""Every message of torch's process groups goes through the flight recorder, those of Megatron-Core too.

torch 2.11 has a recorder of its own, but for gloo it has no messages between two ranks, and its file is a pickle; and
`Work` takes no attributes, so that works are known by their identity. The methods of the two classes are replaced once
in a process.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mimo_train.flight.file_format import EQUAL_BYTES, OPERATIONS, RECEIVE, SEND
from mimo_train.flight.recorder import RECORDER, Channel

MOST_WORKS = 4096
"""Works that nobody waits for are forgotten when there are so many."""

_DIRECTIONS = {"send": SEND, "recv": RECEIVE, "recv_anysource": RECEIVE}


class _Messages:
    """What is known of groups and of messages on their way."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Process groups are made anew, under the names of the old ones."""
        self.channels: dict[tuple[str, int, int], Channel] = {}
        self.works: dict[int, tuple[Channel, int, int]] = {}
        self._groups: dict[str, tuple[int, list[int]]] = {}

    def channel(self, group: Any, peer: int, direction: int) -> Channel:
        """The channel to a rank of a group (numbered in the group), -1 for its collectives."""
        name = group.group_name
        key = (name, peer, direction)
        channel = self.channels.get(key)
        if channel is None:
            if name not in self._groups:
                number, ranks = len(self._groups) + 1, dist.get_process_group_ranks(group)
                self._groups[name] = number, ranks
                RECORDER.group(number, name, group.group_desc, ranks)
            number, ranks = self._groups[name]
            channel = RECORDER.channel(number, ranks[peer] if 0 <= peer < len(ranks) else -1, direction)
            self.channels[key] = channel
        return channel


_messages = _Messages()
_installed: list[bool] = []


def record_messages() -> None:
    """Record the messages of process groups that are made from now on; those of earlier ones are forgotten."""
    _messages.clear()
    RECORDER.forget_messages()
    if _installed:
        return
    _installed.append(True)
    for number, name in enumerate(OPERATIONS):
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _recorded(getattr(dist.ProcessGroup, name), name, number))
    setattr(dist.Work, "wait", _waited(dist.Work.wait))  # noqa: B010 - a type checker knows it as a method


def _recorded(original: Callable, name: str, operation: int) -> Callable:
    direction, has_bytes = _DIRECTIONS.get(name, 0), name in EQUAL_BYTES or name in _DIRECTIONS
    to_peer, messages, recorder = name in ("send", "recv"), _messages, RECORDER

    def call(group: Any, *arguments: Any, **options: Any) -> Any:
        channel = messages.channel(group, arguments[1] if to_peer else -1, direction)
        number = recorder.issue(channel, operation, _bytes(arguments) if has_bytes else 0)
        work = original(group, *arguments, **options)
        works = messages.works
        if len(works) >= MOST_WORKS:
            works.clear()
        works[id(work)] = channel, operation, number
        return work

    return call


def _waited(original: Callable) -> Callable:
    messages, recorder = _messages, RECORDER

    def wait(work: Any, *arguments: Any, **options: Any) -> Any:
        known = messages.works.pop(id(work), None)
        if known is None:
            return original(work, *arguments, **options)
        recorder.wait(*known)
        try:
            return original(work, *arguments, **options)
        finally:
            recorder.leave()

    return wait


def _bytes(arguments: tuple) -> int:
    first = arguments[0] if arguments else None
    if isinstance(first, list):
        return sum(one.nbytes for one in first if isinstance(one, torch.Tensor))
    return first.nbytes if isinstance(first, torch.Tensor) else 0

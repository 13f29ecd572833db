"""Collectives: record each one, skip those of single-rank groups, and agree on errors.

torch 2.11 has its own recorder of messages, but without point-to-point messages for gloo, and its file is a pickle.
`Work` takes no attributes, so works are identified by `id`. Megatron-Core 0.19.2 also reduces over groups of one rank,
7 times in a step of the demo with one process; gloo copies there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from data.errors import DataError
from mimo_train.config.errors import PeersError, UserError
from mimo_train.flight.file_format import EQUAL_BYTES, OPERATIONS, RECEIVE, SEND
from mimo_train.flight.recorder import RECORDER, Channel

MOST_WORKS = 4096
"""Forget all pending works at this number, because nobody waits for some."""

_DIRECTIONS = {"send": SEND, "recv": RECEIVE, "recv_anysource": RECEIVE}


class _Messages:
    """The groups, and the messages on their way."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything. New process groups reuse the names of the old ones."""
        self.channels: dict[tuple[str, int, int], Channel] = {}
        self.works: dict[int, tuple[Channel, int, int]] = {}
        self._groups: dict[str, tuple[int, list[int]]] = {}

    def channel(self, group: Any, peer: int, direction: int) -> Channel:
        """Return the channel to a rank of a group (numbered in the group); -1 is for its collectives."""
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
_has_recorder: list[bool] = []


def record_messages() -> None:
    """Record the messages of process groups that are made from now on. Forget earlier ones."""
    _messages.clear()
    RECORDER.forget_messages()
    if _has_recorder:
        return
    _has_recorder.append(True)
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
        message = messages.works.pop(id(work), None)
        if message is None:
            return original(work, *arguments, **options)
        recorder.wait(*message)
        try:
            return original(work, *arguments, **options)
        finally:
            recorder.leave()

    return wait


def _bytes(arguments: tuple) -> int:
    first = arguments[0] if arguments else None
    if isinstance(first, list):
        return sum(tensor.nbytes for tensor in first if isinstance(tensor, torch.Tensor))
    return first.nbytes if isinstance(first, torch.Tensor) else 0


_SAME_REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
"""Reductions that return a single operand unchanged; `PREMUL_SUM` does not."""

_IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "barrier")
"""Operations that write their result into their input tensors."""

_INTO_FIRST = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
)
"""Operations with outputs and inputs of equal sizes: one tensor each, or lists."""

_has_single_rank: list[bool] = []


class Done(dist.Work):
    """The work of a completed operation."""

    def wait(self, *_: Any, **__: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


def return_at_once() -> None:
    """Skip collectives on single-rank groups, in all process groups."""
    if _has_single_rank:
        return
    _has_single_rank.append(True)
    for name in (*_IN_PLACE, *_INTO_FIRST):
        setattr(dist.ProcessGroup, name, _unless_alone(getattr(dist.ProcessGroup, name), copies=name in _INTO_FIRST))


def _unless_alone(original: Callable, copies: bool) -> Callable:
    def call(group: Any, *arguments: Any, **options: Any) -> Any:
        if group.size() > 1 or not _is_same((*arguments, *options.values())):
            return original(group, *arguments, **options)
        if copies:
            outputs, inputs = (each if isinstance(each, list) else [each] for each in arguments[:2])
            for output, value in zip(outputs, inputs, strict=True):
                if output.data_ptr() != value.data_ptr():
                    output.copy_(value.view_as(output))
        return Done()

    return call


def _is_same(arguments: tuple) -> bool:
    """True if an operation with these options returns its input."""
    operation = getattr(arguments[-1], "reduceOp", None) if arguments else None
    # `in` would compare in the other direction: only the option's operation equals a member.
    return operation is None or any(operation == same for same in _SAME_REDUCTIONS)


@contextmanager
def agreed(value: Any = None) -> Iterator[list[Any]]:
    """Run a block without collectives in which any rank may raise a UserError or DataError; then all ranks raise.

    Collective: one all-gather of objects. Other errors are bugs, and are raised at once.

    Args:
        value: value that this rank sends with the same message.

    Yields:
        A list that holds the values of all ranks after the block, in rank order.

    Raises:
        UserError, DataError: a rank has raised one. The lowest such rank raises its own; the others raise a
            `PeersError` with its text.
    """
    raised: UserError | DataError | None = None
    values: list[Any] = []
    try:
        yield values
    except (UserError, DataError) as error:
        raised = error
    text = None
    if raised is not None:
        text = str(raised), raised.kind if isinstance(raised, PeersError) else type(raised).__name__
    messages: list[tuple[tuple[str, str] | None, Any]] = [(text, value)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        messages *= dist.get_world_size()
        dist.all_gather_object(messages, messages[0])
    values += [value for _, value in messages]
    failed = [rank for rank, (text, _) in enumerate(messages) if text is not None]
    if not failed:
        return
    if raised is not None and (len(messages) == 1 or failed[0] == dist.get_rank()):
        raise raised
    first, _ = messages[failed[0]]
    assert first is not None
    raise PeersError(*first) from raised

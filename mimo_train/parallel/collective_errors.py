"""Errors that any rank may find, and all ranks raise: nobody waits in a collective for one that has ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from data.errors import DataError
from mimo_train.config.errors import PeersError, UserError


@contextmanager
def agreed(told: Any = None) -> Iterator[list[Any]]:
    """A block without collectives in which any rank may raise a UserError or DataError; at its end, all ranks do.
    Collective: one gathering of messages. Other errors are ours, and are not waited with.

    Args:
        told: what this rank tells the others with the same message.

    Yields:
        A list that holds, behind the block, what every rank has told, in their order.

    Raises:
        UserError, DataError: a rank has raised one; the lowest such rank raises its own, the others a `PeersError` with
            its text.
    """
    own: UserError | DataError | None = None
    everyones: list[Any] = []
    try:
        yield everyones
    except (UserError, DataError) as error:
        own = error
    messages: list[tuple[tuple[str, str] | None, Any]] = [(None if own is None else (str(own), _kind(own)), told)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        messages *= dist.get_world_size()
        dist.all_gather_object(messages, messages[0])
    everyones += [one for _, one in messages]
    rank, first = next(((rank, text) for rank, (text, _) in enumerate(messages) if text is not None), (0, None))
    if first is None:
        return
    if own is not None and (len(messages) == 1 or rank == dist.get_rank()):
        raise own
    raise PeersError(*first) from own


def _kind(error: UserError | DataError) -> str:
    return error.kind if isinstance(error, PeersError) else type(error).__name__

"""Errors that any rank may find, and all ranks raise: nobody waits in a collective for one that has ended."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mimo_train.config.fault import UserError


@contextmanager
def agreed() -> Iterator[None]:
    """A block without collectives in which any rank may raise a UserError; at its end, all ranks do. Collective: one
    gathering of messages. Other errors are ours, and are not waited with.

    Raises:
        UserError: a rank has raised one; the message is that of the lowest such rank.
    """
    own: UserError | None = None
    try:
        yield
    except UserError as error:
        own = error
    messages: list[str | None] = [None if own is None else str(own)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        messages *= dist.get_world_size()
        dist.all_gather_object(messages, messages[0])
    first = next((message for message in messages if message is not None), None)
    if first is not None:
        raise UserError(first) from own

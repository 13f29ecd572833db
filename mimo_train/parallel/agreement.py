"""Errors that any rank may find, and all ranks raise: nobody waits in a collective for one that has ended."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mimo_train.config.fault import PeersError, UserError


@contextmanager
def agreed() -> Iterator[None]:
    """A block without collectives in which any rank may raise a UserError; at its end, all ranks do. Collective: one
    gathering of messages. Other errors are ours, and are not waited with.

    Raises:
        UserError: a rank has raised one; the lowest such rank raises its own, the others a `PeersError` with its text.
    """
    own: UserError | None = None
    try:
        yield
    except UserError as error:
        own = error
    messages: list[tuple[str, str] | None] = [None if own is None else (str(own), _kind(own))]
    if dist.is_initialized() and dist.get_world_size() > 1:
        messages *= dist.get_world_size()
        dist.all_gather_object(messages, messages[0])
    rank, first = next(((rank, text) for rank, text in enumerate(messages) if text is not None), (0, None))
    if first is None:
        return
    if own is not None and (len(messages) == 1 or rank == dist.get_rank()):
        raise own
    raise PeersError(*first) from own


def _kind(error: UserError) -> str:
    return error.kind if isinstance(error, PeersError) else type(error).__name__

"""The end of a rank that fails among others."""

import os
import sys
import time
import traceback
from typing import NoReturn

from data.text_format import shown_lines
from mimo_train.commands.arguments import users_faults
from mimo_train.config.errors import PeersError
from mimo_train.launch.rank_monitor import is_lost_peer, note_error
from mimo_train.logging.rank_log import show

SECONDS_BEHIND_PEERS = 3


def end_rank(error: BaseException, rank: int) -> NoReturn:
    """Print an error and exit with code 1, without waiting for peers: the launcher then ends them."""
    note_error(error)
    if isinstance(error, PeersError) or is_lost_peer(error):
        # The rank with the cause exits first. The launcher then ends the others.
        time.sleep(SECONDS_BEHIND_PEERS)
    if is_lost_peer(error):
        # What follows from the cause, which another rank has printed, or its machine has taken along.
        sys.stderr.write(f"rank {rank}: another rank has ended ({str(error).splitlines()[0]})\n")
    elif not isinstance(error, PeersError):
        _print_error(error, rank)
    show("", end="")  # what is still in its buffer
    sys.stderr.flush()
    # Destroying process groups would wait for peers that are stuck in a collective.
    os._exit(1)


def _print_error(error: BaseException, rank: int) -> None:
    prefix = f"rank {rank}: "
    if isinstance(error, users_faults()):
        prefix, text = f"error: {prefix}", shown_lines(str(error))
    else:
        text = traceback.format_exc()
    # In one write: ranks that fail together would mix their lines.
    sys.stderr.write("".join(f"{prefix}{line}\n" for line in text.splitlines()))

"""A checkpoint that all ranks read: rank 0 chooses it.

Each rank that looked for the newest by itself could find another one, while the run that writes them trains on.
"""

from collections.abc import Callable

import torch.distributed as dist

from data.storage.url import Place
from mimo_train.checkpoint import folders
from mimo_train.parallel.collective_errors import agreed


def chosen_by_first(choose: Callable[[], Place | None], key: str) -> Place | None:
    """What `choose` finds on rank 0; every rank must find it too. Collective.

    Args:
        key: for messages, the config key that it comes from.

    Raises:
        UserError: that of `choose`, or a rank does not see the checkpoint; on every rank.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    box = list[Place | None]([None])
    with agreed():
        if alone or dist.get_rank() == 0:
            box = [choose()]
    if not alone:
        dist.broadcast_object_list(box)
    folder = box[0]
    with agreed():
        if folder is not None:
            folders.require_seen(folder, key)
    return folder

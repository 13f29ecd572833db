"""Check that a checkpoint is complete and has what the model needs, and read its weights into local shards.

Every rank reaches the same verdict before loading, so that none waits for a rank that has ended. Contents are verified
by hash during the read.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist

from data.storage.url import Place
from data.text_format import listed
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.damage import damage_named
from mimo_train.checkpoint.format.index import WEIGHT, Key, is_of_rank
from mimo_train.checkpoint.format.read import Reader, Wanted
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.local_shards import MOMENTS, Held
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.parallel.collectives import agreed

RECORD_KEYS = (*("step", "train_state", "schedulers", "optimizer", "layout", "data_fingerprint", "rerun", "config"),)
"""Required keys of a record, see `store.record_of`."""


def opened(folder: Place) -> tuple[Reader, dict[str, Any]]:
    """Return the reader and the record of a checkpoint. Collective.

    Raises:
        UserError: a file is missing, truncated or changed, as far as visible without reading tensors; on every rank.
    """
    with agreed(), damage_named(folder):
        record = folders.read_record(folder, *RECORD_KEYS)
        reader = Reader(folder)
        if not dist.is_initialized() or dist.get_rank() == 0:
            reader.require_files()
    return reader, record


def require_held(asked: Iterable[Held], reader: Reader, folder: Place, *, states: bool = False) -> None:
    """Require every requested tensor in the checkpoint, with the same shape. Collective.

    Args:
        states: True to require the tensors' optimizer states instead.

    Raises:
        UserError: some are missing; on every rank, with the findings of the lowest such rank.
    """
    with agreed():
        complaints: dict[str, str] = {}
        for one in asked:
            for state in MOMENTS if states else (WEIGHT,):
                if why := _complaint(one.key(state), one, reader):
                    complaints.setdefault(f"{one.module} {one.name}", why)
        if complaints and states:
            raise UserError(
                f"checkpoint {folder} is of a run that trained other parameters: {told(complaints)}; give the "
                "config that it was saved with, or begin a new run with its weights: another run.dir, and "
                f"checkpoint.weights={folder}"
            )
        if complaints:
            raise UserError(
                f"checkpoint {folder} is of another model: {told(complaints)}; give the config that it was saved "
                "with, or begin a new run in another run.dir"
            )


def require_taken(held: Iterable[Held], reader: Reader, folder: Place, modules: Collection[str] | None) -> None:
    """Require a place in the model, on any rank, for every weight in the checkpoint. Collective.

    Args:
        held: this rank's tensors of the model.
        modules: modules of this run, if other encoders may be skipped.

    Raises:
        UserError: some weights would be lost; on every rank.
    """
    asked = {one.key() for one in held}
    everyone: list[Any] = [asked]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, asked)
    with agreed():
        lost = [key for key in _weights(reader.index.pieces, modules) if key not in set().union(*everyone)]
        if lost:
            named = dict.fromkeys((f"{key.module} {key.name}" for key in lost), "has no place in this one")
            raise UserError(
                f"checkpoint {folder} is of another model: {told(named)}; give the config that it was saved with, "
                "its adapters (modules.*.lora) and its changes to the model too"
            )


def _weights(keys: Iterable[Key], modules: Collection[str] | None) -> list[Key]:
    """Return the model's weights without optimizer and rank states, restricted to `modules` if given."""
    return [
        key
        for key in keys
        if key.state == WEIGHT
        and not is_of_rank(key)
        and (modules is None or key.module == LANGUAGE or key.module in modules)
    ]


def told(complaints: dict[str, str]) -> str:
    """Return a short list of what is wrong with tensors."""
    return listed([f"{key} {why}" for key, why in complaints.items()])


def _complaint(key: Key, asked: Held, reader: Reader) -> str:
    if key not in reader.index.pieces:
        return "is not in it" if key.state == WEIGHT else f"has no {key.state} in it"
    was, now = reader.index.shape(key), asked.boxes[0][1].shape
    return "" if was == now else f"has shape {was} there and {now} here"


def fill_weights(reader: Reader, wanted: Iterable[tuple[Held, Key]]) -> None:
    """Read tensors by their keys in the checkpoint. Raises Damage if a needed block is damaged."""
    fill(
        reader,
        [
            (key, span, one.tensor.detach().view(-1)[first:last])
            for one, key in wanted
            for first, last, span in one.spans(0, one.tensor.numel())
        ],
    )


def fill(reader: Reader, targets: list[tuple[Key, Span, torch.Tensor]]) -> None:
    """Read spans into tensors on any device, [span.numel] each; errors as in `fill_weights`."""
    staged = [
        (into, into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")) for *_, into in targets
    ]
    reader.fill(Wanted(key, span, here) for (key, span, _), (_, here) in zip(targets, staged, strict=True))
    for into, here in staged:
        if into is not here:
            into.copy_(here)

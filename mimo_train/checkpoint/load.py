"""Load the state of a run at any layout.

Every rank reads what it needs, and all reach the same verdict before loading, so that none waits for a rank that has
ended. Contents are verified by hash during the read. Random generators are restored only at the same layout.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import compress
from operator import not_
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from data.storage.url import Place
from data.text_format import listed
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.damage import damage_named, damaged
from mimo_train.checkpoint.folders import LEFT_OUT, base_of
from mimo_train.checkpoint.format.index import WEIGHT, Key, is_of_rank
from mimo_train.checkpoint.format.read import Reader, Wanted
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.frozen_base import require_same
from mimo_train.checkpoint.local_shards import LocalShard, optimizer_shards, shards_of_model
from mimo_train.checkpoint.rank_state import state_of_rank
from mimo_train.checkpoint.resume.choose import chosen_by_first
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE, is_adapter
from mimo_train.layout.ranks import RunLayout
from mimo_train.models.lora.adapters import start_magnitudes
from mimo_train.optim.group_optimizer import EMA
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.parallel import device
from mimo_train.parallel.collectives import agreed

RECORD_KEYS = ("step", "train_state", "schedulers", "optimizer", "layout", "data_fingerprint", "rerun", "config")
"""Required keys of a record, see `Checkpointer`."""


def load_checkpoint(
    folder: Place,
    layout: RunLayout,
    model: list[MegatronModule],
    optimizer: ModuleOptimizer | None = None,
    schedulers: Any = None,
    train_state: Any = None,
    *,
    ema: bool = False,
) -> dict[str, Any]:
    """Load the model from `folder`, and if given optimizer, schedules, train state and generators. Collective.

    Without an optimizer, modules that this run lacks are skipped, and adapters may be missing: they keep their values,
    except magnitudes, which follow the loaded weights. Weights that the checkpoint leaves out must be in the model
    already: their fingerprint is compared. Averages that the checkpoint lacks start from the weights (`optim.ema`).

    Args:
        ema: read the averages of weights where the checkpoint has them, instead of the weights. Without an optimizer.

    Returns:
        The checkpoint's record; its `rerun` is this rank's state, None at another layout.

    Raises:
        UserError: files are missing or damaged, tensors are missing or have other shapes, or the model has no place for
            some. On every rank alike.
    """
    reader, record = opened(folder)
    shards = shards_of_model(model)
    updated = [part for inner in (optimizer.inner() if optimizer else ()) for part in optimizer_shards(inner)]
    missing = [shard for shard in shards if shard.key() not in reader.index.pieces]
    new = [] if optimizer else [shard for shard in missing if is_adapter(shard.name)]
    if LEFT_OUT in record:
        base = [shard for shard in missing if shard not in new]
        require_same(record, base, folder)
        new += base
    wanted = [shard for shard in shards if shard not in new]
    require_used(shards, reader, folder, None if optimizer else layout.modules)
    require_stored(wanted, reader, folder)
    by_parameter = {id(shard.tensor): shard for shard in shards}
    states = [(by_parameter[id(part.parameter)], part, state) for part in updated for state in part.values]
    is_stored = [state != EMA or shard.key(state) in reader.index.pieces for shard, _, state in states]
    saved = [*compress(states, is_stored)]
    require_states(((shard, [state]) for shard, _, state in saved), reader, folder)
    with agreed(), damage_named(folder):
        targets = [
            (shard.key(state), span, values)
            for shard, part, state in saved
            for span, values in part.spans(shard, state)
        ]
        fill(reader, [*weight_targets((shard, weight_key(shard, reader, ema=ema)) for shard in wanted), *targets])
        for _, part, _ in compress(states, map(not_, is_stored)):  # `optim.ema` is new in this run
            part.values[EMA].copy_(part.values[WEIGHT])
        for part in updated:
            part.stored()
        rng = rerun = None
        if optimizer is not None and record["layout"] == folders.recorded_layout(layout):
            rng = state_of_rank(reader, "rng")
            rerun = state_of_rank(reader, "rerun") if record["rerun"] else None
    added = {id(shard.tensor) for shard in new}
    for chunk in map(unwrap_model, model):
        start_magnitudes(chunk, [name for name, value in chunk.named_parameters() if id(value) in added])
    with agreed(), _record_fits(folder):
        if optimizer is not None:
            optimizer.load_plain_state(record["optimizer"])
        if schedulers is not None:
            schedulers.load_state_dict(record["schedulers"])
        if train_state is not None:
            train_state.load_state_dict(record["train_state"])
    if rng is not None:
        device.set_rng_state(rng)
    return {**record, "rerun": rerun}


def weight_key(shard: LocalShard, reader: Reader, *, ema: bool) -> Key:
    """Return the key of a tensor, with `ema` that of its average if there is one."""
    return key if ema and (key := shard.key(EMA)) in reader.index.pieces else shard.key()


def load_weights(folder: Place, layout: RunLayout, model: list[MegatronModule]) -> None:
    """Load only the model from `folder`, after the weights that it leaves out. Collective; see `load_checkpoint`."""
    load_base(folder, layout, model)
    load_checkpoint(folder, layout, model)


def load_base(folder: Place, layout: RunLayout, model: list[MegatronModule], weights: str = "") -> None:
    """Load the weights that a checkpoint leaves out, unless they come from the seed. Collective; see `load_checkpoint`.

    Args:
        weights: folder of these weights; overrides that of the checkpoint's run.
    """
    base = chosen_by_first(partial(base_of, folder, weights), "checkpoint.weights")
    if base is not None:
        load_weights(base, layout, model)


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


def require_stored(shards: Iterable[LocalShard], reader: Reader, folder: Place) -> None:
    """Require every tensor in the checkpoint, with the same shape. Collective.

    Raises:
        UserError: some are missing; on every rank, with the findings of the lowest such rank.
    """
    with agreed():
        faults: dict[str, str] = {}
        for shard in shards:
            if shard.key() not in reader.index.pieces:
                fault = "is not in it"
            elif (fault := shape_fault(shard, shard.key(), reader)) == "":
                continue
            faults.setdefault(f"{shard.module} {shard.name}", fault)
        if faults:
            # Keys that differ were rejected before: a version that adapts further layers by default.
            older = all(is_adapter(name) for name in faults)
            remedy = (
                f"an earlier version had no adapters there; begin a new run with its weights: another run.dir, and "
                f"checkpoint.weights={folder}"
                if older
                else "give the config that it was saved with, or begin a new run in another run.dir"
            )
            raise UserError(f"checkpoint {folder} is of another model: {listed_faults(faults)}; {remedy}")


def require_states(shards: Iterable[tuple[LocalShard, list[str]]], reader: Reader, folder: Place) -> None:
    """Require the states of the optimizer in the checkpoint. Collective; errors are as in `require_stored`.

    Args:
        shards: tensors and their states.
    """
    with agreed():
        faults: dict[str, str] = {}
        for shard, states in shards:
            for key in (shard.key(state) for state in states):
                if key not in reader.index.pieces:
                    faults.setdefault(f"{shard.module} {shard.name}", f"has no {key.state} in it")
        if faults:
            raise UserError(
                f"checkpoint {folder} is of a run that trained other parameters, or with another optim.name: "
                f"{listed_faults(faults)}; give the config that it was saved with, or begin a new run with its "
                f"weights: another run.dir, and checkpoint.weights={folder}"
            )


def shape_fault(shard: LocalShard, key: Key, reader: Reader) -> str:
    """Return how the shape of a tensor in the checkpoint differs from the model's; empty if it does not."""
    was, now = reader.index.shape(key), shard.boxes[0][1].shape
    return "" if was == now else f"has shape {was} there and {now} here"


def listed_faults(faults: dict[str, str]) -> str:
    """Return a short list of what is wrong with tensors."""
    return listed([f"{name} {fault}" for name, fault in faults.items()])


def require_used(shards: Iterable[LocalShard], reader: Reader, folder: Place, modules: Collection[str] | None) -> None:
    """Require a place in the model, on any rank, for every weight in the checkpoint. Collective.

    Args:
        shards: this rank's tensors of the model.
        modules: modules of this run, if other encoders may be skipped.

    Raises:
        UserError: some weights would be lost; on every rank.
    """
    keys = over_ranks({shard.key() for shard in shards})
    with agreed():
        lost = {
            f"{key.module} {key.name}": "has no place in this one"
            for key in reader.index.pieces.keys() - keys
            if key.state == WEIGHT and not is_of_rank(key)
            if modules is None or key.module == LANGUAGE or key.module in modules
        }
        if lost:
            raise UserError(
                f"checkpoint {folder} is of another model: {listed_faults(dict(sorted(lost.items())))}; give the "
                "config that it was saved with, its adapters (modules.*.lora) and its changes to the model too"
            )


def over_ranks[Item](items: set[Item]) -> set[Item]:
    """Return the union of sets over ranks. Collective."""
    with agreed(items) as ranks:
        pass
    return set().union(*ranks)


TargetSpan = tuple[Key, Span, torch.Tensor]
"""A span of a tensor in a checkpoint, and the memory [span.numel] that it is read into, on any device."""


def weight_targets(shards: Iterable[tuple[LocalShard, Key]]) -> Iterator[TargetSpan]:
    """Yield the targets of this rank's weights, by their keys in the checkpoint."""
    for shard, key in shards:
        flat = shard.tensor.detach().view(-1)
        for first, last, span in shard.spans(0, flat.numel()):
            yield key, span, flat[first:last]


def fill(reader: Reader, targets: Iterable[TargetSpan]) -> None:
    """Read spans of tensors. Raises Damage if a needed block is damaged."""
    targets = list(targets)
    staged = [into if into.device.type == "cpu" else torch.empty_like(into, device="cpu") for *_, into in targets]
    reader.fill(Wanted(key, span, buffer) for (key, span, _), buffer in zip(targets, staged, strict=True))
    for (*_, into), buffer in zip(targets, staged, strict=True):
        if into is not buffer:
            into.copy_(buffer)


@contextmanager
def _record_fits(folder: Place) -> Iterator[None]:
    """Turn type errors in record values into damage: the marker only proves that the record is unchanged."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        reason = f"{folders.RECORD} holds other values than a run writes ({type(error).__name__}: {error})"
        raise damaged(folder, reason) from error

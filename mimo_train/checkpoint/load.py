"""Load the state of a run at any layout.

Every rank reads what it needs, and all reach the same verdict before loading, so that none waits for a rank that has
ended. Contents are verified by hash during the read. Random generators are restored only at the same layout.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
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
from mimo_train.checkpoint.local_shards import MOMENTS, Held, Updated, held_tensors, updated_ranges
from mimo_train.checkpoint.rank_state import state_of_rank
from mimo_train.checkpoint.resume.choose import chosen_by_first
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE, is_adapter
from mimo_train.layout.ranks import RunLayout
from mimo_train.models.lora import start_magnitudes
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
) -> dict[str, Any]:
    """Load the model from `folder`, and if given optimizer, schedules, train state and generators. Collective.

    Without an optimizer, modules that this run lacks are skipped, and adapters may be missing: they keep their values,
    except magnitudes, which follow the loaded weights. Weights that the checkpoint leaves out must be in the model
    already: their fingerprint is compared.

    Returns:
        The checkpoint's record; its `rerun` is this rank's state, None at another layout.

    Raises:
        UserError: files are missing or damaged, tensors are missing or have other shapes, or the model has no place for
            some. On every rank alike.
    """
    reader, record = opened(folder)
    held = held_tensors(model)
    updated = [one for each in (optimizer.inner() if optimizer else ()) for one in updated_ranges(each)]
    missing = [one for one in held if one.key() not in reader.index.pieces]
    new = [] if optimizer else [one for one in missing if is_adapter(one.name)]
    if LEFT_OUT in record:
        base = [one for one in missing if one not in new]
        require_same(record, base, folder)
        new += base
    wanted = [one for one in held if one not in new]
    require_taken(held, reader, folder, None if optimizer else layout.modules)
    require_held(wanted, reader, folder)
    by_parameter = {id(one.tensor): one for one in held}
    require_held([by_parameter[id(one.parameter)] for one in updated], reader, folder, states=True)
    with agreed(), damage_named(folder):
        _read(reader, wanted, updated, by_parameter)
        rng = rerun = None
        if optimizer is not None and record["layout"] == folders.recorded_layout(layout):
            rng = state_of_rank(reader, "rng")
            rerun = state_of_rank(reader, "rerun") if record["rerun"] else None
    added = {id(one.tensor) for one in new}
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


def load_weights(folder: Place, layout: RunLayout, model: list[MegatronModule], base: str = "") -> None:
    """Load only the model from `folder`, and first the weights that it leaves out. Collective; see `load_checkpoint`.

    Args:
        base: folder of the left-out weights; overrides that of the checkpoint's run.
    """
    load_base(folder, layout, model, base)
    load_checkpoint(folder, layout, model)


def load_base(folder: Place, layout: RunLayout, model: list[MegatronModule], given: str = "") -> None:
    """Load the weights that a checkpoint leaves out, unless they come from the seed. Collective; see `load_weights`."""
    base = chosen_by_first(partial(base_of, folder, given), "checkpoint.weights")
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


def _read(reader: Reader, held: list[Held], updated: list[Updated], by_parameter: dict[int, Held]) -> None:
    targets: list[tuple[Key, Span, torch.Tensor]] = []
    filled = {id(one.tensor) for one in held}
    for one in held:
        flat = one.tensor.detach().view(-1)
        targets += [(one.key(), span, flat[first:last]) for first, last, span in one.spans(0, one.tensor.numel())]
    for each in updated:
        for first, last, span in by_parameter[id(each.parameter)].spans(each.start, each.stop):
            for state, values in each.values.items():
                into = values[first - each.start : last - each.start]
                # In fp32 the master copy is the parameter itself.
                own = each.parameter.data_ptr() + first * each.parameter.element_size()
                if id(each.parameter) in filled and into.data_ptr() == own and into.dtype == each.parameter.dtype:
                    continue
                targets.append((by_parameter[id(each.parameter)].key(state), span, into))
    fill(reader, targets)


@contextmanager
def _record_fits(folder: Place) -> Iterator[None]:
    """Turn type errors in record values into damage: the marker only proves that the record is unchanged."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        why = f"{folders.RECORD} holds other values than a run writes ({type(error).__name__}: {error})"
        raise damaged(folder, why) from error

"""Saving and loading the state of a run, at any layout.

Every rank writes what no other rank writes too, and reads what it needs: nothing is gathered. Random generators are
stored per rank and restored only at the same layout.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import Call, Caller, RerunDiagnostic, RerunMode, RerunState
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from data.storage.url import Place
from mimo_train.checkpoint import folder_changes, folders
from mimo_train.checkpoint.background_save import InFlight, Job, Snapshot
from mimo_train.checkpoint.damage import damage_named, damaged
from mimo_train.checkpoint.failed_save import raise_together
from mimo_train.checkpoint.folders import LEFT_OUT, base_of
from mimo_train.checkpoint.format.files import of_rank
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.plain import pack, unpack
from mimo_train.checkpoint.format.read import Reader
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.format.write import Part, complete, write_rank
from mimo_train.checkpoint.frozen_base import fingerprint, is_frozen, require_same
from mimo_train.checkpoint.integrity import fill, opened, require_held, require_taken
from mimo_train.checkpoint.local_shards import Held, Updated, held_tensors, trained_parameters, updated_ranges
from mimo_train.checkpoint.resume.choose import chosen_by_first
from mimo_train.config.compose import to_dict
from mimo_train.config.errors import UserError
from mimo_train.config.parts import is_adapter
from mimo_train.layout.ranks import RunLayout
from mimo_train.layout.run import Run
from mimo_train.models.lora.adapters import start_magnitudes
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.parallel import device
from mimo_train.parallel.collectives import agreed

_logger = logging.getLogger(__name__)

RERUN_CLASSES = (Call, Caller, RerunDiagnostic, RerunMode, RerunState)
"""What the state for repeating a step is made of, beside plain values."""


@dataclass(frozen=True)
class Target:
    """Where a checkpoint goes, and which others stay."""

    run_dir: Place
    """Folder or URL in which the folder `checkpoints` is."""
    step: int
    non_persistent: bool
    """Whether it is of the kind of which only the newest is kept."""
    keep: int
    """Number of checkpoints of the run to keep; 0 keeps all."""
    keep_every: int
    """Steps of which every multiple is kept; 0: none."""


@dataclass(frozen=True)
class Opened:
    """Folders of a checkpoint, made by `open_folder`."""

    partial: Place
    """The one that it is written into."""
    final: Place
    """The one that it is when it is complete."""


def save_parts(
    run: Run, held: list[Held], optimizer: ModuleOptimizer, rerun: dict[str, Any] | None, *, finite: bool
) -> tuple[list[Part], dict[str, str]]:
    """What this rank writes, as views of the live tensors. Collective.

    With `checkpoint.trained_only` there are no weights that the run never trains, but a fingerprint of them.

    Args:
        held: what this rank has of the model.
        rerun: this rank's state for repeating the step; on all ranks or on none.
        finite: whether weights must be finite.

    Returns:
        (the parts, what the record has of the weights that are left out).
    """
    left_out = {}
    if run.cfg.checkpoint.trained_only:
        frozen = [one for one in held if is_frozen(one, optimizer.releases)]
        left_out = {LEFT_OUT: fingerprint(frozen)}
        held = [one for one in held if one not in frozen]
    parts = [*_own_parts(held, optimizer, finite), *_parts_of_rank("rng", device.get_rng_state())]
    return parts + (_parts_of_rank("rerun", rerun) if rerun is not None else []), left_out


def open_folder(target: Target, nbytes: int) -> Opened:
    """Make the folder that a checkpoint is written into. Collective.

    Args:
        nbytes: what all ranks write.

    Raises:
        SaveFailed: it cannot be made, has no room, or is not on this rank's file system; on every rank.
    """

    box = list[Opened | None]([None])

    def make() -> None:
        if dist.get_rank() == 0:
            box[0] = Opened(*folder_changes.begin(target.run_dir, target.step, target.non_persistent, nbytes))

    def look() -> None:
        assert box[0] is not None
        folder_changes.require_shared(box[0].partial)

    raise_together(Job(make, beside=False).error, target.run_dir)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box)
    raise_together(Job(look, beside=False).error, target.run_dir)
    assert box[0] is not None
    return box[0]


def record_of(
    run: Run,
    optimizer: ModuleOptimizer,
    schedulers: Any,
    train_state: Any,
    others: dict[str, Any],
) -> dict[str, Any]:
    """The record of a checkpoint of this moment, in plain values.

    Args:
        others: entries beside those of the run.
    """
    return {
        "step": train_state.step,
        "train_state": train_state.state_dict(),
        "schedulers": schedulers.state_dict(),
        "optimizer": optimizer.plain_state(),
        "layout": _layout_key(run.layout),
        "config": to_dict(run.cfg),
        **others,
    }


def begin_save(
    target: Target,
    folder: Opened,
    parts: list[Part],
    record: dict[str, Any],
    sizes: Sequence[int],
    snapshot: Snapshot | None,
) -> tuple[InFlight, Callable[[], None]]:
    """Write what this rank has, into `folder`, which `open_folder` has made.

    Args:
        sizes: bytes that each rank writes.
        snapshot: memory for a copy, from which a thread writes; None: all is done at once.

    Returns:
        (the save, what is to be called before the values of `parts` change).
    """
    rank, world, copies = dist.get_rank(), dist.get_world_size(), parts
    wait = hold = _nothing
    if snapshot is not None:
        copies, wait, hold = snapshot.take(parts)
    # On a device what is copied beside training must live until it is.
    sources = [] if snapshot is None else [*parts]

    def write() -> None:
        wait()
        sources.clear()
        write_rank(folder.partial, rank, copies)

    def commit() -> None:
        text = folders.record_text(record)  # here, since it takes as long as a copy of 40 MB
        complete(folder.partial, folder.final, world, {folders.RECORD: text}, sizes)
        try:
            folder_changes.remove_old(target.run_dir, target.keep, target.non_persistent, target.keep_every)
        except OSError as error:
            _logger.warning("an old checkpoint cannot be removed (%s)", error)

    save = InFlight(
        folder.final,
        target.run_dir,
        write,
        commit,
        abandon=lambda: folder_changes.remove(folder.partial),
        all_written=lambda: folder_changes.holds(folder.partial, [of_rank(each)[1] for each in range(world)]),
        beside=snapshot is not None,
    )
    return save, hold


def _nothing() -> None:
    pass


def load_checkpoint(
    folder: Place,
    layout: RunLayout,
    model: list[MegatronModule],
    optimizer: ModuleOptimizer | None = None,
    schedulers: Any = None,
    train_state: Any = None,
) -> dict[str, Any]:
    """Load the model from `folder`, and if given optimizer, schedules, train state and generators.

    Collective over all ranks.

    Without an optimizer, adapters may be missing in the checkpoint: they keep their values, but for magnitudes, which
    are those of the loaded weights; and modules that this run does not have are left out. Weights that the checkpoint
    leaves out must be in the model already: they are compared with its fingerprint of them.

    Returns:
        The checkpoint's record; its `rerun` is this rank's state, None at another layout.

    Raises:
        UserError: files are missing or damaged, tensors are not there or of other shapes, or the model has no place for
            some. On every rank alike.
    """
    reader, record = opened(folder)
    with closing(reader):
        return _loaded(reader, record, folder, layout, model, optimizer, schedulers, train_state)


def _loaded(
    reader: Reader,
    record: dict[str, Any],
    folder: Place,
    layout: RunLayout,
    model: list[MegatronModule],
    optimizer: ModuleOptimizer | None,
    schedulers: Any,
    train_state: Any,
) -> dict[str, Any]:
    held, updated = held_tensors(model), list(_updated(optimizer))
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
        if optimizer is not None and record["layout"] == _layout_key(layout):
            rng = _of_rank(reader, "rng")
            rerun = _of_rank(reader, "rerun") if record["rerun"] else None
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


@contextmanager
def _record_fits(folder: Place) -> Iterator[None]:
    """Turns what comes of values of other types into damage: the marker says only that the record is what was
    written."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        why = f"{folders.RECORD} holds other values than a run writes ({type(error).__name__}: {error})"
        raise damaged(folder, why) from error


def load_weights(folder: Place, layout: RunLayout, model: list[MegatronModule], base: str = "") -> None:
    """Load the model alone from `folder`, after the weights that it leaves out, if any, from where its run had them.
    Collective; errors as of `load_checkpoint`.

    Args:
        base: the folder that these are in, instead of that of the checkpoint's run.
    """
    load_base(folder, layout, model, base)
    load_checkpoint(folder, layout, model)


def load_base(folder: Place, layout: RunLayout, model: list[MegatronModule], given: str = "") -> None:
    """Load the weights that the checkpoint in `folder` leaves out, if any, unless they are those of its run's seed.
    Arguments as of `load_weights`. Collective."""
    base = chosen_by_first(partial(base_of, folder, given), "checkpoint.weights")
    if base is not None:
        load_weights(base, layout, model)


def _updated(optimizer: ModuleOptimizer | None) -> Iterator[Updated]:
    for each in optimizer.inner() if optimizer is not None else ():
        yield from updated_ranges(each)


def _own_parts(held: list[Held], optimizer: ModuleOptimizer, finite: bool) -> Iterator[Part]:
    """What this rank writes: of several that hold the same, the first."""
    by_parameter = {id(one.tensor): one for one in held}
    trained: set[int] = set()
    for each in optimizer.inner():
        trained |= trained_parameters(each)
        for updated in updated_ranges(each):
            one = by_parameter[id(updated.parameter)]
            if any(one.replica[:2] if updated.is_cut else one.replica):
                continue
            for first, last, span in one.spans(updated.start, updated.stop):
                for state, values in updated.values.items():
                    part = values[first - updated.start : last - updated.start]
                    yield Part(one.key(state), span, part, finite and state == WEIGHT)
    for one in held:
        if id(one.tensor) not in trained and not any(one.replica):
            flat = one.tensor.detach().reshape(-1)
            if flat.is_cuda and not isinstance(one.tensor, torch.nn.Parameter):
                flat = flat.clone()  # a forward pass may change it before a copy beside it is made
            for first, last, span in one.spans(0, one.tensor.numel()):
                yield Part(one.key(), span, flat[first:last])


def _read(reader: Reader, held: list[Held], updated: list[Updated], by_parameter: dict[int, Held]) -> None:
    """Fill tensors and the optimizer's values."""
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


def _parts_of_rank(name: str, state: dict[str, Any]) -> list[Part]:
    """This rank's own state, as tensors of one rank."""
    text, tensors = pack(state, RERUN_CLASSES)
    as_bytes = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    module = f"rank_{dist.get_rank():05d}"
    # `_of_rank` counts them, and a file has no tensor without elements.
    assert all(tensor.numel() for tensor in tensors), f"{name} has a tensor without elements"
    return [
        Part(Key(module, f"{name}.{number}", WEIGHT), Span.of_whole(tuple(tensor.shape)), tensor.reshape(-1))
        for number, tensor in enumerate([as_bytes, *tensors])
    ]


def _of_rank(reader: Reader, name: str) -> Any:
    module = f"rank_{dist.get_rank():05d}"
    keys = [key for key in reader.index.pieces if key.module == module and key.name.rpartition(".")[0] == name]
    text, *tensors = [reader.whole(key) for key in sorted(keys, key=lambda key: int(key.name.rpartition(".")[2]))]
    return unpack(text.numpy().tobytes().decode(), tensors, RERUN_CLASSES)


def _layout_key(layout: RunLayout) -> dict[str, list[int]]:
    return {name: [getattr(of, size) for size in folders.LAYOUT] for name, of in layout.modules.items()}

"""Save and load the state of a run, at any layout.

Every rank writes what no other rank writes and reads what it needs: nothing is gathered. Random generators are stored
per rank and restored only at the same layout.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from mimo_train.models.lora import start_magnitudes
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.parallel import device
from mimo_train.parallel.collectives import agreed

_logger = logging.getLogger(__name__)

RERUN_CLASSES = (Call, Caller, RerunDiagnostic, RerunMode, RerunState)
"""Classes in the state for repeating a step, in addition to plain values."""


@dataclass(frozen=True)
class Target:
    """Destination of a checkpoint, and which others are kept."""

    run_dir: Place
    """Folder or URL that contains the folder `checkpoints`."""
    step: int
    non_persistent: bool
    """True for the kind of which only the newest is kept."""
    keep: int
    """Number of checkpoints of the run to keep; 0 keeps all."""
    keep_every: int
    """Keep every step that is a multiple of this; 0 for none."""


@dataclass(frozen=True)
class Opened:
    """Folders of a checkpoint, created by `open_folder`."""

    partial: Place
    """Folder that is written into."""
    final: Place
    """Folder of the complete checkpoint."""


def save_parts(
    run: Run, held: list[Held], optimizer: ModuleOptimizer, rerun: dict[str, Any] | None, *, finite: bool
) -> tuple[list[Part], dict[str, str]]:
    """Return what this rank writes, as views of the live tensors. Collective.

    With `checkpoint.trained_only`, weights that the run never trains are replaced by a fingerprint.

    Args:
        held: this rank's tensors of the model.
        rerun: this rank's state for repeating the step; on all ranks or on none.
        finite: True to require finite weights.

    Returns:
        (the parts, record entries of the weights that are left out).
    """
    left_out = {}
    if run.cfg.checkpoint.trained_only:
        frozen = [one for one in held if is_frozen(one, optimizer.releases)]
        left_out = {LEFT_OUT: fingerprint(frozen)}
        held = [one for one in held if one not in frozen]
    parts = [*_own_parts(held, optimizer, finite), *_parts_of_rank("rng", device.get_rng_state())]
    return parts + (_parts_of_rank("rerun", rerun) if rerun is not None else []), left_out


def open_folder(target: Target, nbytes: int) -> Opened:
    """Create the folder that a checkpoint is written into. Collective.

    Args:
        nbytes: total bytes of all ranks.

    Raises:
        SaveFailed: it cannot be created, lacks space, or is not visible to this rank; on every rank.
    """

    box = list[Opened | None]([None])

    def make() -> None:
        if dist.get_rank() == 0:
            box[0] = Opened(*folder_changes.begin(target.run_dir, target.step, target.non_persistent, nbytes))

    def look() -> None:
        assert box[0] is not None
        folder_changes.require_shared(box[0].partial)

    raise_together(Job(make, in_background=False).error, target.run_dir)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box)
    raise_together(Job(look, in_background=False).error, target.run_dir)
    assert box[0] is not None
    return box[0]


def record_of(
    run: Run,
    optimizer: ModuleOptimizer,
    schedulers: Any,
    train_state: Any,
    others: dict[str, Any],
) -> dict[str, Any]:
    """Return the record of a checkpoint now, in plain values."""
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
    """Start to write this rank's parts into a folder from `open_folder`.

    Args:
        sizes: bytes that each rank writes.
        snapshot: memory for a copy that a thread writes; None writes at once.

    Returns:
        (the save, a function to call before the values of `parts` change).
    """
    rank, world, copies = dist.get_rank(), dist.get_world_size(), parts
    wait = hold = _nothing
    if snapshot is not None:
        copies, wait, hold = snapshot.take(parts)
    # Device tensors must live until their background copy is done.
    sources = [] if snapshot is None else [*parts]

    def write() -> None:
        wait()
        sources.clear()
        write_rank(folder.partial, rank, copies)

    def commit() -> None:
        text = folders.record_text(record)  # here, because it takes as long as copying 40 MB
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
        in_background=snapshot is not None,
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
    """Turn type errors in record values into damage: the marker only proves that the record is unchanged."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        why = f"{folders.RECORD} holds other values than a run writes ({type(error).__name__}: {error})"
        raise damaged(folder, why) from error


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


def _updated(optimizer: ModuleOptimizer | None) -> Iterator[Updated]:
    for each in optimizer.inner() if optimizer is not None else ():
        yield from updated_ranges(each)


def _own_parts(held: list[Held], optimizer: ModuleOptimizer, finite: bool) -> Iterator[Part]:
    """Yield what this rank writes: only the first of several replicas writes."""
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
                flat = flat.clone()  # a forward pass may change it before its background copy
            for first, last, span in one.spans(0, one.tensor.numel()):
                yield Part(one.key(), span, flat[first:last])


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


def _parts_of_rank(name: str, state: dict[str, Any]) -> list[Part]:
    text, tensors = pack(state, RERUN_CLASSES)
    as_bytes = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    module = f"rank_{dist.get_rank():05d}"
    # `_of_rank` counts them, and files have no empty tensors.
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

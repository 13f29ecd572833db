"""Saving and loading the state of a run through Megatron-Core's dist_checkpointing.

Model and optimizer are stored as whole tensors cut into shards, so that any layout reads checkpoints of any other.
Random generators are stored per rank and restored only at the same layout.
"""

import queue
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.mimo.optimizer import MimoOptimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from mimo_train.checkpoint import folders
from mimo_train.checkpoint.frozen_base import (
    LEFT_OUT,
    base_of,
    fingerprint,
    own_tensors,
    require_same,
    take_out_frozen,
    take_out_missing,
)
from mimo_train.checkpoint.integrity import require_held, require_taken, verified_record
from mimo_train.config.compose import to_dict
from mimo_train.config.parts import is_adapter
from mimo_train.model.lora import start_magnitudes
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.parallel import device
from mimo_train.parallel.agreement import agreed
from mimo_train.plan.layout import RunLayout
from mimo_train.plan.run import Run

CONTENT = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
}
"""How tensors are cut; stored with the checkpoint, since loading must cut the same way."""


def save_checkpoint(
    run_dir: Path,
    run: Run,
    model: list[MegatronModule],
    optimizer: ModuleOptimizer,
    schedulers: Any,
    train_state: Any,
    fingerprints: dict[str, str],
    *,
    keep: int,
    non_persistent: bool = False,
    rerun: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint; it appears under its final name only when every rank has written its part. Collective.

    With `checkpoint.trained_only` it has no weights that the run never trains, but a fingerprint of them.

    Args:
        fingerprints: of what the run reads, for the record.
        keep: number of checkpoints of the run to keep; 0 keeps all.
        non_persistent: whether it is of the kind of which only the newest is kept.
        rerun: this rank's state for repeating the step; on all ranks or on none.

    Returns:
        The checkpoint's folder.
    """
    partial = folders.partial_folder(run_dir, train_state.step, non_persistent)
    final = folders.final_folder(run_dir, train_state.step, non_persistent)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state, left_out = _sharded_state(model, optimizer, is_loading=False), None
    if run.cfg.checkpoint.trained_only:
        left_out = fingerprint(take_out_frozen(state, _by_key(model), optimizer.releases))
    state["schedulers"] = schedulers.state_dict()
    state["train_state"] = train_state.state_dict()
    state["rng"] = _object_of_rank("rng", device.get_rng_state())
    if rerun is not None:
        state["rerun"] = _object_of_rank("rerun", rerun)
    _use_queue_of_this_process()
    dist_checkpointing.save(
        state,
        str(partial),
        content_metadata=CONTENT,
        preprocess_common_before_consistancy_check=lambda common: {},
        verify_integrity=True,
    )
    dist.barrier()
    if dist.get_rank() == 0:
        record = {
            "step": train_state.step,
            "train_state": train_state.state_dict(),
            "layout": _layout_key(run.layout),
            "rerun": rerun is not None,
            "config": to_dict(run.cfg),
            **fingerprints,
        }
        record |= {} if left_out is None else {LEFT_OUT: left_out}
        folders.write_record(partial, record)
        if final.exists():
            # Under a name that is no checkpoint's, so that a kill leaves none that is half removed.
            final.rename(final.with_suffix(".old.partial"))
        partial.rename(final)
        folders.remove_old(run_dir, keep, non_persistent)
    dist.barrier()
    return final


def load_checkpoint(
    folder: Path,
    layout: RunLayout,
    model: list[MegatronModule],
    optimizer: MimoOptimizer | None = None,
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
            some. On every rank alike, and before anything is loaded.
    """
    record = verified_record(folder)
    state = _sharded_state(model, optimizer, is_loading=True)
    asked = {name: state[name] for name in _by_key(model)}
    same_layout = record["layout"] == _layout_key(layout)
    held = dist_checkpointing.load_tensors_metadata(str(folder)).keys()
    new = {} if optimizer else _take_out_new_adapters(state, held, model)
    if LEFT_OUT in record:
        missing = take_out_missing(state, _by_key(model), held)
        require_same(record, missing, folder)
        for chunk_name, chunk in _by_key(model).items():
            own = own_tensors(chunk)
            new.setdefault(chunk_name, {}).update({name: own[name] for name in missing[chunk_name]})
    if optimizer is not None and same_layout:
        state["rng"] = _object_of_rank("rng", None)
        if record["rerun"]:
            state["rerun"] = _object_of_rank("rerun", None)
    require_taken(asked, folder, None if optimizer else layout.modules)
    require_held(state, folder)
    # Some formats of the optimizer are loaded into leaves in place.
    with torch.no_grad():
        loaded = dist_checkpointing.load(state, str(folder))
        for name, chunk in _by_key(model).items():
            unwrap_model(chunk).load_state_dict(loaded[name] | new.get(name, {}))
            start_magnitudes(unwrap_model(chunk), new.get(name, {}))
        if optimizer is not None:
            optimizer.load_state_dict(loaded["optimizer"])
    if schedulers is not None:
        schedulers.load_state_dict(loaded["schedulers"])
    if train_state is not None:
        train_state.load_state_dict(loaded["train_state"])
    if "rng" in state:
        device.set_rng_state(loaded["rng"])
    return {**record, "rerun": loaded.get("rerun")}


def load_weights(folder: Path, layout: RunLayout, model: list[MegatronModule], base: str = "") -> None:
    """Load the model alone from `folder`, after the weights that it leaves out, if any, from where its run had them.
    Collective; errors as of `load_checkpoint`.

    Args:
        base: the folder that these are in, instead of that of the checkpoint's run.
    """
    load_base(folder, layout, model, base)
    load_checkpoint(folder, layout, model)


def load_base(folder: Path, layout: RunLayout, model: list[MegatronModule], given: str = "") -> None:
    """Load the weights that the checkpoint in `folder` leaves out, if any, unless they are those of its run's seed.
    Arguments as of `load_weights`. Collective."""
    with agreed():
        base = base_of(folder, given)
    if base is not None:
        load_weights(base, layout, model)


def _use_queue_of_this_process() -> None:
    """Megatron-Core 0.19.2 starts a manager process on every rank for the results of a save (filesystem_async.py:53),
    which imports the program again, even if this process itself writes. A queue is enough for its threads."""
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def _by_key(chunks: list[MegatronModule]) -> dict[str, MegatronModule]:
    """Chunks under the keys that the optimizer looks for. Tensors are stored by the names of their layers, so these
    keys do not appear in a checkpoint."""
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{index}": chunk for index, chunk in enumerate(chunks)}


def _sharded_state(model: list[MegatronModule], optimizer: MimoOptimizer | None, *, is_loading: bool) -> dict[str, Any]:
    state = {
        name: unwrap_model(chunk).sharded_state_dict(metadata=dict(CONTENT)) for name, chunk in _by_key(model).items()
    }
    if optimizer is not None:
        whole = state["model"] if len(model) == 1 else dict(state)
        state["optimizer"] = optimizer.sharded_state_dict(whole, is_loading=is_loading, metadata=dict(CONTENT))
    return state


def _take_out_new_adapters(
    state: dict[str, Any], held: Collection[str], model: list[MegatronModule]
) -> dict[str, dict[str, torch.Tensor]]:
    """Remove from `state` the adapters that the checkpoint does not have; returns them by chunk and name."""
    new = {}
    for chunk_name, chunk in _by_key(model).items():
        adapters = [name for name in state[chunk_name] if is_adapter(name)]
        if not adapters:
            continue
        own = own_tensors(chunk)
        new[chunk_name] = {name: own[name] for name in adapters if state[chunk_name][name].key not in held}
        for name in new[chunk_name]:
            del state[chunk_name][name]
    return new


def _object_of_rank(name: str, state: Any) -> ShardedObject:
    return ShardedObject(name, state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _layout_key(layout: RunLayout) -> dict[str, list[int]]:
    return {name: [m.first_rank, m.tp, m.cp, m.dp, m.pp, m.vpp, m.ep, m.etp] for name, m in layout.modules.items()}

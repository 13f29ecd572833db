"""Whether a checkpoint can be loaded: its files are those that were written, and it holds what the model asks for.

Every rank comes to the same answer before any of it is loaded, so that none is left waiting for one that has ended.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.validation import INTEGRITY_FNAME, verify_integrity_manifest

from mimo_train.checkpoint import folders
from mimo_train.config.fault import UserError
from mimo_train.parallel.agreement import agreed

RECORD_KEYS = ("step", "train_state", "layout", "data_fingerprint", "rerun", "config")
"""What a record holds, see `store.save_checkpoint`."""

INDEX = ("metadata.json", ".metadata")
"""Files of Megatron-Core's without which the others mean nothing."""

SHOWN = 3
"""Most tensors that a message names."""


def verified_record(folder: Path) -> dict[str, Any]:
    """The record of a checkpoint, after its files were read and compared with the hashes of when they were written.
    Collective: rank 0 reads the files, once.

    Raises:
        UserError: the record or a file is missing, cut short or changed; on every rank.
    """
    with agreed():
        record = folders.read_record(folder, *RECORD_KEYS)
        _require_hashes(folder)
    try:
        verify_integrity_manifest(str(folder))
    except CheckpointingException as error:
        # Behind the first line, one for each file.
        headline, *files = str(error).splitlines()
        raise folders.damaged(folder, "; ".join(line.strip() for line in files) or headline) from error
    return record


def require_held(state: ShardedStateDict, folder: Path) -> None:
    """Every tensor and object that `state` asks for is in the checkpoint, every tensor in the same shape. Collective.

    Raises:
        UserError: something is not; on every rank, with what the lowest rank at fault has found.
    """
    with agreed():
        held = load_sharded_metadata(str(folder))
        asked = load_preprocess(state)[0]
        of_optimizer = _complaints(asked.pop("optimizer", {}), held)
        of_model = _complaints(asked, held)
        if of_model:
            raise UserError(
                f"checkpoint {folder} is of another model: {_listed(of_model)}; give the config that it was saved "
                "with, or begin a new run in another run.dir"
            )
        if of_optimizer:
            raise UserError(
                f"checkpoint {folder} is of a run that trained other parameters: {_listed(of_optimizer)}; give the "
                "config that it was saved with, or begin a new run with its weights: another run.dir, and "
                f"checkpoint.weights={folder}"
            )


def require_taken(model: ShardedStateDict, folder: Path, modules: Collection[str] | None) -> None:
    """Every weight in the checkpoint has its place in the model, on some rank. Collective.

    Args:
        model: the state that the model asks for.
        modules: of this run, if encoders that it does not have may be left out.

    Raises:
        UserError: some would be lost; on every rank.
    """
    asked = {value.key for value in nested_values(load_preprocess(model)[0]) if isinstance(value, ShardedTensor)}
    everyone: list[Any] = [asked]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, asked)
    with agreed():
        held = load_sharded_metadata(str(folder))
        lost = [key for key, value in held.items() if isinstance(value, ShardedTensor) and _is_weight(key, modules)]
        lost = [key for key in lost if key not in set().union(*everyone)]
        if lost:
            raise UserError(
                f"checkpoint {folder} is of another model: {_listed(dict.fromkeys(lost, 'has no place in this one'))}; "
                "give the config that it was saved with, its adapters (modules.*.lora) and its changes to the model "
                "too"
            )


def _is_weight(key: str, modules: Collection[str] | None) -> bool:
    """Whether this names a tensor of the model, not of the optimizer, and of one of `modules` if they are given."""
    # As Megatron-Core names them: mimo.images.optimizer.state..., optimizer.state..., chained_0.optimizer.state...
    if "optimizer.state." in key:
        return False
    owner = key.split(".")
    return modules is None or owner[0] != "modality_submodules" or owner[1] in modules


def _require_hashes(folder: Path) -> None:
    try:
        files = json.loads((folder / INTEGRITY_FNAME).read_text())["files"]
        listed = isinstance(files, dict) and files.keys() >= set(INDEX)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise folders.damaged(
            folder, f"{INTEGRITY_FNAME} cannot be read ({str(error) or type(error).__name__})"
        ) from error
    if not listed:
        raise folders.damaged(folder, f"{INTEGRITY_FNAME} does not list {' and '.join(INDEX)}")


def _complaints(asked: ShardedStateDict, held: dict[str, ShardedBase]) -> dict[str, str]:
    """By key, why the checkpoint cannot give what is asked for."""
    wanted = [value for value in nested_values(asked) if isinstance(value, ShardedBase)]
    return {one.key: why for one in wanted if (why := _complaint(one, held))}


def _listed(complaints: dict[str, str]) -> str:
    first = ", ".join(f"{key} {why}" for key, why in list(complaints.items())[:SHOWN])
    return f"{first}, and {len(complaints) - SHOWN} more" if len(complaints) > SHOWN else first


def _complaint(asked: ShardedBase, held: dict[str, ShardedBase]) -> str:
    """Why the checkpoint cannot give this; empty if it can."""
    there = held.get(asked.unique_key if isinstance(asked, ShardedObject) else asked.key)
    if there is None:
        return "is not in it"
    if not isinstance(asked, ShardedTensor) or asked.allow_shape_mismatch:
        return ""
    was, now = tuple(there.global_shape), tuple(asked.global_shape)
    return "" if was == now else f"has shape {was} there and {now} here"

"""Logits and a step of a whole directory, here on every rank and in transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.runs import TINY
from tests.dist.steps import Steps

BOUND = 1e-5
"""Of the largest expected value."""
OPTIM = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "clip_grad": 0.7}


def overrides(run_dir: Path, shards: Path) -> list[str]:
    """Of a run of one step on the shards."""
    tiny = [key for key in TINY if not key.startswith(("modules.", "optim."))]
    places = [f"run.dir={run_dir}", f"data.shards={shards}/train", "data.validation_shards=", "data.demo="]
    optim = [f"optim.{name}={value}" for name, value in OPTIM.items()]
    return [*tiny, *places, *optim, "optim.decay=constant", "optim.warmup_iters=0", "train.iters=1"]


def ours(cfg, save: str) -> dict[str, Any]:
    """On a rank: logits of a batch, then a step, and the batch where it has all of it.

    Args:
        save: when to write a checkpoint: "before" the step, or "after" it.
    """
    from mimo_train.training.train_step import train_step

    run = Steps(cfg)
    session = run.session
    session.data.advance()
    collected = run.pipeline.run(_logits, session.data, forward_only=True, collect_non_loss_data=True)
    batch = [_arrays(microbatch) for microbatch in session.data.current.microbatches]
    if save == "before":
        run.save()
    session.data.rewind()
    session.freeze_stages.apply(0)
    result = train_step(session, run._run.step_func)
    session.state.train_state.count(session.data.current.size, session.data.current.plan.tokens, result)
    if save == "after":
        run.save()
    groups = session.parts.pipeline.groups.collections
    return {
        "tp": groups["language"].tp.rank() if "language" in groups else 0,
        "logits": torch.cat(collected).numpy() if collected else None,
        "loss": next(map(float, result.losses.values()), None),
        "norm": result.grad_norm,
        "batch": batch,
    }


def _logits(iterator, model):
    from mimo_train.training.step.forward_step import get_batch

    batch = get_batch(iterator) | {"labels": None, "loss_mask": None}
    batch.setdefault("input_ids", None)
    output, _ = model(**batch)
    return output, lambda logits, non_loss_data: logits.detach().clone()


def _arrays(microbatch: dict) -> dict[str, Any]:
    """What of a microbatch this rank has: tensors of the sequence, and what encoders read by its name."""
    names = ("input_ids", "labels", "loss_mask", "sample_numbers")
    found = {name: microbatch[name].numpy().copy() for name in names if name in microbatch}
    for inputs in (microbatch.get("modality_inputs") or {}).values():
        for own in (inputs or {}).values():
            found |= {name: value.numpy().copy() for name, value in own.items() if isinstance(value, torch.Tensor)}
    return found


def theirs(model, whole: Mapping[str, np.ndarray], media: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The same in transformers: logits, loss and gradient norm of a step of AdamW; logits after it.

    Args:
        whole: of `ours`, the microbatches together.
        media: what the model takes besides ids.
    """
    ids, labels, mask = (torch.from_numpy(whole[name]) for name in ("input_ids", "labels", "loss_mask"))
    logits = model(input_ids=ids, **media).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    trained = [value for value in model.parameters() if value.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(trained, OPTIM["clip_grad"])
    groups = [
        {"params": [value for value in trained if (value.ndim > 1) == decayed], "weight_decay": decay}
        for decayed, decay in ((True, OPTIM["weight_decay"]), (False, 0.0))
    ]
    betas = OPTIM["beta1"], OPTIM["beta2"]
    torch.optim.AdamW(groups, lr=OPTIM["lr"], eps=OPTIM["eps"], betas=betas).step()
    with torch.no_grad():
        after = model(input_ids=ids, **media).logits
    shown = {"logits": logits.detach().numpy(), "after": after.numpy(), "ids": ids.numpy()}
    return shown | {"loss": loss.item(), "norm": norm.item()}


def together(batch: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Microbatches as one."""
    return {name: np.concatenate([part[name] for part in batch]) for name in batch[0]}


def require_equal(ranks: list[dict], expected: dict) -> None:
    """Logits, loss and gradient norm of ranks together are those of transformers."""
    last = {rank["tp"]: rank["logits"] for rank in ranks if rank["logits"] is not None}
    logits = np.concatenate([last[at] for at in sorted(last)], axis=-1)[..., : expected["logits"].shape[-1]]
    assert difference(logits, expected["logits"]) < BOUND
    (loss,) = {rank["loss"] for rank in ranks if rank["loss"] is not None}
    assert loss == pytest.approx(expected["loss"], rel=BOUND)
    assert all(rank["norm"] == pytest.approx(expected["norm"], rel=BOUND) for rank in ranks)
    assert expected["norm"] > OPTIM["clip_grad"], "or nothing is clipped"


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest, of the largest expected value."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())

"""Forward step of a run with several modules: encoders return features; only the language model returns a loss."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.utils import unwrap_model

from data.pipeline import Microbatch
from mimo_train.config.errors import UserError
from mimo_train.config.schema_mix import source_names
from mimo_train.models.language_model import choose_logits
from mimo_train.parallel.context import own_part
from mimo_train.training.step.losses import masked_token_loss
from mimo_train.training.step.state import GlobalState

MODEL_INPUTS = ("input_ids", "position_ids", "labels", "loss_mask", "modality_inputs", "documents")
"""Keys of a microbatch that the model takes."""
SOURCES, LEARNED = "sources", "learned"


def loss_func(
    loss_mask: torch.Tensor,
    output_tensor: torch.Tensor,
    *,
    sources: torch.Tensor | None = None,
    names: Sequence[str] = (),
    non_loss_data: bool = False,
) -> Any:
    """Sum the losses at the language model's last stage; see `masked_token_loss`.

    Args:
        loss_mask: [batch, sequence], 1 where a token is learned from.
        output_tensor: [batch, sequence], loss per token.
        sources: [batch, sequence], index into `names` of each token's source.
    """
    return masked_token_loss(loss_mask, output_tensor, sources, names, non_loss_data=non_loss_data)


def get_batch(data_iterator: Iterator[dict[str, Any]] | None) -> dict[str, Any] | None:
    """Return the next microbatch of this rank; None at the end, or without an iterator.

    Returns:
        On language ranks: input_ids, labels, position_ids, loss_mask [batch, sequence], the ends of the `documents` of
            a packed row, and in a mixture sources [batch, sequence], which the model does not take. On encoder ranks:
            modality_inputs {module: {encoder: inputs} or None}. Ranks with both have all.
    """
    batch, _ = _next_batch(data_iterator)
    return batch


def _next_batch(data_iterator: Iterator[dict[str, Any]] | None) -> tuple[dict[str, Any] | None, torch.Tensor | None]:
    """Return (the result of `get_batch`, the places that get logits or None for all)."""
    batch = next(data_iterator, None) if data_iterator is not None else None
    if batch is None:
        return None, None
    known = Microbatch({key: batch[key] for key in (*MODEL_INPUTS, SOURCES) if key in batch})
    return known, batch.get(LEARNED)


def forward_step(
    state: GlobalState, data_iterator: Iterator[dict[str, Any]] | None, model: MimoModel
) -> tuple[torch.Tensor | dict[str, torch.Tensor], Callable | None]:
    """Run one forward pass of this rank's modules.

    Returns:
        (loss per token, loss function) at the language model's last stage, else (features by module, None).

    Raises:
        TypeError: the last stage returned features by module instead of losses: modules and layout disagree.
    """
    batch, learned = _next_batch(data_iterator)
    if batch is None:
        raise UserError("the data ended before train.iters: data_iterator returned no microbatch")
    batch.setdefault("input_ids", None)
    sources = batch.pop(SOURCES, None)
    mimo_model = unwrap_model(model)
    if learned is not None:
        choose_logits(mimo_model.language_model, learned)
    output, loss_mask = model(**batch)
    if not (mimo_model.role.has_language_module and mimo_model.role.is_last_stage("language")):
        return output, None
    if isinstance(output, dict):
        raise TypeError(
            f"the language model's last stage returned features of {', '.join(output)} instead of a loss tensor: "
            "check that modules and modules.*.layout describe the same ranks"
        )
    if sources is None:
        return output, partial(loss_func, loss_mask)
    cp_group = unwrap_model(mimo_model.language_model).pg_collection.cp
    sources = own_part({SOURCES: sources}, cp_group)[SOURCES]
    return output, partial(loss_func, loss_mask, sources=sources, names=source_names(state.cfg.data.mix))

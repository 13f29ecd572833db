"""Forward step of the plain GPT, the case of one module."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from mimo_train.config.errors import UserError
from mimo_train.config.schema_mix import source_names
from mimo_train.models.documents import documents_of
from mimo_train.models.language_model import choose_logits
from mimo_train.parallel.context import own_part
from mimo_train.training.step.losses import masked_token_loss
from mimo_train.training.step.state import GlobalState


def forward_step(
    state: GlobalState,
    data_iterator: Iterator[dict[str, Any]],
    model: MegatronModule,
    return_schedule_plan: bool = False,
) -> tuple[Any, Callable]:
    """Run one forward pass of this rank's stage.

    Args:
        return_schedule_plan: return the layers' plan instead of running them. Megatron-Core requests it to overlap the
            experts' communication with another microbatch.

    Returns:
        (loss per token [batch, sequence] or the stage's activations, loss function); the schedule calls the loss
            function at the last stage only.
    """
    batch = next(data_iterator, None)
    if batch is None:
        raise UserError("the data ended before train.iters: data_iterator returned no microbatch")
    texts: dict[str, Any] = {
        key: batch[key] for key in ("input_ids", "position_ids", "labels", "loss_mask", "sources") if key in batch
    }
    cp_group = unwrap_model(model).pg_collection.cp
    inputs = own_part(texts, cp_group)
    loss_mask, sources = inputs.pop("loss_mask"), inputs.pop("sources", None)
    inputs |= {"attention_mask": None, "packed_seq_params": documents_of(batch, cp_group.size())}
    if return_schedule_plan:
        output = unwrap_model(model).build_schedule_plan(**inputs)
    else:
        if "learned" in batch:
            choose_logits(model, batch["learned"])
        output = model(**inputs)
    names = source_names(state.cfg.data.mix)
    return output, partial(masked_token_loss, loss_mask, sources_BS=sources, names=names)

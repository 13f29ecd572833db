"""Forward step of the plain GPT, the case of one module."""

from collections.abc import Iterable
from functools import partial

from megatron.core.transformer.module import MegatronModule

from mimo_train.training.losses import masked_token_loss
from mimo_train.training.state import GlobalState


def forward_step(state: GlobalState, data_iterator: Iterable, model: MegatronModule):
    """One forward pass of this rank's stage.

    Returns:
        (loss per token [batch, sequence] or the stage's activations, loss function); Megatron-Core's schedule calls
        the loss function at the last stage only.
    """
    batch = next(data_iterator, None)
    if batch is None:
        raise ValueError("the data ended before train.iters: data_iterator gave no microbatch")
    output = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
    )
    return output, partial(masked_token_loss, batch["loss_mask"])

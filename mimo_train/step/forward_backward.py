"""Forward and backward over microbatches of the current step, from gradients of zero."""

from typing import Any

from megatron.core.transformer.module import MegatronModule

from mimo_train.step.forward_hooks import _handle_mxfp8_param_buffer_copy
from mimo_train.step.forward_step import ForwardStepCallable, record_losses
from mimo_train.step.state import GlobalState


def forward_backward(
    forward_step_func: ForwardStepCallable,
    data_iterator: Any,
    model: list[MegatronModule],
    optimizer: Any,
    state: GlobalState,
    num_microbatches: int,
) -> None:
    """Run the next `num_microbatches` of `data_iterator`; gradients stand summed over ranks and divided by tokens
    afterwards, and `state.losses` holds the losses of these microbatches alone. Collective."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    _handle_mxfp8_param_buffer_copy(optimizer, False, state.cfg.optim.overlap_param_gather)
    state.losses.begin()
    with state.stopwatch("forward_backward"):
        state.pipeline.run(
            record_losses(forward_step_func, state.losses),
            data_iterator,
            model,
            sequence_length=state.cfg.data.sequence_length,
            num_microbatches=num_microbatches,
        )

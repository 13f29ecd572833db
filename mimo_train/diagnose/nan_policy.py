"""What a step does whose gradient is not finite: `train.on_nan`.

The optimizer has updated nothing then, and every rank has the same norm, so all ranks do the same without a message.
"""

from typing import Any

from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from mimo_train.diagnose.bisect import Origin, bisect
from mimo_train.diagnose.nan_findings import gather
from mimo_train.diagnose.replay import save_state_before, write_replay
from mimo_train.parallel import device
from mimo_train.step.forward_step import ForwardStepCallable
from mimo_train.step.state import GlobalState

MOST_IN_A_ROW = 10
"""Bad steps in a row after which `train.on_nan=skip` ends the run: what comes back every step is not in the samples."""


class NonFiniteStep(ValueError):
    """A gradient was not finite, and `train.on_nan` ends the run. The same on every rank."""


class NanPolicy:
    """Watches the steps of a loop. A good step costs it neither a message nor a copy from the device."""

    def __init__(
        self,
        state: GlobalState,
        step_func: ForwardStepCallable,
        model: list,
        optimizer: Any,
        scheduler: Any,
        checkpointing_context: dict[str, Any],
    ):
        self._state, self._step_func, self._model, self._optimizer = state, step_func, model, optimizer
        self._scheduler, self._context = scheduler, checkpointing_context
        self._in_a_row = 0
        self._generators: dict[str, Any] = {}
        self._scale: Any = None

    def start_step(self) -> None:
        """Note what a step changes that a replay needs: the generators, and the loss scale."""
        self._generators = device.get_rng_state()
        if isinstance(self._optimizer.grad_scaler, DynamicGradScaler):
            # An update puts a new tensor in its place.
            self._scale = self._optimizer.grad_scaler.scale

    def end_step(self, result: tuple, data_iterator: Any) -> None:
        """Do what `train.on_nan` says if the step was bad. Collective then.

        Args:
            result: of `train_step`.
            data_iterator: the step's `StepIterator`.

        Raises:
            NonFiniteStep: by raise and bisect; by skip at the tenth bad step in a row.
        """
        _, skipped, _, should_exit, _, norm, _ = result
        if not skipped:
            self._in_a_row = 0
        elif not should_exit and not self._scale_was_lowered():
            self._bad_step(norm, data_iterator)

    def _scale_was_lowered(self) -> bool:
        """Whether this is how fp16 finds its loss scale; at the smallest scale it is a fault."""
        scaler = self._optimizer.grad_scaler
        return isinstance(scaler, DynamicGradScaler) and bool(self._scale > scaler.min_scale)

    def _bad_step(self, norm: float | None, data_iterator: Any) -> None:
        state, policy = self._state, self._state.cfg.train.on_nan
        step = state.train_state.step + 1
        self._in_a_row += 1
        found = gather(state, self._model, data_iterator)
        nothing = f"step {step}: a gradient is not finite (norm {norm}), nothing was updated"
        if policy == "skip" and self._in_a_row < MOST_IN_A_ROW:
            if state.is_logging_rank:
                state.console.message("\n  ".join([f"train.on_nan=skip: {nothing}", *found.lines()]))
            return
        if policy == "skip":
            nothing += f", as in the {MOST_IN_A_ROW - 1} steps before it"
        norms = self._optimizer.module_grad_norms
        device.set_rng_state(self._generators)
        checkpoint = save_state_before(state, self._model, self._optimizer, self._scheduler, self._context)
        origin = self._bisect(data_iterator) if policy == "bisect" else None
        file, command = write_replay(state, data_iterator, norms, found, origin, checkpoint)
        lines = [
            f"train.on_nan={policy}: {nothing}",
            *found.lines(),
            *([] if policy != "bisect" else [_told(origin)]),
            f"the state before this step is checkpoint {checkpoint}, the findings are in {file}",
            f"make the step again, and bisect it: {command}",
        ]
        raise NonFiniteStep("\n".join(lines))

    def _bisect(self, data_iterator: Any) -> Origin | None:
        device.set_rng_state(self._generators)
        return bisect(self._step_func, data_iterator, self._model, self._optimizer, self._state)


def _told(origin: Origin | None) -> str:
    if origin is not None:
        return f"bisect: {origin}"
    return (
        "bisect: every microbatch alone is finite: their sum overflows, or the fault was a transient one of the machine"
    )

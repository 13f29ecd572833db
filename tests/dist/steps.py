"""Runs that a test drives step by step, on every rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Steps:
    """A run that is set up; `train` makes a step of it."""

    def __init__(self, cfg, forward_step: Callable | None = None, pre_wrap_hook: Callable | None = None):
        from mimo_train.step.forward_step import prepare_forward_step_func
        from mimo_train.step.state import GlobalState
        from mimo_train.training.pretrain import default_forward_step
        from mimo_train.training.setup import setup

        self.state = GlobalState(cfg, pre_wrap_hook=pre_wrap_hook)
        self.run = setup(self.state)
        self.model, self.optimizer, self.scheduler = self.run.model, self.run.optimizer, self.run.scheduler
        self._step = prepare_forward_step_func(forward_step or default_forward_step(cfg), self.state)

    def train(self, steps: int = 1) -> list[tuple[float | None, float | None]]:
        """(loss, gradient norm) of each of the next steps; the loss on the language model's last stage, else None."""
        from mimo_train.training.loop import train_step

        numbers = []
        for _ in range(steps):
            self.state.freeze_stages.apply(self.state.train_state.step)
            self.run.train_data_iterator.advance()
            losses, _, _, _, _, norm, _ = train_step(
                self._step, self.run.train_data_iterator, self.model, self.optimizer, self.scheduler, self.state
            )
            self.state.train_state.step += 1
            self.state.train_state.consumed_train_samples += self.state.layout.global_batch_size
            loss = next((float(value) for value in losses.values()), None)
            numbers.append((loss, norm))
        return numbers

    def save(self) -> Path:
        """Write a checkpoint."""
        from mimo_train.checkpoint.store import save_checkpoint

        state, fingerprint = self.state, self.run.checkpointing_context["data_fingerprint"]
        return save_checkpoint(
            state.run_dir, state.cfg, state.layout, self.model, self.optimizer, self.scheduler, state.train_state,
            fingerprint, keep=1,
        )  # fmt: skip

    def parameters(self) -> dict[str, Any]:
        """Copies of this rank's parameters, by module, chunk and name."""
        from mimo_train.model.build import modules_of

        return {
            f"{module}.{index}.{name}": parameter.detach().clone()
            for module, chunks in modules_of(self.model).items()
            for index, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
        }


def whole(curves: list[list[tuple]]) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) from what all ranks have; fails where two ranks differ in the norm."""
    merged = []
    for step, points in enumerate(zip(*curves, strict=True)):
        losses = {loss for loss, _ in points if loss is not None}
        norms = {norm for _, norm in points}
        assert len(norms) == 1, f"ranks differ in the gradient norm of step {step}: {norms}"
        assert losses, f"no rank has the loss of step {step}"
        merged.append((step, max(losses), norms.pop()))
    return merged

"""Runs that a test drives step by step, on every rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Steps:
    """A run that is set up; `train` makes a step of it.

    Attributes:
        session: what a loop would run on.
        pipeline: of the session.
        result: of the last step.
    """

    def __init__(self, cfg, forward_step: Callable | None = None, pre_wrap_hook: Callable | None = None):
        from benchmarks.stepped_run import SteppedRun

        self._run = run = SteppedRun(cfg, forward_step, pre_wrap_hook)
        self.session, self.step_func = run.session, run.step_func
        self.state, self.model, self.optimizer = self.session.state, self.session.model, self.session.optimizer
        self.scheduler, self.pipeline = self.session.schedulers, self.session.parts.pipeline

    def train(self, steps: int = 1) -> list[tuple[float | None, float | None]]:
        """(loss, gradient norm) of each of the next steps; the loss on the language model's last stage, else None."""
        points = []
        for _ in range(steps):
            self.result = self._run.step()
            points.append((next(map(float, self.result.losses.values()), None), self.result.grad_norm))
        return points

    def save(self) -> Path:
        """Write a checkpoint."""
        return self.session.checkpointer.save(self.session.data)

    def parameters(self) -> dict[str, Any]:
        """Copies of this rank's parameters, by module, chunk and name."""
        from mimo_train.models.parameters import modules_of

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

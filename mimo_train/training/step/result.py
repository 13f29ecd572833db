"""Result of a training step."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, before it is logged, and the actions it asks for."""

    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    """Reduced losses by name, on ranks of the language model's last stage, else empty. They are on the device:
    reading one waits for it."""
    of_sources: dict[str, torch.Tensor] = field(default_factory=dict)
    """[sum, number of tokens] of the losses of a mixture's sources by `loss/NAME`, likewise."""
    skipped_iter: int = 0
    """1 if the update was skipped, else 0."""
    grad_norm: float | None = None
    """Gradient norm over all modules before clipping; not finite if that is why the update was skipped. None if the
    step asks to exit, or was left out (`train.skip_iters`)."""
    num_zeros_in_grad: int | None = None
    """Number of gradient elements that are zero; None unless they are counted."""
    should_checkpoint: bool = False
    """Whether the step asks for a checkpoint."""
    should_exit: bool = False
    """Whether the step asks to end the run."""
    exit_code: int = 0
    """Exit code, if the step asks to end the run."""

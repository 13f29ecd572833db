"""AdamW with the conventions of Transformer Engine's FusedAdam, for machines without it.

Megatron-Core 0.19.2 falls back to `torch.optim.AdamW`, whose state does not fit its distributed optimizer. It has one
`step` tensor per parameter instead of one number per group: distrib_optimizer.py:838 fails before the first step, :1223
misses it in reshardable checkpoints, and :1032 makes all parameters share one tensor that each increments. With `step`
an int in the param group, none of the special cases applies.
"""

from collections.abc import Callable, Sequence

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from torch.optim.optimizer import ParamsT


def _as_written[F: Callable](method: F) -> F:
    """Return a method of torch's optimizer without the wrapper that keeps the compiler out of it."""
    return method.__wrapped__  # type: ignore[attr-defined]


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101); state per parameter: exp_avg, exp_avg_sq.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled decay.
        adam_w_mode: must be true; Adam with L2 regularization is not supported.
        capturable: must be false; CUDA graphs are not supported.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ):
        assert adam_w_mode and not capturable, "only decoupled weight decay outside of CUDA graphs"
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})
        self._scale = 1.0

    # Torch 2.11 imports its compiler at the first call of these, a tenth of a small run's start. Nobody compiles an
    # optimizer here.
    add_param_group = _as_written(torch.optim.Optimizer.add_param_group)
    zero_grad = _as_written(torch.optim.Optimizer.zero_grad)
    state_dict = _as_written(torch.optim.Optimizer.state_dict)
    load_state_dict = _as_written(torch.optim.Optimizer.load_state_dict)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients by `factor` in the next step, without another pass over them."""
        assert factor > 0, factor
        self._scale = factor

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody here evaluates the loss again
        """Update every parameter that has a gradient."""
        factor, self._scale = self._scale, 1.0
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            group["step"] += 1
            states = [self.state[parameter] for parameter in parameters]
            for parameter, state in zip(parameters, states, strict=True):
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            # Filled on the device: copying a number would wait for all queued work.
            device = parameters[0].device
            step = torch.full((), float(group["step"]), device=device)
            torch._fused_adamw_(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [step] * len(parameters),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=torch.full((), 1.0 / factor, device=device) if factor != 1.0 else None,
            )


def install(model: Sequence[torch.nn.Module]) -> None:
    """Make `GroupStepAdamW` Megatron-Core's Adam if neither Transformer Engine nor Apex is installed, or `model` is on
    the CPU, where theirs do not run."""
    on_cpu = any(parameter.is_cpu for chunk in model for parameter in chunk.parameters())
    if not (megatron_optimizer.USING_PYTORCH_OPTIMIZER or on_cpu):
        return
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    megatron_optimizer.Adam = distrib_optimizer.Adam = GroupStepAdamW
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True

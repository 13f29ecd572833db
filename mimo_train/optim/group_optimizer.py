"""The optimizer of torch inside Megatron-Core's: every parameter group has an algorithm, on CPU and GPU alike.

It has the conventions of Transformer Engine's FusedAdam: `step` is an int in the param group. Megatron-Core 0.19.2
would use FusedAdam or Apex if installed, which have AdamW only, and else `torch.optim.AdamW`, whose state does not fit
its distributed optimizer: distrib_optimizer.py:838 fails before the first step, and :1032 makes all parameters share
one step that each increments.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from torch.optim.optimizer import ParamsT

from mimo_train.optim import adafactor, moments
from mimo_train.optim.adafactor import COLUMNS, ROWS
from mimo_train.optim.elementwise import EMA, adamw, average, elements_of, lion
from mimo_train.optim.moments import OFFLOAD, SCALE
from mimo_train.optim.muon import muon
from mimo_train.optim.shards import Shard

ALGORITHM, MOMENTS, MOMENTUM, IS_WAITING = "algorithm", "moments", "momentum", "is_waiting"
"""Keys of a parameter group: an `optim.name`; `optim.moments`; `optim.momentum`; true until the group is trained."""

FACTORS = {ROWS: 0, COLUMNS: 1}
"""States that have an entry for each row or column of a matrix, with the dimension."""

_ELEMENTWISE = {"adamw": adamw, "lion": lion}
_OF_MATRICES = {"muon": muon, "adafactor": adafactor.adafactor}

_STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "muon": ("exp_avg",)}
"""Moments of each algorithm; Adafactor's depend on the parameter."""


def _as_written[F: Callable](method: F) -> F:
    """Return a method of torch's optimizer without the wrapper that keeps the compiler out of it."""
    return method.__wrapped__  # type: ignore[attr-defined]


class GroupOptimizer(torch.optim.Optimizer):
    """Updates parameters by the algorithm of their group.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled decay.
        adam_w_mode: must be true; L2 regularization is not supported.
        capturable: must be false; CUDA graphs are not supported.

    Attributes:
        shards: what each tensor is a part of.
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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0}
        super().__init__(params, {**defaults, ALGORITHM: "adamw", MOMENTS: "fp32"})
        self._scale = 1.0
        self.shards: dict[torch.Tensor, Shard] = {}
        self._by_group: dict[int, list[Shard]] = {}

    # Torch 2.11 imports its compiler at the first call of these, a tenth of a small run's start. Nobody compiles an
    # optimizer here.
    add_param_group = _as_written(torch.optim.Optimizer.add_param_group)
    zero_grad = _as_written(torch.optim.Optimizer.zero_grad)
    state_dict = _as_written(torch.optim.Optimizer.state_dict)
    load_state_dict = _as_written(torch.optim.Optimizer.load_state_dict)

    def attach(self, shards: dict[torch.Tensor, Shard], by_group: Sequence[Sequence[Shard]]) -> None:
        """Set the shards, which groups of Muon and Adafactor need.

        Args:
            shards: of every tensor of this optimizer.
            by_group: all shards of the replicas for each group, in the same order on each replica.
        """
        self.shards, self._by_group = shards, {number: list(group) for number, group in enumerate(by_group)}

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients by `factor` in the next step, without another pass over them."""
        assert factor > 0, factor
        self._scale = factor

    def init_states(self) -> None:
        """Add the states of every parameter that has none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._add_states(group, parameter)

    def _add_states(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
        state, algorithm = self.state[parameter], group[ALGORITHM]
        if state:
            return
        if algorithm == "adafactor":
            adafactor.add_states(state, self.shards[parameter], parameter)
        for name in _STATES.get(algorithm, ()):
            moments.add_moment(state, name, parameter, group[MOMENTS])
        if group.get(EMA):
            state[EMA] = parameter.detach().clone()
        if group.get(OFFLOAD):
            state.update(moments.moved_to_host(state))

    def read_states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the states of a parameter by name, flat: the tensors themselves, or copies on the host of those in 8
        bit."""
        state, values = self.state[parameter], {}
        if parameter.is_cuda:
            torch.cuda.current_stream().synchronize()  # states on the host are written by copies of the last step
        for name, value in state.items():
            if name + SCALE in state:
                on_host = {each: state[each].cpu() for each in (name, name + SCALE)}
                values[name] = moments.read(on_host, name)
            elif not name.endswith(SCALE):
                values[name] = value.view(-1)
        return values

    def write_states(self, parameter: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        """Set states from the copies among `values` of `read_states`."""
        state = self.state[parameter]
        for name in values.keys() & {name.removesuffix(SCALE) for name in state if name.endswith(SCALE)}:
            moments.write(state, name, values[name].to(state[name].device))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody here evaluates the loss again
        """Update every parameter that has a gradient. Collective over replicas and tensor-parallel ranks if a group
        has Muon or Adafactor."""
        factor, self._scale = self._scale, 1.0
        for number, group in enumerate(self.param_groups):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            is_collective = group[ALGORITHM] in _OF_MATRICES and not group.get(IS_WAITING)
            if not parameters and not is_collective:
                continue
            group["step"] += 1
            for parameter in parameters:
                self._add_states(group, parameter)
            states = [self.state[parameter] for parameter in parameters]
            offloads = group.get(OFFLOAD, False)
            if is_collective:
                numbers = [id(self.shards[parameter].parameter) for parameter in parameters]
                _OF_MATRICES[group[ALGORITHM]](
                    group,
                    dict(zip(numbers, parameters, strict=True)),
                    dict(zip(numbers, states, strict=True)),
                    self._by_group[number],
                    factor,
                )
            else:
                kept = [{name: value for name, value in state.items() if name != EMA} for state in states]
                # Lion has two more numbers of an element meanwhile.
                is_chunked = offloads or group[MOMENTS] != "fp32" or group[ALGORITHM] == "lion"
                for elements in elements_of(group, parameters, kept, is_chunked=is_chunked):
                    _ELEMENTWISE[group[ALGORITHM]](group, elements, factor)
            if group.get(EMA) and parameters:
                averages = [{EMA: state[EMA]} for state in states]
                for elements in elements_of(group, parameters, averages, is_chunked=offloads):
                    average(group, elements)


def install() -> None:
    """Make `GroupOptimizer` Megatron-Core's Adam."""
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    megatron_optimizer.Adam = distrib_optimizer.Adam = GroupOptimizer
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True

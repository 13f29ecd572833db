"""Features of encoders on their own ranks, for a language model with interleaved stages.

Megatron-Core 0.19.2 interleaves the stages of one module only: its schedule reads `p2p_communicator.pp_group` and
combines sends (schedules.py:1130, 1575-2026), which `MultiModulePipelineCommunicator` lacks. So encoder ranks run 1F1B,
and the language model's ranks run the interleaved schedule alone. Its first chunk receives features inside its forward
pass, and sends their gradients inside its backward pass.

The two schedules alternate differently between forward and backward. NCCL completes the messages of a communicator in
the order in which a rank posts them, and a send waits for its receiver. So both sides post in the order of the first
chunk (`first_chunk_order`). The encoder computes ahead (`warm_up`), and keeps features until it is their turn.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mimo_train.layout.ranks import first_chunk_order
from mimo_train.parallel.bridge.exchange import DisjointBridge
from mimo_train.parallel.bridge.shapes import Part

_MOST_GRADIENTS = 2
"""Maximum gradients on their way to the encoder."""


class InterleavedBridge(DisjointBridge):
    """A `DisjointBridge` to interleaved stages. `begin` and `finish` enclose the schedule of a step. Sends do not wait
    for their receiver."""

    def __init__(self, *arguments: Any):
        """`arguments`: those of `DisjointBridge`."""
        super().__init__(*arguments)
        self._has_backward = True
        self._schedule: deque[bool] = deque()
        self._features: deque[torch.Tensor] = deque()
        self._sends: deque[tuple[list[dist.Work], list[tuple[torch.Tensor, Part]]]] = deque()

    def begin(self, microbatches: int, forward_only: bool) -> None:
        """Start a step. `forward_only`: it has no backward pass."""
        self._has_backward = not forward_only and self._shapes.features_need_gradient(self.source.name)
        order = [True] * microbatches
        if self._has_backward:
            order = first_chunk_order(microbatches, self.destination.pp, self.destination.vpp)
        self._schedule, self._features, self._sends = deque(order), deque(), deque()

    def finish(self) -> None:
        """Wait for the last messages of a step."""
        self._wait_for_sends(0)
        assert not self._features, f"{self._name}: {len(self._features)} microbatches of features were not sent"

    def send_forward(self, features: torch.Tensor) -> None:
        """Send the features [rows, hidden] of the next microbatch once it is their turn."""
        self._features.append(features)
        self._send_due()
        if not self._has_backward:  # nothing else stops this rank from running ahead
            self._wait_for_sends(2 * self.destination.pp)

    def recv_backward(self) -> torch.Tensor | None:
        """As `DisjointBridge.recv_backward`. The features that are due before the gradient must have been passed to
        `send_forward`."""
        if not self._has_backward:
            return super().recv_backward()
        assert not self._schedule.popleft(), f"{self._name}: features are due before the next gradient"
        gradient = super().recv_backward()
        self._wait_for_sends(len(self._sends) - 1)  # the features of this gradient have arrived
        self._send_due()
        return gradient

    def send_backward(self, gradient: torch.Tensor | None) -> None:
        """As `DisjointBridge.send_backward`."""
        super().send_backward(gradient)
        self._wait_for_sends(_MOST_GRADIENTS)

    def _send_due(self) -> None:
        while self._features and self._schedule[0]:
            self._schedule.popleft()
            super().send_forward(self._features.popleft())

    def _exchange(
        self, sent: list[tuple[torch.Tensor, Part]], received: torch.Tensor | None = None, parts: Sequence[Part] = ()
    ) -> None:
        if received is not None:
            assert not sent, "messages are posted one after the other"
            super()._exchange(sent, received, parts)
            return
        self._sends.append((self._post(sent, None, ()), sent))
        if self.while_waiting:
            self.while_waiting()

    def _wait_for_sends(self, remaining: int) -> None:
        """Wait until at most `remaining` sends are on their way."""
        while len(self._sends) > remaining:
            works, _ = self._sends.popleft()
            self._wait(works)


def receive_features(bridges: Sequence[InterleavedBridge]) -> dict[str, torch.Tensor]:
    """Return the features [rows, hidden] of the next microbatch by encoder module. The backward pass sends their
    gradients."""
    if not bridges:
        return {}
    anchor = torch.zeros((), requires_grad=True)
    return dict(zip([bridge.source.name for bridge in bridges], _Receive.apply(anchor, bridges), strict=True))


class _Receive(torch.autograd.Function):
    """One function for all bridges, so that ranks send gradients in one order."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, bridges: Sequence[InterleavedBridge]) -> tuple[torch.Tensor, ...]:
        """`anchor` requires a gradient, so that there is a backward pass."""
        ctx.bridges = bridges
        return tuple(bridge.recv_forward().detach() for bridge in bridges)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        for bridge, gradient in zip(ctx.bridges, gradients, strict=True):
            bridge.send_backward(gradient)
        return None, None

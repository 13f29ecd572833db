"""The losses of routers. Router, dispatcher and experts are Megatron-Core's."""

from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.layout.ranks import ModuleLayout

TRACKED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Name of the load-balancing loss in Megatron-Core's tracker, by `router_balancing`."""


@dataclass(frozen=True)
class _Tracked:
    """A router loss that Megatron-Core's tracker records for each layer."""

    name: str
    """Name in the log."""
    entry: str
    """Name in the tracker."""
    copies: int
    """Ranks that each record a layer's whole loss of a microbatch, for the mean over them."""


class RouterLosses:
    """The load-balancing loss and the z-loss of a model with experts: their weights, and their values without extra
    messages.

    Megatron-Core 0.19.2 adds positions x loss to the sum of token losses and divides both by the tokens that count
    (router.py:600). The loss's weight would thus grow with the share of prompts, images and padding. It also averages a
    loss over all data-parallel ranks, although each has only a part of it (router.py:531). Multiplied by
    `learned_share` and the number of parts, the loss is a mean with the weight in the config. This holds for loss
    functions that return a sum and its number of tokens. Megatron-Core's tracker sends messages for each group to log
    the values (moe_logging.py:249). Here each rank adds its record to the step's message (`reduce_metrics`).

    Attributes:
        active: True if there is such a loss; otherwise nothing else is used.
        numbers: number of values of this class in the step's message.
        microbatches: number of microbatches of the step; set by the pipeline.
        learned_share: tokens that count / positions, of the step, 0-d; set by `weigh`.
    """

    def __init__(self, config: TransformerConfig, layout: ModuleLayout, device: torch.device, *, per_layer: bool):
        """Set the options in `config` that the schedule and the routers read.

        Args:
            layout: the language model's.
            per_layer: True if `reduced` also gives the value of each layer.
        """
        kind = config.moe_router_load_balancing_type
        self.learned_share = torch.ones((), device=device)
        self._config, self._per_layer, self._device, self.microbatches = config, per_layer, device, 1
        # Each data-parallel rank has a part of one balancing loss, or its own loss.
        self._parts = layout.dp if kind == "global_aux_loss" else 1
        self._tracked: list[_Tracked] = []
        pattern = config.moe_layer_freq
        self._layers = [layer for layer in range(config.num_layers) if not isinstance(pattern, list) or pattern[layer]]
        if config.num_moe_experts and kind != "none" and config.moe_aux_loss_coeff > 0:
            self._tracked.append(_Tracked("load_balancing_loss", TRACKED[kind], layout.dp // self._parts))
        if config.num_moe_experts and config.moe_z_loss_coeff:
            # A mean over the positions of each rank (router.py:655).
            self._tracked.append(_Tracked("z_loss", "z_loss", layout.tp * layout.cp * layout.dp))
            config.moe_z_loss_coeff /= self._parts  # `_scale` multiplies every loss of the routers
        self.active = bool(self._tracked)
        # The tracker is global to the process: drop values of an earlier run.
        destroy_moe_metrics_tracker()
        self.numbers = len(self._tracked) * config.num_layers
        if self.active:
            config.moe_grad_scale_func = self._scale
        config.token_share = self.learned_share

    def weigh(self, learned: torch.Tensor, tokens: torch.Tensor, positions: int) -> None:
        """Set the weights of the losses of a step, by its tokens that count, 0-d, those without padding, 0-d, and its
        positions."""
        self.learned_share = (learned / positions).to(torch.float32)
        self._config.token_share = (tokens / positions).to(torch.float32)

    def reduced(self, total: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the unweighted losses of the last step on every rank: means over microbatches, 0-d float64 on the
        device; empty if there are no such losses.

        Args:
            total: [numbers], sum over ranks of the results of `local_sums`.

        Returns:
            `load_balancing_loss`, the mean over layers with experts, 1 when all experts get as many tokens; `z_loss`,
            the mean over these layers and positions of logsumexp(logits)^2; with `per_layer` also each layer's, by its
            number: `moe/NAME_layer_0`.
        """
        values: dict[str, torch.Tensor] = {}
        for tracked, layers in zip(self._tracked, total.chunk(len(self._tracked)), strict=True):
            layers = layers[self._layers] / (tracked.copies * self.microbatches)
            values[tracked.name] = layers.mean()
            if self._per_layer:
                of_layers = zip(self._layers, layers, strict=True)
                values |= {f"moe/{tracked.name}_layer_{number}": value for number, value in of_layers}
        return values

    def local_sums(self) -> torch.Tensor:
        """Return [numbers], this rank's recorded losses of the step, and reset the record."""
        metrics, recorded = get_moe_metrics_tracker().metrics, []
        for tracked in self._tracked:
            entry = metrics.get(tracked.entry)
            if entry is None:  # a stage without a layer of experts
                recorded.append(torch.zeros(self._config.num_layers, dtype=torch.float64, device=self._device))
            else:
                recorded.append(entry.values.double())
                entry.values.zero_()
        return torch.cat(recorded)

    def _scale(self) -> torch.Tensor:
        """Return the factor of the losses' gradient. The schedule calls this after each forward pass."""
        scale_loss, scale = self._config.grad_scale_func, self._parts * self.learned_share.reshape(1)
        return scale if scale_loss is None else scale_loss(scale)

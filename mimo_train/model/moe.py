"""Mixture of experts: the block that replaces a layer's feed-forward block, and its balancing loss.

Router, dispatcher and experts are Megatron-Core's. Initial weights are a function of (seed, module, layer, number of
the expert) alone, so that neither `ep` nor `etp` changes them.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.model.seeds import seed_for


def expert_layer(linears: MLPSubmodules, te: bool) -> partial:
    """The builder of a layer's mixture-of-experts block.

    Args:
        linears: linear layers of a feed-forward block without a norm: the shared expert's, and each one's unless `te`.
        te: whether the experts of a rank are computed together by Transformer Engine's grouped linear layers.
    """
    if te:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        experts = TESpecProvider().grouped_mlp_modules(moe_use_grouped_gemm=True)
    else:
        experts = partial(SequentialMLP, submodules=linears)
    return partial(
        MoELayer,
        submodules=MoESubmodules(
            experts=partial(_seeded_experts, experts), shared_experts=partial(SharedExpertMLP, submodules=linears)
        ),
    )


def _seeded_experts(
    build: Callable[..., MegatronModule],
    count: int,
    config: TransformerConfig,
    *,
    pg_collection: ProcessGroupCollection,
    name: str | None = None,
) -> MegatronModule:
    """`count` experts of this rank, each with the weights of its number in the layer.

    The layer's seed is the last seed of the global generator (`SeededTransformerLayer`). The generator is left in a
    state that does not depend on `count`, for the parts of the layer that are built next."""
    layer_seed = torch.initial_seed()
    bare = copy.copy(config)
    bare.perform_initialization = False
    experts = build(count, bare, pg_collection=pg_collection, name=name)
    first, etp = pg_collection.ep.rank() * count, pg_collection.expt_tp
    for index in range(count):
        torch.manual_seed(seed_for(layer_seed, "expert", first + index))
        up, down = _weights(experts, index)
        # Megatron-Core 0.19.2 counts experts among the other parameters where ep is 1 and etp is tp (layers.py:961), so
        # that such a layout could not read the optimizer's state of another; as experts they are reduced all the same.
        up.allreduce = down.allreduce = False
        # With a gate each rank holds a part of both halves.
        _draw(up, 0, 2 if config.gated_linear_unit else 1, config.init_method, etp)
        _draw(down, 1, 1, config.output_layer_init_method, etp)
    torch.manual_seed(seed_for(layer_seed, "behind the experts"))
    return experts


def _weights(experts: MegatronModule, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of one of this rank's experts, as separate layers or grouped."""
    if isinstance(experts, SequentialMLP):
        expert = experts.local_experts[index]
        return expert.linear_fc1.weight, expert.linear_fc2.weight
    return getattr(experts.linear_fc1, f"weight{index}"), getattr(experts.linear_fc2, f"weight{index}")


@torch.no_grad()
def _draw(
    weight: torch.Tensor, dim: int, pieces: int, init_method: Callable[[torch.Tensor], object], etp: dist.ProcessGroup
) -> None:
    """Draw the whole weight on the CPU and keep this rank's part.

    Args:
        dim: what expert tensor parallel cuts.
        pieces: equal parts of the whole weight along `dim`, each of which is cut.
    """
    shape = list(weight.shape)
    shape[dim] *= etp.size()
    whole = torch.empty(shape, dtype=torch.float32)
    init_method(whole)
    parts = whole.split(weight.size(dim) // pieces, dim)
    weight.copy_(torch.cat(parts[etp.rank() :: etp.size()], dim))


TRACKED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Name of the loss in Megatron-Core's tracker, by `router_balancing`."""


class Balancing:
    """The load-balancing loss of a model with experts: its weight, and its value without an extra message.

    Megatron-Core 0.19.2 adds positions x loss to the sum of token losses and divides both by the tokens that count
    (router.py:600), so that its weight would grow with the share of positions that do not count: prompts, pictures,
    padding. It averages a loss over all data-parallel ranks, although each has only a part of it (router.py:531).
    Multiplied by `learned_share` and the number of parts, the loss is a mean with the weight in the config, for loss
    functions that return a sum and its number of tokens. The tracker sends messages for each group to log the value
    (moe_logging.py:249); here each rank adds its record to the step's `StepSum`.

    Attributes:
        active: whether there is such a loss; without it nothing else is used.
        learned_share: tokens that count / positions, of the step, 0-d; set by the data iterator.
    """

    NAME = "load_balancing_loss"

    def __init__(self, config: TransformerConfig, replicas: int, device: torch.device):
        """`replicas`: data-parallel ranks of the language model. Sets what the schedule reads from `config`."""
        kind = config.moe_router_load_balancing_type
        self.active = bool(config.num_moe_experts) and kind != "none" and config.moe_aux_loss_coeff > 0
        self.learned_share = torch.ones((), device=device)
        self._config, self._microbatches = config, 1
        if not self.active:
            return
        self._tracked = TRACKED[kind]
        # Each data-parallel rank has a part of one loss, or its own loss.
        self._parts = replicas if kind == "global_aux_loss" else 1
        self._losses = config.num_layers * replicas // self._parts
        config.moe_grad_scale_func = self._scale

    def begin(self, num_microbatches: int) -> None:
        """Start a step of that many microbatches."""
        self._microbatches = num_microbatches

    def reduced(self, total: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """{"load_balancing_loss": mean over layers and microbatches of the last step, without its weight}, 0-d float64
        on the device, on every rank; 1 when all experts get as many tokens. Empty if there is no such loss.

        Args:
            total: [1], sum of `own` over ranks.
        """
        return {} if total is None else {self.NAME: total[0] / (self._losses * self._microbatches)}

    def own(self) -> torch.Tensor | None:
        """This rank's recorded losses of the step, for the step's sum; resets the record."""
        entry = get_moe_metrics_tracker().metrics.get(self._tracked)
        if entry is None:
            return None
        total = entry.values.double().sum()
        entry.values.zero_()
        return total

    def _scale(self) -> torch.Tensor:
        """Factor of the gradient of the loss; the schedule calls this after each forward pass."""
        scale_loss, scale = self._config.grad_scale_func, self._parts * self.learned_share.reshape(1)
        return scale if scale_loss is None else scale_loss(scale)

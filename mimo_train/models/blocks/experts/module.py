"""The mixture of experts of a layer, from Megatron-Core's parts. Initial weights depend only on (seed, module, layer,
number of the expert), not on `ep` or `etp`."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.models.blocks.mlp.module import mlp_submodules
from mimo_train.models.blocks.module import BlockModule
from mimo_train.models.lora.linear import LoraRowParallelLinear
from mimo_train.models.norms import norm_class
from mimo_train.models.parameters import mark, seed_for


def build(config: TransformerConfig, te: bool) -> BlockModule:
    """Return the classes of the block. With `te` Transformer Engine's grouped linear layers compute the experts of a
    rank together. The norm is separate, as the router reads its output too."""
    te = te and not config.lora.rank
    linears = mlp_submodules(te, adapted=config.lora.rank > 0)
    if config.add_bias_linear:
        linears = replace(linears, linear_fc2=CopiedOutput)
    if te:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        experts = TESpecProvider().grouped_mlp_modules(moe_use_grouped_gemm=True)
    else:
        experts = partial(SequentialMLP, submodules=linears)
    parts = MoESubmodules(
        experts=partial(_seeded_experts, experts),
        shared_experts=partial(SharedExpertMLP, submodules=linears),
        router=Router,
    )
    return BlockModule(norm_class(te), partial(MoELayer, submodules=parts), {})


class CopiedOutput(LoraRowParallelLinear):
    """`RowParallelLinear` whose output may change in place. Megatron-Core 0.19.2 adds the bias of an expert so
    (transformer/mlp.py:354), which torch rejects for outputs of `reduce_from_tensor_model_parallel_region`."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output, bias)."""
        output, bias = super().forward(input_)
        return output.clone(), bias


class Router(TopKRouter):
    """A router whose biases stay as they are, and whose losses do not count padding: the tokens behind each row. Shape
    suffixes: T tokens of this rank, S x B; E experts.

    Megatron-Core 0.19.2 moves biases of a frozen router too, by 0.001 a step (finalize_model_grads.py:334), and counts
    the tokens of experts over all ranks to do so. With padding it takes the mean length of a batch for that of each
    sequence (router.py:484), and multiplies a loss by the tokens of a rank, of which ranks have different numbers.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.frozen_expert_bias = True

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attach the mean of logsumexp(logits)^2 over the tokens of the step. `padding_mask`: [T]."""
        weight = self.config.moe_z_loss_coeff
        if padding_mask is None or weight is None or not (self.training and torch.is_grad_enabled()):
            return super().apply_z_loss(logits)
        loss = (logits.logsumexp(dim=-1).square() * ~padding_mask).mean() / self.config.token_share
        layers = self.config.num_layers
        get_moe_metrics_tracker().record("z_loss", loss, self.layer_number, layers, avg_group=self.tp_dp_cp_group)
        return MoEAuxLossAutoScaler.apply(logits, weight * loss * len(logits))

    def attach_and_log_load_balancing_loss(
        self, *arguments: Any, valid_token_count: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Attach a loss, multiplied by all positions. See `router_losses.RouterLosses`."""
        return super().attach_and_log_load_balancing_loss(*arguments, **options)

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        weight = self.get_aux_loss_coeff("seq_aux_loss")
        if not weight:
            return probs
        scores_BE, chosen_BE = (
            tensor.view(seq_length, bsz, -1).sum(0) for tensor in (scores_for_aux_loss, routing_map)
        )
        chosen_BE = reduce_from_tensor_model_parallel_region(chosen_BE, self.tp_cp_group)
        tokens_B1 = chosen_BE.sum(1, keepdim=True).clamp(min=1) / self.topk
        shares_BE = chosen_BE / (tokens_B1 * self.topk)
        loss = weight * self.config.num_moe_experts * (shares_BE * scores_BE / tokens_B1).sum() / bsz
        name = "seq_load_balancing_loss"
        return self.attach_and_log_load_balancing_loss(probs, weight, loss, name, self.tp_cp_group)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Count nothing: biases stay as they are."""


def _seeded_experts(
    build: Callable[..., MegatronModule],
    count: int,
    config: TransformerConfig,
    *,
    pg_collection: ProcessGroupCollection,
    name: str | None = None,
) -> MegatronModule:
    """Build `count` experts of this rank, each with the weights of its number in the layer. The layer's seed is the
    last seed of the global generator (`SeededTransformerLayer`). The generator's final state does not depend on
    `count`, so neither do the parts of the layer that are built next."""
    layer_seed = torch.initial_seed()
    bare = copy.copy(config)
    bare.perform_initialization = False
    experts = build(count, bare, pg_collection=pg_collection, name=name)
    first, etp = pg_collection.ep.rank() * count, pg_collection.expt_tp
    for index in range(count):
        torch.manual_seed(seed_for(layer_seed, "expert", first + index))
        up, down = _weights(experts, index)
        # Megatron-Core 0.19.2 counts experts as dense parameters if ep is 1 and etp is tp (layers.py:961), so other
        # layouts could not read the optimizer's state. As experts they are reduced the same way.
        for weight in (up, down):
            mark(weight, allreduce=False)
        for bias in _biases(experts, index):
            # Ranks that share a sequence have other tokens of an expert: not summed once more over them.
            mark(bias, allreduce=False, sequence_parallel=False)
            torch.nn.init.zeros_(bias)
        if not config.perform_initialization:
            continue
        # With a gate each rank holds a part of both halves.
        config.init_method.draw_part(up, 0, etp.rank(), etp.size(), 2 if config.gated_linear_unit else 1)
        config.output_layer_init_method.draw_part(down, 1, etp.rank(), etp.size())
    torch.manual_seed(seed_for(layer_seed, "behind the experts"))
    return experts


def _biases(experts: MegatronModule, index: int) -> list[torch.nn.Parameter]:
    if not isinstance(experts, SequentialMLP):
        return []
    return [value for name, value in experts.local_experts[index].named_parameters() if name.endswith(".bias")]


def _weights(experts: MegatronModule, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(experts, SequentialMLP):
        expert = experts.local_experts[index]
        return expert.linear_fc1.weight, expert.linear_fc2.weight
    return getattr(experts.linear_fc1, f"weight{index}"), getattr(experts.linear_fc2, f"weight{index}")

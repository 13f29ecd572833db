"""Output heads for value and reward models, and freezing of routers."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import unwrap_model

from encoders.initial_weights import fill
from mimo_train.models.parameters import mark

ModelList = list[MegatronModule]
"""The model chunks of a rank."""

ModelHook = Callable[[ModelList], ModelList]
"""A function that changes a model before it is wrapped for data parallelism."""


class LinearForLastLayer(torch.nn.Linear):
    """A linear output layer that every tensor-parallel rank holds whole, instead of Megatron-Core's output layer.
    `tp_group` are the ranks that the sequence is split over; None: Megatron-Core's tensor-parallel group."""

    def __init__(self, input_size: int, output_size: int, sequence_parallel: bool):
        """
        Args:
            input_size: width of the transformer's output.
            output_size: numbers for each token.
            sequence_parallel: True if each rank receives its part of the sequence, so that outputs must be gathered.
        """
        super().__init__(input_size, output_size, bias=False)
        self.sequence_parallel = sequence_parallel
        self.tp_group: dist.ProcessGroup | None = None
        # Each rank sees its part of the tokens: `finalize_model_grads` then sums over the tensor-parallel ranks.
        mark(self.weight, sequence_parallel=sequence_parallel)

    def forward(  # type: ignore[override]  # called as Megatron-Core calls its output layer, not as a torch one
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Project [sequence, batch, hidden] to [whole sequence, batch, output_size], in fp32.

        Args:
            weight: unused; Megatron-Core passes tied embedding weights here.
            runtime_gather_output: unused; outputs are whole on every rank.

        Returns:
            The outputs, and None instead of a bias.
        """
        output = super().forward(input_).float()
        if self.sequence_parallel:
            # Every rank uses the whole output, so it already has the whole gradient.
            output = gather_from_sequence_parallel_region(
                output, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return output, None


def create_value_head_hook(hidden_size: int, sequence_parallel: bool, output_size: int = 1) -> ModelHook:
    """Return a hook that replaces the output layer of the pipeline's last stage by a `LinearForLastLayer`.

    Embeddings and output layer no longer share weights, on any stage. The new weights are drawn on the CPU from the
    model's seed, the same at every layout. Without labels the model returns [batch, sequence, output_size].

    Args:
        hidden_size: width of the transformer's output.
        sequence_parallel: True if the model runs sequence parallel.
        output_size: numbers for each token.
    """
    _register_linear_for_last_layer_mapping()

    def hook(model: ModelList) -> ModelList:
        chunks = _ensure_model_list(model)
        for chunk in chunks:
            language = unwrap_model(chunk)
            language.share_embeddings_and_output_weights = False
            if language.post_process:
                head = LinearForLastLayer(hidden_size, output_size, sequence_parallel)
                norm = language.decoder.final_layernorm
                fill(head.weight.detach(), language.config.init_method_std, language.config.init_seed)
                head.tp_group = language.pg_collection.tp
                language.output_layer = head.to(device=norm.weight.device, dtype=norm.weight.dtype)
            elif language.pre_process:
                # Clear the flag of a shared weight, since its copy on the last stage is gone.
                language.embedding.word_embeddings.weight.shared_embedding = False
        return chunks

    return hook


def make_value_model(hidden_size: int, sequence_parallel: bool) -> ModelHook:
    """Return `create_value_head_hook` with one output, under the name that trainers of value models call."""
    return create_value_head_hook(hidden_size, sequence_parallel)


def freeze_moe_router(model: ModelList | MegatronModule) -> ModelList:
    """Stop the gradients of every router and of every gate of shared experts, and return the chunks. Call before
    wrapping for data parallelism. `model` is one module, or the chunks of a virtual pipeline."""
    chunks = _ensure_model_list(model)
    for chunk in chunks:
        for module in chunk.modules():
            router, shared = getattr(module, "router", None), getattr(module, "shared_experts", None)
            for name in ("weight", "bias"):
                _freeze_parameter_if_present(router, name)
            for name in ("gate_weight", "gate_bias"):
                _freeze_parameter_if_present(shared, name)
    return chunks


def _ensure_model_list(model: ModelList | MegatronModule) -> ModelList:
    if isinstance(model, list):
        return model
    return list(model) if isinstance(model, tuple | torch.nn.ModuleList) else [model]


def _freeze_parameter_if_present(module: object, name: str) -> None:
    parameter = getattr(module, name, None)
    if isinstance(parameter, torch.nn.Parameter):
        parameter.requires_grad_(False)


def _register_linear_for_last_layer_mapping() -> None:
    """Describe the head to checkpoints as replicated on all tensor-parallel and data-parallel ranks. Otherwise
    Megatron-Core looks up the groups of a foreign layer in its global state."""
    LinearForLastLayer.sharded_state_dict = _replicated_state  # type: ignore[attr-defined]  # registered here


def _replicated_state(
    head: LinearForLastLayer, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
) -> dict:
    return make_sharded_tensors_for_checkpoint(
        head.state_dict(keep_vars=True),
        prefix,
        {},
        sharded_offsets,
        tp_group=head.tp_group,
        dp_cp_group=(metadata or {}).get("dp_cp_group"),
    )

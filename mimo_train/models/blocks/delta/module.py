"""Gated DeltaNet from Megatron-Core's parts, inside the documents of a packed row, and with a cache.

Megatron-Core 0.19.2 requires `fla`, even in its deterministic mode, which does not use it (ssm/gated_delta_net/
common.py:134). Its forward pass has no cache, and takes documents only if each is cut over context-parallel ranks
(gdn.py:140-190), so it is written again here. Its initial weights depend on tensor parallelism.

The rule: Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464, section 3. The state of a head decays, forgets
what it holds for the token's key, and stores the token's value: S_t = a_t (S_{t-1} - b_t k_t k_t^T S_{t-1}) + b_t k_t
v_t^T; the output is S_t^T q_t. On a GPU the kernels of `fla` that Megatron-Core finds compute it where their gradients
are right. Elsewhere torch computes chunks of tokens at once, as in section 3.3: inside a chunk, what tokens forget of
each other solves a triangular system.

Shape suffixes: S sequence, B batch, C channels, K kernel, N heads, D head dimension, P positions of this
context-parallel rank.
"""

import copy
import functools
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging import version

from encoders.initial_weights import fill, next_seed
from mimo_train.models.blocks.delta.spec import CHUNK
from mimo_train.models.blocks.mlp.module import mlp_submodules
from mimo_train.models.blocks.module import BlockModule
from mimo_train.models.documents import Documents
from mimo_train.models.norms import norm_class
from mimo_train.models.parameters import Cut, mark, seed_for

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries and keys [B, S, heads, key size], values [B, S, heads, value size], logarithms of decays and betas [B, S,
heads]."""
_A_RANGE = (0.01, 16.0)
"""Range of the initial decay rates, as in `transformers`."""


def build(config: TransformerConfig, te: bool) -> BlockModule:
    """Return the classes of the block. The norm in front of it is separate in both kinds of layers."""
    linears = mlp_submodules(te, adapted=config.lora.rank > 0)
    parts = GatedDeltaNetSubmodules(linears.linear_fc1, HeadNorm, linears.linear_fc2)
    return BlockModule(norm_class(te), ModuleSpec(DeltaNet, submodules=parts), {})


class HeadNorm(torch.nn.RMSNorm):
    """The norm of the outputs of each head, by a weight around 1 in any family (`zero_centered_norms`). All heads share
    the weight, so tensor-parallel ranks with different heads sum its gradients: `finalize_model_grads` with sequence
    parallelism, the backward pass without."""

    tp_group: torch.distributed.ProcessGroup | None = None

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize [..., D]."""
        weight = self.weight
        if self.tp_group is not None:
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
        return F.rms_norm(inputs, self.normalized_shape, weight, self.eps)


class DeltaNet(GatedDeltaNet):
    """`GatedDeltaNet` without `fla`, in packed rows, with a cache, and with initial weights that no layout changes."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        *,
        pg_collection: ProcessGroupCollection,
        **_others: Any,
    ):
        bare = copy.copy(config)
        bare.perform_initialization = False
        bare.activation_func = F.silu  # of convolution and gates, whatever the feed-forward block has
        seed = torch.initial_seed()  # the layer's (`SeededTransformerLayer`)
        with patch.object(common, "HAVE_FLA", True):
            super().__init__(bare, submodules, layer_number, use_qk_l2norm=False, pg_collection=pg_collection)
        self.config = config
        self._head_permutation: torch.Tensor | None = None
        if self.tp_size > 1 and not config.sequence_parallel:
            self.out_norm.tp_group = self.tp_group
        conv_sections = (self.qk_dim, self.qk_dim, self.v_dim)
        gates = (self.num_value_heads, self.num_value_heads)
        mark(self.in_proj.weight, partition_sections=(*conv_sections, self.v_dim, *gates))
        mark(self.conv1d.weight, partition_sections=conv_sections)
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            mark(parameter, partition_stride=1)
        torch.manual_seed(seed_for(seed, "delta"))
        if config.perform_initialization:
            self._draw_weights()
        torch.manual_seed(seed_for(seed, "behind the delta net"))

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = torch_rule  # `fla`'s, or nothing, which is an error there

    @torch.no_grad()
    def _draw_weights(self) -> None:
        """Draw this rank's part of the weights, as `transformers` does: the convolution as any of torch."""
        rank, size = self.tp_group.rank(), self.tp_size
        weight, seed = self.in_proj.weight, next_seed()
        ranges = Cut.of(weight, rank, size).ranges(self.in_proj_dim)
        for (first, _), block in zip(ranges, weight.split([last - first for first, last in ranges]), strict=True):
            fill(block, self.config.init_method_std, seed, first)
        self.config.output_layer_init_method.draw_part(self.out_proj.weight, 1, rank, size)
        bound = self.conv_kernel_dim**-0.5
        convolution = torch.empty(self.conv_dim, 1, self.conv_kernel_dim).uniform_(-bound, bound)
        rates = torch.empty(self.num_value_heads).uniform_(*_A_RANGE).log_()
        for parameter, values in ((self.conv1d.weight, convolution), (self.A_log, rates)):
            ranges = Cut.of(parameter, rank, size).ranges(len(values))
            parameter.copy_(torch.cat([values[first:last] for first, last in ranges]))
        torch.nn.init.ones_(self.dt_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix the tokens of [P, B, H], as Megatron-Core's method. Padding must be at the end of rows.

        Args:
            inference_context: holds the last inputs of the convolution and the state of each head.
            packed_seq_params: `Documents` of a packed row.
        """
        assert packed_seq_params is None or isinstance(packed_seq_params, Documents), packed_seq_params
        documents = None if packed_seq_params is None else packed_seq_params.undivided
        memory = None if inference_context is None else inference_context.key_value_memory_dict
        cache: dict[str, torch.Tensor] | None = None if memory is None else memory.setdefault(self.layer_number, {})
        projected, _ = self.in_proj(hidden_states)
        projected = self._whole_rows(projected).transpose(0, 1)
        mixed, gate, beta, alpha = projected.split(self.feat_dim_split, dim=-1)
        batch, length, _ = mixed.shape
        mixed = self._convolve(mixed, documents, cache)
        gate = gate.reshape(batch, length, -1, self.value_head_dim)
        query, key, value, gate, beta, alpha = self._prepare_input_for_gated_delta_rule(
            mixed, gate, batch, length, beta, alpha
        )
        decay, beta = self._compute_g_and_beta(*map(self._own_heads, (self.A_log, self.dt_bias)), alpha, beta)
        outputs = self._apply_rule((query, key, value, decay, beta), documents, cache)
        return self.out_proj(self._gated_norm_and_a2a(outputs, gate, None, batch, length))

    def _whole_rows(self, projected_PBC: torch.Tensor) -> torch.Tensor:
        """Return [S, B, C / cp], all positions of this rank's heads, in order."""
        if self.cp_size == 1:
            return projected_PBC
        group = self.pg_collection.cp
        if self._head_permutation is None:
            self._head_permutation = common._build_head_perm_for_split_sections(
                tuple(self.in_proj_split_sections), self.cp_size, projected_PBC.device
            )
        by_head = projected_PBC.index_select(-1, self._head_permutation)
        return common.tensor_a2a_cp2hp(by_head, seq_dim=0, head_dim=-1, cp_group=group)

    def _own_heads(self, parameter: torch.Tensor, sections: list[int] | None = None) -> torch.Tensor:
        """Return the part of a parameter for this context-parallel rank's heads."""
        return common.get_parameter_local_cp(parameter, 0, self.pg_collection.cp, sections)

    def _convolve(
        self, mixed_BSC: torch.Tensor, documents: Documents | None, cache: dict[str, torch.Tensor] | None
    ) -> torch.Tensor:
        sections = [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]
        weight_CK = self._own_heads(self.conv1d.weight, sections).squeeze(1)
        if cache is None:
            return convolve(mixed_BSC, weight_CK, documents)
        past = self.conv_kernel_dim - 1
        before = cache.get("inputs", mixed_BSC.new_zeros(len(mixed_BSC), past, mixed_BSC.size(-1)))
        inputs_BSC = torch.cat([before, mixed_BSC], 1)
        cache["inputs"] = inputs_BSC[:, inputs_BSC.size(1) - past :]
        return torch_convolution(inputs_BSC, weight_CK)[:, past:]

    def _apply_rule(
        self, heads: Heads, documents: Documents | None, cache: dict[str, torch.Tensor] | None
    ) -> torch.Tensor:
        if cache is None:
            return apply_rule(heads, documents)
        outputs, cache["state"] = torch_rule(*heads, state=cache.get("state"))
        return outputs


def convolve(inputs_BSC: torch.Tensor, weight_CK: torch.Tensor, documents: Documents | None) -> torch.Tensor:
    """Return [B, S, C], each channel convolved causally inside its document, after SiLU."""
    if inputs_BSC.is_cuda and common.causal_conv1d is not None:
        return common.causal_conv1d(inputs_BSC, weight_CK, None, activation="silu", **_ends(documents, inputs_BSC))[0]
    return _by_document(lambda rows: torch_convolution(rows, weight_CK), (inputs_BSC,), documents)


def apply_rule(heads: Heads, documents: Documents | None) -> torch.Tensor:
    """Return the outputs of the rule inside documents, [B, S, heads, value size], with normed queries and keys."""
    if heads[0].is_cuda and not fallback_reason():
        query, key, value, decay, beta = heads
        options = {"use_qk_l2norm_in_kernel": True, **_ends(documents, query)}
        return common.chunk_gated_delta_rule(query, key, value, g=decay, beta=beta, **options)[0]
    return _by_document(lambda *parts: torch_rule(*parts)[0], heads, documents)


@functools.cache
def fallback_reason() -> str:
    """Return why torch computes the rule on this process's GPU, or "" if the kernels of `fla` do."""
    if common.chunk_gated_delta_rule is None:
        return "flash-linear-attention is not installed, or has no kernels for it here"
    # Issue 640 of fla-org/flash-linear-attention; fla 0.6.0 refuses these gradients (ops/common/chunk_o.py:727).
    triton = version.parse(metadata.version("triton"))
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    if is_hopper and version.parse("3.4") <= triton < version.parse("3.7.1") and find_spec("tilelang") is None:
        return f"gradients by its kernels are wrong on Hopper with Triton {triton}: install tilelang"
    return ""


def _ends(documents: Documents | None, like: torch.Tensor) -> dict[str, Any]:
    return {} if documents is None else {"cu_seqlens": documents.cumulative(0, like.device)[0]}


def _by_document(
    function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], documents: Documents | None
) -> torch.Tensor:
    """Return `function` of inputs [B, S, ...]; in a packed row [1, S, ...] of each document, with neighbors of one
    length as a batch."""
    if documents is None:
        return function(*inputs)
    # `split` makes one gradient of all parts; each slice would have one as long as the row.
    rows = [count * length for count, length in documents.runs]
    parts = zip(documents.runs, *(tensor[0].split(rows) for tensor in inputs), strict=True)
    outputs = [function(*(tensor.unflatten(0, run) for tensor in tensors)).flatten(0, 1) for run, *tensors in parts]
    return torch.cat(outputs).unsqueeze(0)


def torch_convolution(inputs_BSC: torch.Tensor, weight_CK: torch.Tensor) -> torch.Tensor:
    """Return [B, S, C], as `convolve`, of rows that are each one document."""
    channels, kernel = weight_CK.shape
    inputs_BCS = F.pad(inputs_BSC.transpose(1, 2), (kernel - 1, 0))
    return F.silu(F.conv1d(inputs_BCS, weight_CK.unsqueeze(1), groups=channels)).transpose(1, 2)


def torch_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and the last state of rows that are each one document, computed in fp32.

    Args:
        state: of the tokens before, [B, heads, key size, value size]; None: there are none.
    """
    dtype, tokens = query.dtype, query.size(1)
    size = min(CHUNK, tokens)

    def chunks(tensor: torch.Tensor) -> torch.Tensor:
        """Return [B, heads, chunks, size, ...], with zeros behind the last token."""
        padding = (0, 0) * (tensor.dim() - 3) + (0, -tokens % size)
        return F.pad(tensor.transpose(1, 2).float(), padding).unflatten(2, (-1, size))

    query, key, value, decay, beta = map(chunks, (query, key, value, decay, beta))
    query, key = (tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6) for tensor in (query, key))
    query = query * query.size(-1) ** -0.5
    total = decay.cumsum(-1).unsqueeze(-1)  # from the start of the chunk
    between = (total - total.mT).tril().exp().tril()
    weighted = key * beta.unsqueeze(-1)
    forgotten = (weighted @ key.mT * between).tril(-1)
    sides = torch.cat([value * beta.unsqueeze(-1), weighted * total.exp()], -1)
    values, keys = torch.linalg.solve_triangular(forgotten, sides, upper=False, unitriangular=True).split(
        [value.size(-1), key.size(-1)], -1
    )
    inside, from_state = query @ key.mT * between, query * total.exp()
    to_state = key * (total[..., -1:, :] - total).exp()
    if state is None:
        state = value.new_zeros(*value.shape[:2], key.size(-1), value.size(-1))
    outputs = []
    for chunk in range(value.size(2)):
        new = values[:, :, chunk] - keys[:, :, chunk] @ state
        outputs.append(from_state[:, :, chunk] @ state + inside[:, :, chunk] @ new)
        state = state * total[:, :, chunk, -1:].exp() + to_state[:, :, chunk].mT @ new
    output = torch.stack(outputs, 2).flatten(2, 3)[:, :, :tokens]
    return output.transpose(1, 2).to(dtype).contiguous(), state

"""A perceiver resampler: learned latents that attend to the features of an image or audio item (see `ResamplerSpec`).
Its linear layers are Megatron-Core's, so tensor parallelism divides heads and feed-forward blocks.

Shape suffixes: N media, L latents, C features of a media item, K = C + L, H hidden size, D width of a head.
"""

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from encoders.initial_weights import drawn


class PerceiverResampler(MegatronModule):
    """Features of media -> `latents` rows of each.

    Args:
        config: sizes of the layers, which have no biases.
        latents: rows of each media item.
        norm: builder of a norm.
        tp_group: ranks that have parts of the heads and feed-forward blocks.
    """

    def __init__(self, config: TransformerConfig, latents: int, norm: type, tp_group: torch.distributed.ProcessGroup):
        super().__init__(config=config)
        self.latents = drawn((latents, config.hidden_size), config.init_method_std, config)
        self.layers = MegatronModule(config=config)
        for number in range(config.num_layers):
            self.layers.add_module(str(number), _Layer(config, norm, tp_group))
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, features: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Resample the features of media.

        Args:
            features: rows in the order of the media, [sum of counts, H].
            counts: rows of each media item.

        Returns:
            [N * L, H], in the order of the media.
        """
        groups: dict[int, list[int]] = {}
        for number, count in enumerate(counts):
            groups.setdefault(count, []).append(number)
        parts = features.split(list(counts))
        outputs: list[torch.Tensor] = [features] * len(counts)
        for members in groups.values():
            resampled_NLH = self._resample(torch.stack([parts[member] for member in members]))
            for member, rows_LH in zip(members, resampled_NLH, strict=True):
                outputs[member] = rows_LH
        return torch.cat(outputs)

    def _resample(self, features_NCH: torch.Tensor) -> torch.Tensor:
        latents_NLH = self.latents.expand(len(features_NCH), -1, -1)
        for layer in self.layers.children():
            latents_NLH = layer(latents_NLH, features_NCH)
        return self.norm(latents_NLH)


class _Layer(MegatronModule):
    """Attention of the latents to features and latents, then a feed-forward block, both after norms."""

    def __init__(self, config: TransformerConfig, norm: type, tp_group: torch.distributed.ProcessGroup):
        super().__init__(config=config)
        width, self.head = config.hidden_size, config.kv_channels
        options = {"config": config, "bias": False, "tp_group": tp_group, "is_expert": False}
        query, key = (heads * self.head for heads in (config.num_attention_heads, config.num_query_groups))
        for name, outputs in (("linear_q", query), ("linear_k", key), ("linear_v", key)):
            layer = ColumnParallelLinear(
                width, outputs, init_method=config.init_method, gather_output=False, skip_bias_add=False, **options
            )
            self.add_module(name, layer)
        self.linear_proj = RowParallelLinear(
            query, width, init_method=config.output_layer_init_method, input_is_parallel=True, skip_bias_add=False,
            **options,
        )  # fmt: skip
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        self.mlp = MLP(config, linears, tp_group=tp_group)
        names = ("latents_norm", "features_norm", "mlp_norm")
        for name in names:
            self.add_module(name, norm(config, width, config.layernorm_epsilon))

    def forward(self, latents_NLH: torch.Tensor, features_NCH: torch.Tensor) -> torch.Tensor:
        latents, features = self.latents_norm(latents_NLH), self.features_norm(features_NCH)
        seen_NKH = torch.cat([features, latents], dim=1)
        query = self._heads(self.linear_q(latents)[0])
        key, value = (self._heads(linear(seen_NKH)[0]) for linear in (self.linear_k, self.linear_v))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, enable_gqa=key.size(1) != query.size(1)
        )
        latents_NLH = latents_NLH + self.linear_proj(attended.transpose(1, 2).flatten(2))[0]
        return latents_NLH + self.mlp(self.mlp_norm(latents_NLH))[0]

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Split [N, rows, heads * D] into [N, heads, rows, D]."""
        return rows.unflatten(2, (-1, self.head)).transpose(1, 2)

"""The vision transformer of Qwen3-VL, of Megatron-Core layers. Its features are, side by side, the projector's input
and the merged states of each layer of `deepstack`. Shape suffixes as in `encoders.native.vit.model`; W width of a
merger's output."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from encoders.initial_weights import bare_layer, draw_weights
from encoders.native.qwen3_vit.spec import Qwen3VitSpec
from encoders.native.vit.model import VisionTransformer
from encoders.native.vit.positions import axial_angles
from encoders.staged import Size


class Qwen3VisionTransformer(VisionTransformer):
    """Images -> features per token of `merge` x `merge` patches, [rows, H * merge^2 + W * layers of deepstack], on one
    stage."""

    spec: Qwen3VitSpec

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        assert self.is_first_stage and self.is_last_stage, "states of all layers are needed on one stage"
        torch.manual_seed(self.config.init_seed + 2)
        spec, config = self.spec, self.config
        self.deepstack = torch.nn.ModuleList(
            StateMerger(spec.merged_width, spec.deepstack_width, spec.layernorm_epsilon, spec.init_std, config)
            for _ in spec.deepstack
        )

    def _angles(self, size: Size) -> torch.Tensor:
        spec, grid = self.spec, self._grid(size)
        angles = axial_angles(spec.hidden_size // spec.num_attention_heads, spec.rotary_base, *grid)
        return angles[self._order(grid)]

    def _states(self, hidden_SBH: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Return [S, B, H * (1 + layers of deepstack)]: the last states after the final norm, and those of
        deepstack."""
        states = self.layers(hidden_SBH, **inputs, extract_layer_indices=set(self.spec.deepstack))
        return torch.cat([states[0], *states[1]], dim=-1) if self.spec.deepstack else states

    def _features(self, rows_RH: torch.Tensor) -> torch.Tensor:
        last, *others = (
            super(Qwen3VisionTransformer, self)._features(rows) for rows in rows_RH.split(self.spec.hidden_size, dim=-1)
        )
        merged = [merger(state) for merger, state in zip(self.deepstack, others, strict=True)]
        return torch.cat([last, *merged], dim=-1)


class StateMerger(torch.nn.Module):
    """Maps merged states of a layer to the input of a language-model layer: norm, linear, GELU, linear."""

    def __init__(self, width: int, language_width: int, eps: float, init_std: float, config: TransformerConfig):
        super().__init__()
        dtype = config.params_dtype
        self.norm = torch.nn.LayerNorm(width, eps=eps, dtype=dtype)
        self.linear_fc1 = bare_layer(torch.nn.Linear, width, width, dtype=dtype)
        self.linear_fc2 = bare_layer(torch.nn.Linear, width, language_width, dtype=dtype)
        for linear in (self.linear_fc1, self.linear_fc2):
            draw_weights(linear, init_std, config)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map [..., H * merge^2] to [..., W]."""
        return self.linear_fc2(torch.nn.functional.gelu(self.linear_fc1(self.norm(states))))

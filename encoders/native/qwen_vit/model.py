"""The vision transformers of Qwen2.5-VL and Qwen3-VL, of Megatron-Core layers.

Inside the layers of Qwen2.5-VL the patches of an image are ordered by window, then by token of the sequence (a square
of `merge` x `merge` patches). Windows are contiguous, and those of one length are adjacent. Images are always documents
of a packed row, with windows inside of them. The features of Qwen3-VL are, side by side, the projector's input and the
merged states of each layer of `deepstack`.

Shape suffixes as in `encoders.native.vit.model`; W width of a merger's output.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from encoders.initial_weights import bare_layer, draw_weights
from encoders.native.qwen_vit.spec import Qwen3VitSpec, QwenVitSpec
from encoders.native.vit.model import VisionTransformer
from encoders.native.vit.patches import Grid, token_by_token
from encoders.native.vit.positions import axial_angles
from encoders.staged import Size


class _AxialTransformer(VisionTransformer):
    """A vision transformer with rotary positions by row and column."""

    spec: QwenVitSpec | Qwen3VitSpec

    def _angles(self, size: Size) -> torch.Tensor:
        spec, grid = self.spec, self._grid(size)
        angles = axial_angles(spec.hidden_size // spec.num_attention_heads, spec.rotary_base, *grid)
        return angles[self._order(grid)]


class QwenVisionTransformer(_AxialTransformer):
    """One pipeline stage: images -> features per token of `merge` x `merge` patches."""

    spec: QwenVitSpec

    def _kept(self, size: Size) -> torch.Tensor:
        # Position of each token in window order, by its position in the image.
        rows, columns = self._grid(size)
        tokens = torch.argsort(_by_window(rows // self.merge, columns // self.merge, self._window))
        return (tokens[:, None] * self.merge**2 + torch.arange(self.merge**2)).flatten()

    def _is_batch(self, sizes: Sequence[Size]) -> bool:
        return False

    def _documents(self, sizes: Sequence[Size]) -> PackedSeqParams:
        windows = [
            self.merge**2 * tokens
            for rows, columns in map(self._grid, sizes)
            for tokens in _window_lengths(rows // self.merge, columns // self.merge, self._window)
        ]
        return self.config.documents([self._tokens(size) for size in sizes], windows=windows)

    @property
    def _window(self) -> int:
        """Side of a window, in tokens of the sequence."""
        return self.spec.window_size // self.spec.patch_size // self.merge

    def _order(self, grid: Grid) -> torch.Tensor:
        return _patch_order(*grid, self.merge, self._window)


def _windows(rows: int, columns: int, window: int) -> list[torch.Tensor]:
    """Return the positions (in row order) of the tokens of each window; windows of one length are adjacent."""
    places = torch.arange(rows * columns).view(rows, columns)
    windows = [part.flatten() for band in places.split(window, 0) for part in band.split(window, 1)]
    return sorted(windows, key=len, reverse=True)


@lru_cache(maxsize=1024)
def _window_lengths(rows: int, columns: int, window: int) -> tuple[int, ...]:
    return tuple(len(indices) for indices in _windows(rows, columns, window))


@lru_cache(maxsize=1024)
def _by_window(rows: int, columns: int, window: int) -> torch.Tensor:
    return torch.cat(_windows(rows, columns, window))


@lru_cache(maxsize=1024)
def _patch_order(rows: int, columns: int, merge: int, window: int) -> torch.Tensor:
    squares = token_by_token(rows, columns, merge).view(-1, merge**2)  # tokens, patches of each
    return squares[_by_window(rows // merge, columns // merge, window)].flatten()


class Qwen3VisionTransformer(_AxialTransformer):
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

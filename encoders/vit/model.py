"""A vision transformer of Megatron-Core layers: patches + learned positions -> layers -> final norm.

Shape suffixes: N pictures, C channels, P patches, T tokens inside the encoder (patches and class token), H hidden size,
R rows: tokens of all pictures.
"""

import math
from collections.abc import Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from encoders.projectors.merge import merge_patches
from encoders.staged import Size, StagedEncoder
from encoders.vit.positions import interpolate_positions
from encoders.vit.spec import VisionSpec


class VisionTransformer(StagedEncoder):
    """Pictures -> features per patch, joined `merge` x `merge`: what one pipeline stage has of it."""

    spec: VisionSpec

    def forward(
        self,
        pixels: torch.Tensor | Sequence[torch.Tensor] | None = None,
        sizes: Sequence[Size] | None = None,
        hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What this stage makes of the pictures.

        Args:
            pixels: on the first stage: uint8 [N, 3, height, width], or [3, height, width] of each picture.
            sizes: on later stages: (height, width) of each picture.
            hidden_states: on later stages: what the stage before returned.

        Returns:
            Rows of one picture after the other. On the last stage features [N * P / merge^2, H * merge^2]; before it
            the tokens inside the encoder, [R, H].
        """
        if not sizes:
            assert pixels is not None, "the first stage gets pictures, the others their sizes"
            sizes = [(picture.shape[-2], picture.shape[-1]) for picture in pixels]
        return self._run(pixels, sizes, hidden_states)

    def _features(self, hidden_NTH: torch.Tensor, size: Size) -> torch.Tensor:
        """Without class token, and merged."""
        rows, columns = self._grid(size)
        return merge_patches(hidden_NTH[:, -rows * columns :], rows, columns, self.merge)

    def _tokens(self, size: Size) -> int:
        return math.prod(self._grid(size)) + self.spec.class_token

    def _build_embeddings(self) -> None:
        spec, config = self.spec, self.config
        torch.manual_seed(config.init_seed)
        rows, columns = spec.position_grid
        self.patch_embedding = torch.nn.Linear(3 * spec.patch_size**2, spec.hidden_size, dtype=config.params_dtype)
        self.position_embedding = _normal(rows * columns, spec.hidden_size, config)
        self.class_token = _normal(1, spec.hidden_size, config) if spec.class_token else None
        torch.nn.init.normal_(self.patch_embedding.weight, std=spec.init_std)
        torch.nn.init.zeros_(self.patch_embedding.bias)
        self.register_buffer("pixel_mean", _channels(spec.pixel_mean), persistent=False)
        self.register_buffer("pixel_std", _channels(spec.pixel_std), persistent=False)

    def _embed(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pictures of one size, [N, 3, height, width] -> the input of the first layer, [N, T, H]."""
        positions_PH: torch.Tensor = self.position_embedding
        if self._grid(pixels.shape[-2:]) != self.spec.position_grid:
            positions_RCH = positions_PH.unflatten(0, self.spec.position_grid)
            positions_PH = interpolate_positions(positions_RCH, *self._grid(pixels.shape[-2:])).flatten(0, 1)
        hidden_NTH = self.patch_embedding(self._patches(pixels)) + positions_PH
        if self.class_token is not None:
            hidden_NTH = torch.cat([self.class_token.expand(len(pixels), 1, -1), hidden_NTH], dim=1)
        return hidden_NTH

    def _grid(self, size: Sequence[int]) -> tuple[int, int]:
        """(rows, columns) of patches of a picture of `size` pixels, (height, width)."""
        return size[0] // self.spec.patch_size, size[1] // self.spec.patch_size

    def _patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised pixels of each patch, row by row: [N, P, 3 * patch^2]."""
        size = self.spec.patch_size
        values = (pixels.float() / 255 - self.pixel_mean) / self.pixel_std
        patches = values.unfold(2, size, size).unfold(3, size, size)  # N, C, rows, columns, size, size
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return patches.to(self.patch_embedding.weight.dtype)


def _normal(rows: int, width: int, config: TransformerConfig) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(rows, width).mul_(config.init_method_std).to(config.params_dtype))


def _channels(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)

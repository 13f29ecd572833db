"""Vision transformers of Megatron-Core layers: patches + positions -> layers -> final norm.

One class for all families that differ in nothing but what `PictureSpec` names.

Shape suffixes: N pictures, C channels, P patches, T tokens inside the encoder (class token, register tokens, patches),
H hidden size, R rows: tokens of all pictures.
"""

import math
from collections.abc import Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from encoders.drawing import bare_layer, draw_weights, drawn
from encoders.projectors.merge import merge_patches
from encoders.spec import is_tiled
from encoders.staged import Size, StagedEncoder
from encoders.vit.picture import PictureSpec
from encoders.vit.positions import interpolate_positions
from encoders.vit.rotary import rotary_angles
from encoders.vit.tower import TowerSpec


class VisionTransformer(StagedEncoder):
    """Pictures -> features per patch, joined `merge` x `merge`: what one pipeline stage has of it."""

    spec: PictureSpec

    def forward(
        self,
        pixels: torch.Tensor | Sequence[torch.Tensor] | None = None,
        sizes: Sequence[Size] | None = None,
        hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What this stage makes of the pictures.

        Args:
            pixels: on the first stage: uint8 [N, 3, height, width], or [3, height, width] of each picture; of one that
                is cut into tiles [tiles, 3, height, width].
            sizes: on later stages, and of pictures that are cut into tiles on all: (height, width) of each picture.
            hidden_states: on later stages: what the stage before returned.

        Returns:
            Rows of one picture after the other, and of its tiles. On the last stage features [N * P / merge^2, H *
            merge^2]; before it the tokens inside the encoder, [R, H].
        """
        if is_tiled(self.spec):
            assert sizes, "how many tiles a picture has follows from its own size"
            assert isinstance(self.spec, TowerSpec)
            tiles = sum(self.spec.tiling(*size).tiles for size in sizes)
            pixels = None if pixels is None else torch.cat(list(pixels))
            sizes = [(self.spec.image_size, self.spec.image_size)] * tiles
        elif not sizes:
            assert pixels is not None, "the first stage gets pictures, the others their sizes"
            sizes = [(picture.shape[-2], picture.shape[-1]) for picture in pixels]
        return self._run(pixels, sizes, hidden_states)

    def _features(self, hidden_NTH: torch.Tensor, size: Size) -> torch.Tensor:
        """Patches, merged, behind the class token where it is kept."""
        rows, columns = self._grid(size)
        features_NPH = merge_patches(hidden_NTH[:, -rows * columns :], rows, columns, self.merge)
        if self.spec.keep_class_token:
            features_NPH = torch.cat([hidden_NTH[:, :1], features_NPH], dim=1)
        return features_NPH

    def _tokens(self, size: Size) -> int:
        return math.prod(self._grid(size)) + self.spec.leading_tokens

    def _layer_inputs(self, size: Size) -> dict[str, torch.Tensor | None]:
        inputs = super()._layer_inputs(size)
        if self.spec.rotary_positions:
            place = torch.empty(0, device=next(self.parameters()).device)
            inputs["rotary_pos_emb"] = rotary_angles(self.spec, *self._grid(size)).to(place, non_blocking=True)
        return inputs

    def _build_embeddings(self) -> None:
        spec, config = self.spec, self.config
        torch.manual_seed(config.init_seed)
        positions = math.prod(spec.position_grid) + spec.class_position
        options = {"bias": spec.patch_bias, "dtype": config.params_dtype}
        self.patch_embedding = bare_layer(torch.nn.Linear, spec.patch_width, spec.hidden_size, **options)
        rows, dims = (1,) * (spec.embedding_dims - 2), spec.class_token_dims
        hidden, registers = spec.hidden_size, spec.register_tokens
        self.position_embedding = _normal((*rows, positions, hidden), config) if spec.learned_positions else None
        self.class_token = _normal((1,) * (dims - 1) + (hidden,), config) if spec.class_token else None
        self.register_tokens = _normal((*rows, registers, hidden), config) if registers else None
        self.pre_norm = None
        if spec.pre_norm:
            self.pre_norm = torch.nn.LayerNorm(spec.hidden_size, eps=spec.layernorm_epsilon, dtype=config.params_dtype)
        draw_weights(self.patch_embedding, spec.init_std, config)
        # In steps of a pixel's 255 values.
        self.register_buffer("pixel_mean", 255 * _channels(spec.pixel_mean), persistent=False)
        self.register_buffer("pixel_std", 255 * _channels(spec.pixel_std), persistent=False)

    def _embed(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pictures of one size, [N, 3, height, width] -> the input of the first layer, [N, T, H]."""
        hidden_NTH = self.patch_embedding(self._patches(pixels))
        first_NTH = [] if self.class_token is None else [self.class_token.expand(len(pixels), 1, -1)]
        if self.position_embedding is not None:
            rows_H = self.position_embedding.view(-1, self.spec.hidden_size)
            class_position, positions_PH = self._positions(rows_H, self._grid(pixels.shape[-2:]))
            hidden_NTH = hidden_NTH + positions_PH
            first_NTH = [token + class_position for token in first_NTH] if self.spec.class_position else first_NTH
        if self.register_tokens is not None:
            first_NTH.append(self.register_tokens.expand(len(pixels), -1, -1))
        if first_NTH:
            hidden_NTH = torch.cat([*first_NTH, hidden_NTH], dim=1)
        return hidden_NTH if self.pre_norm is None else self.pre_norm(hidden_NTH)

    def _positions(self, rows_H: torch.Tensor, grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(position of the class token, of no rows if it has none; positions of a grid of patches, [P, H]) from all
        that are learned."""
        spec = self.spec
        class_position, positions_PH = rows_H[: spec.class_position], rows_H[spec.class_position :]
        if grid != spec.position_grid:
            positions_RCH = positions_PH.unflatten(0, spec.position_grid)
            positions_PH = interpolate_positions(
                positions_RCH, *grid, spec.position_resize, spec.position_antialias, spec.position_corners
            ).flatten(0, 1)
        return class_position, positions_PH

    def _grid(self, size: Sequence[int]) -> tuple[int, int]:
        """(rows, columns) of patches of a picture of `size` pixels, (height, width)."""
        return size[0] // self.spec.patch_size, size[1] // self.spec.patch_size

    def _patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised pixels of each patch, row by row: [N, P, values of a patch]."""
        size, spec = self.spec.patch_size, self.spec
        values = (pixels.float() - self.pixel_mean) / self.pixel_std
        patches = values.unfold(2, size, size).unfold(3, size, size)  # N, C, rows, columns, size, size
        patches = patches.permute(0, 2, 3, *((4, 5, 1) if spec.channels_last else (1, 4, 5))).flatten(1, 2)
        if spec.patch_frames > 1:  # a still picture: N, P, C, frames, size, size
            patches = patches.unsqueeze(3).expand(-1, -1, -1, spec.patch_frames, -1, -1)
        return patches.flatten(2).to(self.patch_embedding.weight.dtype)


def _normal(shape: tuple[int, ...], config: TransformerConfig) -> torch.nn.Parameter:
    return drawn(shape, config.init_method_std, config)


def _channels(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)

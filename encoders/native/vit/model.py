"""Vision transformers of Megatron-Core layers: patches + positions -> layers -> final norm. One class serves all
families that differ only in the attributes of `PatchSpec`.

Shape suffixes: N images, C channels, P patches of all images, T tokens of one inside the encoder (class token, register
tokens, patches), H hidden size, R rows: tokens of all images.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from encoders.initial_weights import bare_layer, draw_weights, drawn
from encoders.native.vit.patch_spec import PatchSpec
from encoders.native.vit.patches import Grid, gather_patches, token_by_token
from encoders.native.vit.positions import position_taps, relative_angles
from encoders.native.vit.tiles import Tiling
from encoders.native.vit.tower import TowerSpec
from encoders.staged import Size, StagedEncoder, to_device


class VisionTransformer(StagedEncoder):
    """One pipeline stage: images -> features per patch, joined `merge` x `merge`."""

    spec: PatchSpec

    def forward(
        self,
        pixels: torch.Tensor | Sequence[torch.Tensor] | None = None,
        sizes: Sequence[Size] | None = None,
        hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run this stage on the images.

        Args:
            pixels: on the first stage: uint8 [N, 3, height, width], or [3, height, width] of each image, or [tiles, 3,
                height, width] of each image that is cut into tiles. Of a video: the frames of a patch, [frames * 3,
                height, width].
            sizes: (height, width) of each image, on later stages, and with tiles on all.
            hidden_states: on later stages: the output of the previous stage.

        Returns:
            Rows in the order of the images and their tiles. On the last stage features [N * P / merge^2, H * merge^2];
            before it the tokens inside the encoder, [R, H].
        """
        if self.spec.is_tiled:
            assert sizes, "how many tiles an image has follows from its own size"
            assert isinstance(self.spec, TowerSpec)
            tiles = sum(self.spec.tiling(*size).tiles for size in sizes)
            pixels = None if pixels is None else torch.cat(list(pixels))
            sizes = [(self.spec.image_size, self.spec.image_size)] * tiles
        elif not sizes:
            assert pixels is not None, "the first stage gets images, the others their sizes"
            sizes = [(image.shape[-2], image.shape[-1]) for image in pixels]
        return self._run(pixels, sizes, hidden_states)

    def _features(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """Place the patches of each token side by side. A kept class token implies that every patch is a token."""
        return rows_RH.unflatten(0, (-1, self.merge**2)).flatten(1)

    def _tokens(self, size: Size) -> int:
        return math.prod(self._grid(size)) + self.spec.leading_tokens

    def _kept(self, size: Size) -> torch.Tensor | None:
        leading, kept = self.spec.leading_tokens, self.spec.kept_tokens
        if leading == kept:
            return None
        return torch.cat([torch.arange(kept), torch.arange(leading, self._tokens(size))])

    def _layer_inputs(self, sizes: Sequence[Size]) -> dict[str, Any]:
        if not self.spec.rotary_positions:
            return {}
        angles = [self._angles(size).repeat(count, 1) for size, count in Counter(sizes).items()]
        return {"rotary_pos_emb": to_device(torch.cat(angles)[:, None, None], next(self.parameters()).device)}

    def _angles(self, size: Size) -> torch.Tensor:
        """Return the rotary angles of an image's tokens inside the encoder, [T, size of a head]."""
        spec, grid = self.spec, self._grid(size)
        patches = relative_angles(spec.hidden_size // spec.num_attention_heads, spec.rotary_base, *grid)
        return F.pad(patches[self._order(grid)], (0, 0, spec.leading_tokens, 0))

    def _order(self, grid: Grid) -> torch.Tensor:
        """Return the positions (in row order) of a grid's patches, in their order inside the encoder: token by
        token."""
        return token_by_token(*grid, self.merge)

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

    def _embed(self, media: torch.Tensor | Sequence[torch.Tensor], sizes: Sequence[Size]) -> torch.Tensor:
        """Embed images as the input of the first layer, [R, H]. Images of one size are adjacent."""
        grids = Counter(map(self._grid, sizes))
        assert len(grids) == len(set(sizes)), "images of one grid are neighbours"
        hidden_PH = self.patch_embedding(self._patches(media, grids))
        class_H: torch.Tensor | None = self.class_token
        if self.position_embedding is not None:
            learned_H = self.position_embedding.view(-1, self.spec.hidden_size)
            if self.spec.class_position:
                assert class_H is not None, "the first position is that of a class token"
                class_H, learned_H = class_H + learned_H[0], learned_H[1:]
            hidden_PH = hidden_PH + self._positions(learned_H, grids)
        leading = [
            tokens.view(-1, self.spec.hidden_size) for tokens in (class_H, self.register_tokens) if tokens is not None
        ]
        if leading:
            each = torch.cat(leading).expand(len(sizes), -1, -1)
            patches = hidden_PH.split([math.prod(grid) for grid in grids.elements()])
            hidden_PH = torch.cat([part for image in zip(each.unbind(), patches, strict=True) for part in image])
        return hidden_PH if self.pre_norm is None else self.pre_norm(hidden_PH)

    def _positions(self, learned_H: torch.Tensor, grids: Counter[Grid]) -> torch.Tensor:
        """Return the positions of the patches of all images, [P, H], interpolated from the learned grid. `grids` counts
        the images of each grid."""
        spec = self.spec
        options = (spec.position_grid, spec.position_resize, spec.position_antialias, spec.position_corners)
        places, weights, counts = [], [], []
        for grid, count in grids.items():
            taps, order = position_taps(*grid, *options), self._order(grid)
            places.append(taps.places[order].flatten().repeat(count))
            weights.append(taps.weights[order].flatten().repeat(count))
            counts.append(torch.full((len(order) * count,), taps.places.size(1)))
        ends = torch.cat(counts).cumsum(0)
        device = learned_H.device
        # Its gradient is deterministic, unlike that of torch's interpolation on CUDA.
        positions_PH = F.embedding_bag(
            to_device(torch.cat(places), device),
            learned_H.float(),
            to_device(ends - torch.cat(counts), device),
            mode="sum",
            per_sample_weights=to_device(torch.cat(weights), device),
        )
        return positions_PH.to(learned_H.dtype)

    def _grid(self, size: Sequence[int]) -> Grid:
        return size[0] // self.spec.patch_size, size[1] // self.spec.patch_size

    def _patches(self, media: torch.Tensor | Sequence[torch.Tensor], grids: Counter[Grid]) -> torch.Tensor:
        """Return the normalized pixels of each patch, [P, values of a patch], in the order inside the encoder."""
        spec = self.spec
        if not isinstance(media, torch.Tensor) and len({len(image) for image in media}) > 1:  # images next to videos
            media = [image.repeat(spec.patch_frames, 1, 1) if len(image) == 3 else image for image in media]
        values_PCAA = gather_patches(media, grids, {grid: self._order(grid) for grid in grids}, spec.patch_size)
        values_PFCAA = (values_PCAA.unflatten(1, (-1, 3)).float() - self.pixel_mean) / self.pixel_std
        values_PCFAA = values_PFCAA.transpose(1, 2).expand(-1, -1, spec.patch_frames, -1, -1)  # a still image repeats
        if spec.channels_last:
            values_PCFAA = values_PCFAA.permute(0, 2, 3, 4, 1)
        return values_PCFAA.flatten(1).to(self.patch_embedding.weight.dtype)


def _normal(shape: tuple[int, ...], config: TransformerConfig) -> torch.nn.Parameter:
    return drawn(shape, config.init_method_std, config)


def _channels(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)


def lines_of_tiles(features: torch.Tensor, tilings: Sequence[Tiling], newline: torch.Tensor) -> torch.Tensor:
    """Arrange the features of tiled images as lines.

    Args:
        features: [rows, H], image by image: first of the whole image's tile, then of the other tiles in row order, each
            [side^2, H]. Of a video: frame by frame.
        tilings: tiling of each image.
        newline: the row after a line, [H].

    Returns:
        [sum of `Tiling.tokens`, H], in the order of the images.
    """
    images = features.split([item.tiles * item.side**2 for item in tilings])
    newline = newline.to(features.dtype)
    return torch.cat([_lines_of_image(rows, tiling, newline) for rows, tiling in zip(images, tilings, strict=True)])


def _lines_of_image(rows: torch.Tensor, tiling: Tiling, newline: torch.Tensor) -> torch.Tensor:
    if tiling.frames:
        frames_FPH = rows.unflatten(0, (tiling.frames, tiling.side**2))
        return torch.cat([_pooled(frames_FPH, tiling, (tiling.side, tiling.side)), newline[None]])
    thumbnail, tiles = rows.split([tiling.side**2, len(rows) - tiling.side**2])
    if not tiling.rows:
        return torch.cat([thumbnail, newline[None]])
    canvas = tiles.view(tiling.rows, tiling.columns, tiling.side, tiling.side, -1).transpose(1, 2)
    canvas_RCH = canvas.reshape(tiling.rows * tiling.side, tiling.columns * tiling.side, -1)
    inner = tiling.inner
    lines_RCH = canvas_RCH[tiling.top : tiling.top + inner[0], tiling.left : tiling.left + inner[1]]
    if tiling.pooled:
        lines_RCH = _pooled(lines_RCH.flatten(0, 1)[None], tiling, inner).unflatten(0, tiling.pooled)
    ends = newline.expand(len(lines_RCH), 1, -1)
    return torch.cat([thumbnail, torch.cat([lines_RCH, ends], dim=1).flatten(0, 1)])


def _pooled(grids_GPH: torch.Tensor, tiling: Tiling, grid: Grid) -> torch.Tensor:
    """Return features of `grid` (rows, columns), [grids, rows * columns, H], averaged to those of `Tiling.pooled`,
    [grids * its rows * its columns, H]."""
    assert tiling.pooled is not None
    # Not torch's interpolation, whose gradient is not deterministic on CUDA.
    taps = position_taps(*tiling.pooled, grid, "bilinear")
    places, weights = (to_device(part, grids_GPH.device) for part in taps)
    firsts = torch.arange(len(grids_GPH), device=places.device)[:, None, None] * grids_GPH.size(1)
    places, weights = (places + firsts).flatten(0, 1), weights.repeat(len(grids_GPH), 1)
    values = grids_GPH.flatten(0, 1).float()
    return F.embedding_bag(places, values, mode="sum", per_sample_weights=weights).to(grids_GPH.dtype)

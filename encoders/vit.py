"""A vision transformer of Megatron-Core layers: patches + learned positions -> layers -> final norm.

In several pipeline stages, patches and positions are on the first and the final norm is on the last. Between stages
travels a packed tensor: the tokens of all pictures, one picture after the other.

Shape suffixes: N pictures, C channels, P patches, T tokens inside the encoder (patches and class token), H hidden size,
R rows: tokens of all pictures.
"""

import math
from collections.abc import Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from encoders.merge import merge_patches
from encoders.positions import interpolate_positions
from encoders.spec import VisionSpec


class VisionTransformer(MegatronModule):
    """Pictures -> features per patch, joined `merge` x `merge`: what one pipeline stage has of it.

    Args:
        config: sizes and parallelism of the layers; `config.init_seed` seeds the weights outside of the layers.
        spec: sizes of the picture and patches, normalisation of pixels.
        layer_spec: spec of one transformer layer.
        norm: builder of the final norm.
        merge: side of the square of patches that becomes one output token.
        pg_collection: process groups of this module; `pp` tells the stage.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: VisionSpec,
        layer_spec: ModuleSpec,
        norm: type,
        merge: int,
        pg_collection: ProcessGroupCollection,
    ):
        super().__init__(config=config)
        self.spec, self.merge, self.tp_group = spec, merge, pg_collection.tp
        stage, stages = pg_collection.pp.rank(), pg_collection.pp.size()
        self.is_first_stage, self.is_last_stage = stage == 0, stage == stages - 1
        if self.is_first_stage:
            self._build_embeddings()
        layers = get_num_layers_to_build(config, vp_stage=None, pp_rank=stage)
        self.layers = TransformerBlock(
            config=config,
            spec=TransformerBlockSubmodules(layer_specs=[layer_spec] * layers, layer_norm=norm),
            pre_process=True,  # its input is handed over as an argument, on every stage
            post_process=self.is_last_stage,
            pg_collection=pg_collection,
        )

    def forward(
        self,
        pixels: torch.Tensor | Sequence[torch.Tensor] | None = None,
        sizes: Sequence[tuple[int, int]] | None = None,
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
        if sizes is None:
            sizes = [tuple(picture.shape[-2:]) for picture in pixels]
        groups = _by_size(sizes)
        if len(groups) == 1:
            (size,) = groups
            together = pixels if self.is_first_stage else hidden_states.unflatten(0, (len(sizes), -1))
            return self._stage(_stacked(together), size).flatten(0, 1)
        tokens = [math.prod(self._grid(size)) + self.spec.class_token for size in sizes]
        pictures = pixels if self.is_first_stage else hidden_states.split(tokens)
        outputs: list[torch.Tensor | None] = [None] * len(sizes)
        for size, members in groups.items():
            together = _stacked([pictures[member] for member in members])
            for member, output in zip(members, self._stage(together, size), strict=True):
                outputs[member] = output
        return torch.cat(outputs)

    def _stage(self, inputs: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Pictures of one size through this stage: pixels [N, 3, height, width] or hidden states [N, T, H] -> what they
        hand on, [N, rows, width]; on the last stage without class token, and merged."""
        hidden_NTH = self._embed(inputs) if self.is_first_stage else inputs
        hidden_NTH = self._run_layers(hidden_NTH.transpose(0, 1).contiguous()).transpose(0, 1)
        if not self.is_last_stage:
            return hidden_NTH
        rows, columns = self._grid(size)
        return merge_patches(hidden_NTH[:, -rows * columns :], rows, columns, self.merge)

    def _run_layers(self, hidden_TNH: torch.Tensor) -> torch.Tensor:
        """The layers of this stage. With sequence parallelism they see T / tp tokens of every picture on each rank; all
        else, here and between stages, is whole on every rank."""
        if not self.config.sequence_parallel:
            return self.layers(hidden_TNH, attention_mask=None)
        own = scatter_to_sequence_parallel_region(hidden_TNH, group=self.tp_group)
        # The gradient of what follows is whole on every rank too: each takes its part of it, nothing is summed.
        return gather_from_sequence_parallel_region(
            self.layers(own, attention_mask=None), tensor_parallel_output_grad=False, group=self.tp_group
        )

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
        positions_PH = self.position_embedding
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


def _by_size(sizes: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
    """Numbers of the pictures of each size, in the order in which sizes appear."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, size in enumerate(sizes):
        groups.setdefault(tuple(size), []).append(number)
    return groups


def _stacked(pictures: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    return pictures if isinstance(pictures, torch.Tensor) else torch.stack(list(pictures))


def _normal(rows: int, width: int, config: TransformerConfig) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(rows, width).mul_(config.init_method_std).to(config.params_dtype))


def _channels(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)

"""A vision transformer of Megatron-Core layers: patches + learned positions -> layers -> final norm.

Shape suffixes: N pictures, C channels, P patches, T tokens inside the encoder (patches and class token), H hidden size.
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from encoders.merge import merge_patches
from encoders.spec import VisionSpec


class VisionTransformer(MegatronModule):
    """Pictures of one size -> features per patch, joined `merge` x `merge`.

    Args:
        config: sizes and parallelism of the layers; `config.init_seed` seeds the weights outside of the layers.
        spec: sizes of the picture and patches, normalisation of pixels.
        layer_spec: spec of one transformer layer.
        norm: builder of the final norm.
        merge: side of the square of patches that becomes one output token.
        pg_collection: process groups of this module.
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
        self.spec, self.merge = spec, merge
        torch.manual_seed(config.init_seed)
        rows, columns = spec.grid(spec.image_size, spec.image_size)
        self.patch_embedding = torch.nn.Linear(3 * spec.patch_size**2, spec.hidden_size, dtype=config.params_dtype)
        self.position_embedding = _normal(rows * columns, spec.hidden_size, config)
        self.class_token = _normal(1, spec.hidden_size, config) if spec.class_token else None
        torch.nn.init.normal_(self.patch_embedding.weight, std=spec.init_std)
        torch.nn.init.zeros_(self.patch_embedding.bias)
        self.layers = TransformerBlock(
            config=config,
            spec=TransformerBlockSubmodules(layer_specs=[layer_spec] * spec.num_layers, layer_norm=norm),
            pre_process=True,
            post_process=True,
            pg_collection=pg_collection,
        )
        self.register_buffer("pixel_mean", _channels(spec.pixel_mean), persistent=False)
        self.register_buffer("pixel_std", _channels(spec.pixel_std), persistent=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 pixels [N, 3, height, width] -> features [N, P / merge^2, H * merge^2]."""
        patches_NPC = self._patches(pixels)
        hidden_NTH = self.patch_embedding(patches_NPC) + self.position_embedding
        if self.class_token is not None:
            hidden_NTH = torch.cat([self.class_token.expand(len(pixels), 1, -1), hidden_NTH], dim=1)
        hidden_TNH = self.layers(hidden_NTH.transpose(0, 1).contiguous(), attention_mask=None)
        features_NPH = hidden_TNH.transpose(0, 1)[:, -patches_NPC.size(1) :]
        return merge_patches(features_NPH, *self.spec.grid(*pixels.shape[-2:]), self.merge)

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

"""The projector of an encoder: Megatron-Core's, with the spec's norm, resampler or learned rows."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from encoders.initial_weights import drawn
from encoders.native.vit.tiles import Tiling
from encoders.projectors.merge import lines_of_tiles
from encoders.projectors.resampler import PerceiverResampler
from encoders.projectors.spec import ProjectorSpec
from mimo_train.config.parts import PARTS
from mimo_train.models.lora.adapters import add_adapters
from mimo_train.models.transformer_config import require_neutral

_NOT_RESAMPLED = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "qk_layernorm": False,
    "softmax_scale": None,
    "window_size": None,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "sequence_parallel": False,
}
"""Layer options that a resampler's layers do not support."""


class Projector(MultimodalProjector):
    """`MultimodalProjector` seeded by `config.init_seed`, with its adapters in `config.adapters`. `norm` builds a
    norm."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: ProjectorSpec,
        resampler_config: TransformerConfig,
        norm: type,
        input_size: int,
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ):
        torch.manual_seed(config.init_seed + 1)
        super().__init__(config, input_size=input_size, pg_collection=pg_collection, **kwargs)
        add_adapters(self, PARTS["projector"].replace("*", "0"), config, config.init_seed + 1)
        self.norm = norm(config, input_size, spec.norm_epsilon) if spec.norm else None
        self.resampler = None
        if spec.latents:
            torch.manual_seed(config.init_seed + 2)
            self.resampler = resampler(resampler_config, spec.latents, norm, pg_collection.tp)
        self.newline = None
        if spec.newline:
            torch.manual_seed(config.init_seed + 3)
            self.newline = drawn((config.hidden_size,), config.hidden_size**-0.5, config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        counts: Sequence[int] | None = None,
        tilings: Sequence[Tiling] | None = None,
    ) -> torch.Tensor:
        """Project features to the language model's width.

        Args:
            hidden_states: joined features, rows of one media item after the other, [rows, width].
            counts: rows of each media item; only a resampler needs them.
            tilings: tiling of each image; only needed with a newline.

        Returns:
            [rows, language model's hidden size]: with a resampler the latents of every media item, with a newline the
            lines of every image.
        """
        features = hidden_states if self.norm is None else self.norm(hidden_states)
        projected = super().forward(features)
        if self.newline is not None:
            assert tilings is not None, "images that are cut into tiles have sizes"
            return lines_of_tiles(projected, tilings, self.newline)
        if self.resampler is None:
            return projected
        assert counts is not None and sum(counts) == len(projected), (counts, projected.shape)
        return self.resampler(projected, counts)


def resampler(
    config: TransformerConfig, latents: int, norm: type, tp_group: torch.distributed.ProcessGroup
) -> PerceiverResampler:
    """Return a resampler; arguments as in `PerceiverResampler`. Raise UserError for a config option that its layers do
    not support."""
    require_neutral("PerceiverResampler", config, **_NOT_RESAMPLED)
    return PerceiverResampler(config, latents, norm, tp_group)

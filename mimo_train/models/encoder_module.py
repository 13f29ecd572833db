"""An encoder and its projector as one module of a `MimoModel`, in one or several pipeline stages."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from data.collate import collate_media
from data.samples.protocol import MEDIA, ItemFeatures, MicrobatchMedia
from encoders.initial_weights import drawn
from encoders.native.vit.model import lines_of_tiles
from encoders.native.vit.tiles import Tiling
from encoders.projectors.resampler import PerceiverResampler
from encoders.projectors.spec import ProjectorSpec
from mimo_train.config.parts import PARTS
from mimo_train.models.lora.adapters import add_adapters
from mimo_train.parallel import device
from mimo_train.parallel.device import to_device


class StagedModality(VisionModalitySubmodules):
    """`VisionModalitySubmodules` whose encoder runs on every one of its pipeline stages. Megatron-Core 0.19.2 only
    projects the input of a later stage (mimo/submodules/base.py, `forward`)."""

    def forward(
        self, encoder_inputs: dict[str, Any] | None = None, hidden_states: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Run one stage over the media of a microbatch.

        Args:
            encoder_inputs: {encoder: arguments of its `forward`}; None if the microbatch has no media.
            hidden_states: output of the previous stage, [rows, encoder's hidden size]; None on the first stage.

        Returns:
            [rows, encoder's hidden size], with no rows without media. On the last stage [rows, language model's hidden
            size], None without media.
        """
        ((name, encoder),) = self.encoders.items()
        if encoder_inputs is None:
            if self.is_last_stage:
                return None
            dtype, width = encoder.config.pipeline_dtype, encoder.config.hidden_size
            return torch.empty(0, width, dtype=dtype, device=device.current(), requires_grad=True)
        if not self.is_first_stage:
            encoder_inputs = {name: encoder_inputs[name] | {"hidden_states": hidden_states}}
        outputs = self.encode(encoder_inputs)
        if not self.is_last_stage:
            return outputs[0]
        if not self.input_projections:  # projector.kind none
            return self.combine_embeddings(outputs)
        (projector,) = self.input_projections
        if getattr(projector, "newline", None) is not None:
            tilings = [encoder.spec.tiling(*size) for size in encoder_inputs[name]["sizes"]]
            return projector(self.combine_embeddings(outputs), tilings=tilings)
        if getattr(projector, "resampler", None) is None:
            return self.project_embeddings(outputs)
        return projector(self.combine_embeddings(outputs), _features_of_each(encoder, encoder_inputs[name]))

    def project_embeddings(self, embeddings: list[torch.Tensor], is_input: bool = True) -> torch.Tensor | None:
        """Return the projector's output. The features for layers of the language model, if any, follow it in each
        row."""
        (encoder,) = self.encoders.values()
        layers = len(encoder.spec.deepstack) if hasattr(encoder, "spec") else 0
        if not layers:
            return super().project_embeddings(embeddings, is_input)
        (rows,) = embeddings
        width = layers * encoder.spec.deepstack_width
        projected = super().project_embeddings([rows[:, :-width]], is_input)
        assert projected is not None, "every encoder has a projector"
        return torch.cat([projected, rows[:, -width:].to(projected.dtype)], dim=1)


def _features_of_each(encoder: Any, inputs: dict[str, Any]) -> list[int]:
    """Return the number of features of each media item. The first stage gets media, later stages sizes."""
    spec, (media, *_) = encoder.spec, inputs.values()
    sizes = inputs.get("sizes")
    if sizes is None:
        image = spec.kind == "image"
        sizes = [tuple(item.shape[-2:]) if image else (len(item), spec.sample_rate) for item in media]
    return [spec.num_tokens(*size, merge=encoder.merge) for size in sizes]


class EncoderModule(StagedModality):
    """`StagedModality` with cached or prefetched features.

    If its inputs include a `MicrobatchMedia`, the encoder is frozen and runs only for items without features.

    Attributes:
        cache: `FeatureCache` that stores computed features; None if there is no cache, or another rank of the
            tensor-parallel group writes.
        cached: True if this tensor-parallel group looks up features.
    """

    cache: Any = None
    cached: bool = False

    def encode(self, encoders_data_batch: dict[str, Any]) -> list[torch.Tensor]:
        """Return features before the projector, [rows, width], from {encoder: its arguments}."""
        (name,) = self.encoders
        inputs = dict(encoders_data_batch[name])
        media: MicrobatchMedia | None = inputs.pop(MEDIA, None)
        if media is None:
            return super().encode(encoders_data_batch)
        features, media.ahead = media.ahead, None
        return [self._features(name, inputs, media) if features is None else features]

    def encode_ahead(self, microbatches: Sequence[dict[str, Any]]) -> None:
        """Compute the features of later microbatches in one pass, and leave them in their `MicrobatchMedia`.
        `microbatches`: {encoder: its arguments} of each, on the host."""
        (name,) = self.encoders
        media: list[MicrobatchMedia] = [inputs[name][MEDIA] for inputs in microbatches]
        inputs: dict[str, Any] = {}
        for field in dict.fromkeys(field for of_microbatch in microbatches for field in of_microbatch[name]):
            if field != MEDIA:
                values = [value for each in microbatches for value in each[name].get(field, ())]
                inputs |= collate_media(values, field) or {}
        together = MicrobatchMedia(tuple(item for each in media for item in each.items), media[0].read)
        features = self._features(name, to_device(inputs, self._device), together)
        of_each = features.split([sum(item.rows for item in each.items) for each in media])
        for of_microbatch, rows in zip(media, of_each, strict=True):
            of_microbatch.ahead = rows

    @torch.no_grad()
    def _features(self, name: str, inputs: dict[str, Any], media: MicrobatchMedia) -> torch.Tensor:
        has_features = self._known_everywhere(media.items)
        missing = [item for item, is_present in zip(media.items, has_features, strict=True) if not is_present]
        if any(item.features is not None for item in missing):
            # Another rank of the group lacks features that this rank has: read the media that were skipped.
            inputs = to_device(media.read(missing), self._device)
        computed: Iterator[torch.Tensor] = iter(())
        if missing:
            (rows,) = super().encode({name: inputs})
            computed = iter(rows.split([item.rows for item in missing]))
        parts = []
        for item, is_present in zip(media.items, has_features, strict=True):
            if is_present:
                assert item.features is not None, item.identity
                parts.append(to_device(item.features, self._device))
                continue
            parts.append(next(computed))
            if self.cache is not None and item.is_good:
                self.cache.write(item.identity, parts[-1])
        return torch.cat(parts)

    def _known_everywhere(self, items: Sequence[ItemFeatures]) -> list[bool]:
        """Return for each item if every rank of the tensor-parallel group has its features, since the ranks must run
        the encoder together. One message, if there are several ranks and a cache."""
        has_features = [item.features is not None for item in items]
        if not self.cached or self.pg_collection.tp.size() == 1:
            return has_features
        agreed = torch.tensor(has_features, dtype=torch.int32, device=self._device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self.pg_collection.tp)
        return [bool(value) for value in agreed.tolist()]

    @property
    def _device(self) -> torch.device:
        return next(self.parameters()).device


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
            self.resampler = PerceiverResampler(resampler_config, spec.latents, norm, pg_collection.tp)
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

"""An encoder with its projector, whose features may come from a cache or be prefetched."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from data.pipeline import MEDIA, MicrobatchMedia, SampleMedia
from mimo_train.models.modality import StagedModality
from mimo_train.parallel.device import to_device


class FeatureStore(Protocol):
    """Where computed features are kept (`mimo_train.training.step.feature_cache.FeatureCache`)."""

    def write(self, key: str, features: torch.Tensor) -> None:
        """Store the features of a sample under its identity."""


class EncoderModule(StagedModality):
    """`StagedModality` with cached or prefetched features. If its inputs include a `MicrobatchMedia`, the encoder is
    frozen and runs only for samples whose features are missing.

    Attributes:
        cache: stores computed features; None if there is no cache, or another rank of the tensor-parallel group writes.
        cached: whether features of samples are looked up, on this rank and all others of its tensor-parallel group.
    """

    cache: FeatureStore | None = None
    cached: bool = False

    def encode(self, encoders_data_batch: dict[str, Any]) -> list[torch.Tensor]:
        """Features before the projector, [rows, width], from the encoder's arguments by its name."""
        (name,) = self.encoders
        inputs = dict(encoders_data_batch[name])
        media: MicrobatchMedia | None = inputs.pop(MEDIA, None)
        if media is None:
            return super().encode(encoders_data_batch)
        features, media.ahead = media.ahead, None
        return [self._features(name, inputs, media) if features is None else features]

    def encode_ahead(self, encoders_data_batch: dict[str, Any]) -> None:
        """Compute the features of a microbatch that comes later and leave them in its `MicrobatchMedia`."""
        (name,) = self.encoders
        inputs = dict(encoders_data_batch[name])
        media: MicrobatchMedia = inputs.pop(MEDIA)
        media.ahead = self._features(name, inputs, media)

    @torch.no_grad()
    def _features(self, name: str, inputs: dict[str, Any], media: MicrobatchMedia) -> torch.Tensor:
        known = self._known_everywhere(media.samples)
        missing = [sample for sample, is_known in zip(media.samples, known, strict=True) if not is_known]
        if any(sample.features is not None for sample in missing):
            # Found here but not on another rank of the group: read the media that were skipped.
            inputs = to_device(media.read([sample.number for sample in missing]), self._device)
        computed: Iterator[torch.Tensor] = iter(())
        if missing:
            (rows,) = super().encode({name: inputs})
            computed = iter(rows.split([sample.rows for sample in missing]))
        parts = []
        for sample, is_known in zip(media.samples, known, strict=True):
            if is_known:
                assert sample.features is not None, sample.number
                parts.append(to_device(sample.features, self._device))
                continue
            parts.append(next(computed))
            if self.cache is not None and sample.good:
                self.cache.write(sample.identity, parts[-1])
        return torch.cat(parts)

    def _known_everywhere(self, samples: Sequence[SampleMedia]) -> list[bool]:
        """For each sample, whether every rank of the tensor-parallel group has its features: the ranks must run the
        encoder's layers together. One message, if there are several ranks and a cache."""
        known = [sample.features is not None for sample in samples]
        if not self.cached or self.pg_collection.tp.size() == 1:
            return known
        agreed = torch.tensor(known, dtype=torch.int32, device=self._device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self.pg_collection.tp)
        return [bool(one) for one in agreed.tolist()]

    @property
    def _device(self) -> torch.device:
        return next(self.parameters()).device

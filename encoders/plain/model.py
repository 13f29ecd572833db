"""A plain torch module as an encoder of a run, built from its spec. It gets media of one size together. Shape suffixes:
N media of one size, T features of one of them, H width of the features."""

import warnings
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from encoders.errors import EncoderError
from encoders.native.vit.patches import merge_patches
from encoders.plain.spec import AudioSpec, ImageSpec, PlainSpec
from encoders.staged import Size, by_size, stacked

LARGEST_MISCOUNT = 0.1
"""Relative error of `PlainSpec.num_parameters` that causes a warning."""


class PlainEncoder(MegatronModule):
    """Media -> features by a torch module, which is whole on every rank: data parallel only.

    The module is built as `MODULE(spec)` after the generator is seeded by `config.init_seed`. Its weights are the same
    on every rank and at every layout. It may have a method `load_weights()`, see `load_weights`.

    Args: as `encoders.staged.StagedEncoder`; layer spec, norm and process groups are unused.

    Raises:
        EncoderError: it has batch norms, or dropout that its spec does not name.
    """

    MODULE: ClassVar[type[torch.nn.Module]]

    def __init__(
        self,
        config: TransformerConfig,
        spec: PlainSpec,
        layer_spec: ModuleSpec,
        norm: type,
        merge: int,
        pg_collection: ProcessGroupCollection,
    ):
        super().__init__(config=config)
        self.spec, self.merge = spec, merge
        self.recomputes = config.recompute_granularity == "full"
        torch.manual_seed(config.init_seed)
        self.model = self.MODULE(spec).train()
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(config.params_dtype)
        self._refuse_batch_norms()
        self._compare_with_spec()
        if isinstance(spec, ImageSpec):
            self.register_buffer("pixel_mean", _channels(spec.pixel_mean), persistent=False)
            self.register_buffer("pixel_std", _channels(spec.pixel_std), persistent=False)

    def forward(
        self,
        pixels: torch.Tensor | Sequence[torch.Tensor] | None = None,
        waveforms: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the features of images or audio.

        Args:
            pixels: uint8 [N, 3, height, width], or [3, height, width] of each image.
            waveforms: float32 [N, samples], or [samples] of each audio item.

        Returns:
            Rows in the order of the media, with adjacent features joined: [rows, H * `joined`].

        Raises:
            EncoderError: the module's features have another number or width than its spec says.
        """
        media = waveforms if pixels is None else pixels
        assert media is not None, "a plain encoder has one stage, which gets media"
        groups = by_size([self._size(medium) for medium in media])
        if len(groups) == 1:
            (size,) = groups
            return self._features(stacked(media), size).flatten(0, 1)
        outputs: dict[int, torch.Tensor] = {}
        for size, members in groups.items():
            together = stacked([media[member] for member in members])
            outputs |= zip(members, self._features(together, size), strict=True)
        return torch.cat([outputs[member] for member in range(len(media))])

    def load_weights(self) -> None:
        """Call the module's `load_weights()`, if any: at the start of a run on every rank that holds it, unless weights
        come from a checkpoint. Every rank must load the same weights."""
        load = getattr(self.model, "load_weights", None)
        if load is not None:
            with torch.no_grad():
                load()

    def _size(self, medium: torch.Tensor) -> Size:
        if isinstance(self.spec, AudioSpec):
            return len(medium), self.spec.sample_rate
        return medium.shape[-2], medium.shape[-1]

    def _features(self, media: torch.Tensor, size: Size) -> torch.Tensor:
        """Return the joined features of media of one size, [N, T / joined, H * joined]."""
        inputs, spec = self._inputs(media), self.spec
        if self.recomputes and torch.is_grad_enabled():
            features_NTH = checkpoint(self.model, inputs, use_reentrant=False)
        else:
            features_NTH = self.model(inputs)
        expected = (len(media), spec.output_tokens(*size), spec.hidden_size)
        shape = tuple(features_NTH.shape) if isinstance(features_NTH, torch.Tensor) else type(features_NTH).__name__
        if shape != expected:
            raise EncoderError(
                f"encoder.family {spec.family}: {type(self.model).__name__} gives {shape} for {len(media)} "
                f"{spec.medium}(s) of {size}, and its spec says {expected}: number, features of each, "
                "encoder.hidden_size; change one of the two"
            )
        if isinstance(spec, ImageSpec):
            return merge_patches(features_NTH, *spec.grid(*size), self.merge)
        return features_NTH.unflatten(1, (-1, self.merge)).flatten(2)

    def _inputs(self, media: torch.Tensor) -> torch.Tensor:
        """Return the module's input in the type of its weights. Pixels are normalized in float32 first. A module with
        the attribute `wants_float32` gets float32."""
        values = media.float()
        if isinstance(self.spec, ImageSpec):
            values = (values * self.spec.pixel_scale - self.pixel_mean) / self.pixel_std
        return values if getattr(self.model, "wants_float32", False) else values.to(self.config.params_dtype)

    def _refuse_batch_norms(self) -> None:
        norms = [name for name, module in self.model.named_modules() if isinstance(module, _BatchNorm)]
        if norms:
            raise EncoderError(
                f"encoder.family {self.spec.family}: {len(norms)} batch norms, for example {norms[0]}: their numbers "
                "depend on which media a rank gets together, so on the layout; use another norm, such as GroupNorm, or "
                "torchvision.ops.FrozenBatchNorm2d"
            )

    def _compare_with_spec(self) -> None:
        spec, counted = self.spec, sum(parameter.numel() for parameter in self.model.parameters())
        rate = max((rate for _, rate in dropout_rates(self.model)), default=0.0)
        if rate > spec.dropout:
            raise EncoderError(
                f"encoder.dropout is {spec.dropout:g}, and {type(self.model).__name__} has dropout of {rate:g}: the "
                "run relies on the key (feature cache, ranks that share modules); set it to the largest rate, or "
                "take the dropout out"
            )
        if abs(spec.num_parameters() - counted) > LARGEST_MISCOUNT * max(counted, 1):
            warnings.warn(
                f"encoder.family {spec.family}: num_parameters() of its spec says {spec.num_parameters()}, and "
                f"{type(self.model).__name__} has {counted}: estimates of memory and FLOPs are wrong",
                stacklevel=2,
            )


def plain_encoder(module: type[torch.nn.Module]) -> type[PlainEncoder]:
    """Return the class of encoders that run `module`."""
    return type(module.__name__, (PlainEncoder,), {"MODULE": module})


def dropout_rates(module: torch.nn.Module) -> Iterator[tuple[str, float]]:
    """Yield (name, probability) of torch's dropout modules in `module`; other dropout is not seen."""
    for name, child in module.named_modules():
        if isinstance(child, _DropoutNd):
            yield name, child.p


def _channels(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)

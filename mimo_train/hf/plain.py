"""Encoders that are models of `transformers` as they are, written as directories that it reads again."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from encoders.pretrained import RESAMPLE
from encoders.transformers.spec import TransformersAudioSpec, TransformersSpec
from mimo_train.hf.parts import ENCODER

_PREFIXED = ("clip_vision_model", "siglip_vision_model")
"""Types whose names version 4 of `transformers` knows with `vision_model.` in front; version 5 reads both."""


@dataclass(frozen=True)
class PlainModel:
    """An encoder as `transformers` has it."""

    begins: str
    """What the names of its tensors begin with in the module."""
    preprocessor: dict[str, Any]
    """preprocessor_config.json: what training does with media."""
    rename: Callable[[MegatronModule, dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    """See `documents.Whole.rename`."""


def plain_model(name: str, spec: Any) -> PlainModel | None:
    """Return how an encoder is written that is a whole model of `transformers`; None for any other, and for a part of
    one such as Whisper's encoder.

    Args:
        name: of its module.
    """
    if isinstance(spec, TransformersSpec):
        preprocessor = _of_pictures(spec)
    elif isinstance(spec, TransformersAudioSpec) and not spec.is_whisper:
        preprocessor = _of_clips(spec)
    else:
        return None
    begins = f"{ENCODER}{name}.model.model."
    prefix = "vision_model." if spec.model_config["model_type"] in _PREFIXED else ""
    return PlainModel(begins, preprocessor, partial(_hub_state, begins, prefix))


def _hub_state(
    begins: str, prefix: str, module: MegatronModule, state: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of an encoder by the names that hubs have, from those in the memory of version 5."""
    from transformers.core_model_loading import revert_weight_conversion

    state = revert_weight_conversion(module.get_submodule(begins.removesuffix(".")), state)
    return {prefix + name.removeprefix(prefix): value for name, value in state.items()}


def _of_pictures(spec: TransformersSpec) -> dict[str, Any]:
    side = {"height": spec.image_size, "width": spec.image_size}
    return {
        "image_processor_type": f"{'Siglip' if spec.transform.rounded else 'DINOv3ViT'}ImageProcessorFast",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": side,
        "resample": {ours: theirs for theirs, ours in RESAMPLE.items()}[spec.interpolation],
        "do_rescale": True,
        "rescale_factor": spec.pixel_scale,
        "do_normalize": True,
        "image_mean": list(spec.pixel_mean),
        "image_std": list(spec.pixel_std),
    }


def _of_clips(spec: TransformersAudioSpec) -> dict[str, Any]:
    return {
        "feature_extractor_type": "Wav2Vec2FeatureExtractor",
        "feature_size": 1,
        "sampling_rate": spec.sample_rate,
        "padding_value": 0.0,
        "do_normalize": bool(spec.normalize),
        "return_attention_mask": False,
    }

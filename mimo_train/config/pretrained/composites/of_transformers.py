"""Any other model of several parts of `transformers`: its media half as it is, and a known language model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.text_format import listed
from encoders.errors import EncoderError
from encoders.weight_map import Rows, Rule, Spelling, WeightMap
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.composites.base import Composite
from mimo_train.config.pretrained.hub import tensors_of

if TYPE_CHECKING:
    from encoders.transformers_media.directory import Tensors

PROJECTOR = {"kind": "none", "merge": 1}
"""The media half has its own projector."""
SIZES = ((100, 60), (200, 320))
"""Images of which positions are compared, (height, width)."""
SHOWN = 5
"""Most tensors named in a message."""
FAMILIES = {"image": "media_images", "audio": "media_audio"}
"""Encoder families by the kind of media."""


@dataclass(frozen=True)
class OfTransformers(Composite):
    """A model whose media half is the class of `transformers`. It is imported when the directory is read."""

    folder: str = ""

    def part(self, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """See `Composite.part`. Raise EncoderError if transformers cannot build the model."""
        from encoders.transformers_media.directory import bidirectional_of, hf_config, structure_of

        model_config = hf_config(self.folder)
        assert name == LANGUAGE, "the media half is read as a whole"
        part = {
            "model_type": model_config.get_text_config(decoder=True).model_type,
            **config.get(self.language, {}),
            "tie_word_embeddings": structure_of(self.folder).tied,
        }
        # The encoder's spec says which tokens see each other.
        return part | ({"use_bidirectional_attention": None} if bidirectional_of(model_config) else {})

    def media_keys(self, module: str) -> dict[str, Any]:
        """Return the keys of the encoder `module`. Raise EncoderError if the model reads no media, or does more than
        put features at their places."""
        from encoders.transformers_media import directory

        config = directory.hf_config(self.folder)
        kind, reasons = self._kind(module), directory.special(config)
        deepstack, axes = directory.deepstack_of(config), directory.AXES in reasons
        bidirectional = directory.bidirectional_of(config)
        supported = {directory.AXES: True, directory.LAYERS: deepstack, directory.BLOCKS: bidirectional}
        others = [reason for reason in reasons if not supported.get(reason)]
        if not others and axes and not (kind == "image" and self._has_usual_positions(self._processor(kind))):
            others = [directory.AXES]
        if others:
            raise EncoderError(
                f"a {config.model_type} {others[0]}, which is not supported. Only its language model can be read, as "
                f"modules.{LANGUAGE}.pretrained"
            )
        structure = directory.structure_of(self.folder)
        return {
            "name": f"{config.model_type} as it is",
            "family": FAMILIES[kind],
            "path": self.folder,
            "hidden_size": config.get_text_config(decoder=True).hidden_size,
            "pad": directory.pad_id(config, kind),
            "parameters": structure.num_parameters,
            "dropout": directory.dropout_of(config),
            "axes": axes,
            "bidirectional": bidirectional,
            "deepstack": deepstack,
        }

    def placeholder_keys(self, module: str) -> dict[str, str]:
        """Return the `placeholder` of the encoder `module`: tokens of the directory's processor."""
        processor = self._processor(self._kind(module))
        mark = "" if processor.mark == processor.pad_token else processor.mark
        return {"pad": processor.pad_token, "mark": mark, "start": processor.start, "end": processor.end}

    def _processor(self, kind: str) -> Any:
        from encoders.transformers_media.directory import hf_config, pad_id
        from encoders.transformers_media.processor import processor_of

        return processor_of(self.folder, kind, pad_id(hf_config(self.folder), kind))

    def _has_usual_positions(self, processor: Any) -> bool:
        """True if the model's own positions of a text with two images are those that samples get here."""
        import numpy as np
        import torch

        from data.text.placeholders import axis_positions
        from encoders.transformers_media.directory import hf_config, positions

        grids = [processor.grid(*size) for size in SIZES]
        if None in grids:
            return False
        text = [1 if processor.pad != 1 else 2] * 3
        # Qwen-Omni finds images by it.
        start = getattr(hf_config(self.folder), "vision_start_token_id", None)
        begin = [*text, *([] if start is None else [start])]
        items = [list(processor.ids(*size)) for size in SIZES]
        ids = [*begin, *items[0], *begin, *items[1], *text]
        places = [(rows * columns, (rows, columns)) for rows, columns in grids]
        kinds = [int(token == processor.pad) for token in ids]
        patches = torch.tensor([processor.patches(*size) for size in SIZES])
        expected = positions(hf_config(self.folder), ids, kinds, patches)
        return np.array_equal(axis_positions(np.array(ids), {processor.pad: places}), expected.numpy())

    @property
    def kinds(self) -> list[str]:
        """Kinds of media that the model reads: image, audio."""
        from encoders.transformers_media.directory import hf_config, kinds_of

        return kinds_of(hf_config(self.folder))

    def _kind(self, module: str) -> str:
        kinds = self.kinds
        if not kinds:
            raise EncoderError("its class has no get_image_features or get_audio_features")
        return kinds[0] if len(kinds) == 1 or not module.startswith("audio") else "audio"

    def spellings(self, folder: Path, key: str) -> tuple[Spelling, ...]:
        """See `Composite.spellings`. Raise UserError if the directory lacks the language model."""
        from encoders.transformers_media.directory import structure_of

        try:
            return (structure_of(self.folder).language_names(tensors_of(folder, key)),)
        except EncoderError as error:
            raise UserError(f"{key}: {folder} does not fit its config.json: {error}") from error


@cache
def of_transformers(folder: Path) -> OfTransformers:
    """Return how a directory is read. Raise EncoderError if transformers has no class for it, or its config.json has no
    part for a language model."""
    from encoders.transformers_media.directory import hf_config, text_key

    return OfTransformers("", text_key(hf_config(str(folder))), folder=str(folder))


def stored_weights(tensors: "Tensors", folder: Path, key: str) -> WeightMap:
    """Return the weights of a class of transformers, each as it is in a directory, which `key` names in errors. Raise
    UserError if the directory lacks any."""
    stored = tensors.stored_names(tensors_of(folder, key))
    missing = [name for name in tensors.shapes if name not in stored]
    if missing:
        text = f"{folder} has no tensor for {listed(missing, SHOWN)}, or other forms of them"
        raise UserError(f"{key}: {text}: load and save it with transformers 5")
    shapes, float32 = tensors.shapes.items(), tensors.float32
    return WeightMap(tuple(Rule(name, (Rows(stored[name], shape[0]),), fp32=name in float32) for name, shape in shapes))

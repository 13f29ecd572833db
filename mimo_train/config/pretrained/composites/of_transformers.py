"""Any other model of several parts of `transformers`: its media half as it is, and a known language model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.text_format import listed
from encoders.errors import EncoderError
from encoders.weight_map import Spelling, WeightMap
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.composites.base import Composite
from mimo_train.config.pretrained.hub import tensors_of

if TYPE_CHECKING:
    from encoders.transformers_media.tensors import Tensors

PROJECTOR = {"kind": "none", "merge": 1}
"""The media half has its own projector."""
SIZES = ((100, 60), (200, 320))
"""Images of which positions are compared, (height, width)."""
SHOWN = 5
"""Most tensors named in a message."""
THINKER_NAMES = "thinker."
"""Prefix of the tensors of the model that reads and writes text. Others speak, and are not trained."""
FAMILIES = {"image": "media_images", "audio": "media_audio"}
"""Encoder families by the kind of media."""


@dataclass(frozen=True)
class OfTransformers(Composite):
    """A model whose media half is the class of `transformers`. It is imported when the directory is read."""

    folder: str = ""

    def part(self, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """See `Composite.part`. Raise EncoderError if transformers cannot build the model."""
        from encoders.transformers_media.directory import THINKER, bidirectional_of, hf_config, scales_logits
        from encoders.transformers_media.tensors import structure_of

        model_config = hf_config(self.folder)
        text = model_config.get_text_config(decoder=True)
        assert name == LANGUAGE, "the media half is read as a whole"
        part = {
            # Whose defaults the class may set, and all of whose keys early files have at the top level (Qwen2-VL).
            **text.to_dict(),
            **config.get(THINKER, config).get(self.language, {}),
            "tie_word_embeddings": structure_of(self.folder).tied,
            **({} if scales_logits(model_config) else {"logit_scale": 1.0}),
        }
        # The class sets it for the prefix, of which the encoder's spec says that its tokens see each other.
        return part | ({"use_bidirectional_attention": None} if bidirectional_of(model_config) == "prefix" else {})

    def with_vocabulary(self, config: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """See `Composite.with_vocabulary`."""
        from encoders.transformers_media.directory import THINKER

        if THINKER in config:
            return {**config, THINKER: super().with_vocabulary(config[THINKER], rows)}
        return super().with_vocabulary(config, rows)

    def media_keys(self, module: str) -> dict[str, Any]:
        """Return the keys of the encoder `module`. Raise EncoderError if the model reads no media, or does more than
        put features at their places."""
        from encoders.transformers_media import directory
        from encoders.transformers_media.spec import default_max_seconds
        from encoders.transformers_media.tensors import structure_of
        from encoders.transformers_media.videos import reads_videos

        config = directory.hf_config(self.folder)
        kind, others = self.kind(module), directory.unsupported(config)
        axes = directory.AXES in directory.special(config)
        class_positions = not others and axes and not self._has_usual_positions()
        if class_positions and not directory.has_positions_of_images(self.folder):
            others = [directory.AXES]
        if others:
            raise EncoderError(
                f"a {config.model_type} {others[0]}, which is not supported. Only its language model can be read, as "
                f"modules.{LANGUAGE}.pretrained"
            )
        begin = self._processor(kind).begin()
        if begin and not self._processor(kind).chat_begins_with(begin):
            raise EncoderError(
                f"its processor writes {begin!r} in front of every text, and its chat template does not: put "
                "{{ bos_token }} at the front of the template"
            )
        structure = structure_of(self.folder)
        return {
            **({"reads_videos": reads_videos(self.folder, directory.pad_id(config, kind))} if kind == "image" else {}),
            **({"max_seconds": default_max_seconds(self._processor(kind))} if kind == "audio" else {}),
            "name": f"{config.model_type} as it is",
            "family": FAMILIES[kind],
            "path": self.folder,
            "hidden_size": config.get_text_config(decoder=True).hidden_size,
            "pad": directory.pad_id(config, kind),
            "parameters": structure.of_kind(kind).num_parameters,
            "dropout": directory.dropout_of(config),
            "axes": axes,
            "class_positions": class_positions,
            "bidirectional": directory.bidirectional_of(config) if kind == "image" else "",
            "adds_features": directory.adds_features(config),
            "deepstack": directory.deepstack_of(config) if kind == "image" else [],
        }

    def placeholder_keys(self, module: str) -> dict[str, str]:
        """Return the `placeholder` of the encoder `module`: tokens of the directory's processor."""
        processor = self._processor(self.kind(module))
        mark = "" if processor.mark == processor.pad_token else processor.mark
        return {"pad": processor.pad_token, "mark": mark}

    def _processor(self, kind: str) -> Any:
        from encoders.transformers_media.directory import hf_config, pad_id
        from encoders.transformers_media.processor import processor_of

        return processor_of(self.folder, kind, pad_id(hf_config(self.folder), kind))

    def _has_usual_positions(self) -> bool:
        """True if the model's own positions of a text with two images, and audio between them if it reads audio, are
        those that samples get here."""
        import numpy as np
        import torch

        from data.text.placeholders import axis_positions
        from encoders.transformers_media.directory import hf_config, kinds_of, positions

        config = hf_config(self.folder)
        if "image" not in kinds_of(config):
            return False
        images, audio = self._processor("image"), self._processor("audio") if "audio" in kinds_of(config) else None
        grids = [images.grid(*size) for size in SIZES]
        if None in grids:
            return False
        text = [next(token for token in range(3) if token not in (images.pad, audio and audio.pad))] * 3
        # Qwen-Omni finds media by these.
        starts = [getattr(config, f"{name}_start_token_id", None) for name in ("vision", "audio")]
        begin, begin_audio = ([*text, *([] if start is None else [start])] for start in starts)
        items = [list(images.text(*size)[1]) for size in SIZES]
        places: dict[int, list[Any]] = {images.pad: [(rows * columns, (rows, columns)) for rows, columns in grids]}
        ids, lengths = [*begin, *items[0]], []
        if audio is not None:
            frames = audio.read(torch.zeros(audio.sample_rate))
            places[audio.pad] = [(frames["rows"], None)]
            lengths = [int(frames["feature_attention_mask"].sum())]
            ids += [*begin_audio, *frames["input_ids"][0].tolist()]
        ids += [*begin, *items[1], *text]
        kinds = [int(token == images.pad) for token in ids]
        patches = torch.tensor([images.patches(*size) for size in SIZES])
        sizes = {"image_grid_thw": patches, "audio_seqlens": torch.tensor(lengths)}
        expected = positions(self.folder, ids, kinds, sizes)
        return np.array_equal(axis_positions(np.array(ids), places), expected.numpy())

    @property
    def kinds(self) -> list[str]:
        """Kinds of media that modules of one run can read, each with weights of its own: image, audio."""
        from encoders.transformers_media.directory import hf_config, kinds_of
        from encoders.transformers_media.tensors import structure_of

        structure = structure_of(self.folder)
        kinds = [kind for kind in kinds_of(hf_config(self.folder)) if structure.of_kind(kind).shapes]
        is_shared = sum(len(structure.of_kind(kind).shapes) for kind in kinds) > len(structure.shapes)
        return kinds[:1] if is_shared else kinds

    def kind(self, module: str) -> str:
        """Return the kind of media that a module reads: audio if its name begins so. Raise EncoderError if the model
        reads none."""
        from encoders.transformers_media.directory import hf_config, kinds_of

        kinds = kinds_of(hf_config(self.folder))
        if not kinds:
            raise EncoderError("its class has no get_image_features or get_audio_features")
        return kinds[0] if len(kinds) == 1 or not module.startswith("audio") else "audio"

    def spellings(self, folder: Path, key: str) -> tuple[Spelling, ...]:
        """See `Composite.spellings`. Raise UserError if the directory lacks the language model."""
        from encoders.transformers_media.tensors import structure_of

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
    files = {name: entry.shape for name, entry in tensors_of(folder, key).items()}
    rules, stored = {rule.ours: rule for rule in tensors.rules(files)}, tensors.stored_names(files)
    missing = [name for name in tensors.shapes if name not in rules]
    if missing:
        text = f"{folder} lacks tensors that can be read for {listed(missing, SHOWN)}"
        raise UserError(f"{key}: {text}. Load and save it with transformers 5")
    carried = ["*.num_batches_tracked", *(stored[name] for name in sorted(tensors.others) if name in stored)]
    if any(file.startswith(THINKER_NAMES) for file in files):
        carried += [file for file in files if not file.startswith(THINKER_NAMES)]
    return WeightMap(tuple(rules[name] for name in tensors.shapes), carried=tuple(carried))

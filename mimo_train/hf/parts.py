"""The parts of a run that come from directories, with their weight names on both sides."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.text.tokens import Tokenizer
from encoders.base import EncoderSpec
from encoders.registry import FAMILIES
from encoders.transformers_media.spec import ProcessorSpec
from encoders.weight_map import WeightMap
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.composites import Composite, composite_of
from mimo_train.config.pretrained.composites.of_transformers import stored_weights
from mimo_train.config.pretrained.directory import Directory, read_directory
from mimo_train.config.pretrained.fill_in import has_projector
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.transformers_llm import TransformersLlm
from mimo_train.families.config_json import language_keys
from mimo_train.families.weights import HEAD, SCORE, language_map

ENCODER, PROJECTOR = "encoders.", "input_projections."
"""Prefixes of an encoder module's parameters."""


@dataclass(frozen=True)
class Part:
    """A part of a module whose weights are in a directory."""

    module: str
    begins: str
    """Prefix of its parameters; empty for the whole module."""
    weights: WeightMap
    """Map by the names in the module."""
    written: WeightMap
    """Map for an export: the same without rows that the directory lacks."""
    folder: Path
    key: str
    is_whole: bool = True
    """True if the directory has only this part."""


def pretrained_parts(cfg: ConfigContainer, rows: int) -> list[Part]:
    """Return all parts of a run that come from directories, without language models of transformers as they are.

    Args:
        rows: rows of the language model's embedding, with padding.
    """
    parts = []
    for name, module in cfg.modules.items():
        for part, spec in (module.encoder.parts if module.encoder else {}).items():
            folder = getattr(module.encoder, f"{part}_pretrained", "")
            if folder:
                directory = read_directory(folder, f"modules.{name}.encoder.{part}_pretrained")
                parts.append(_encoder_part(name, spec, directory, part))
        if not module.pretrained or isinstance(module.llm, TransformersLlm):
            continue
        directory = read_directory(module.pretrained, f"modules.{name}.pretrained")
        composite = composite_of(directory)
        place = directory.folder, directory.key, composite is None
        composite = composite or Composite("")
        if name == LANGUAGE:
            config = composite.part(directory.config, name)
            kind, spellings = config["model_type"], composite.spellings(directory.folder, directory.key)
            stored = language_keys(config)["vocab_size"]
            heads = (SCORE if directory.has_value_head else None, SCORE) if cfg.traits.value_head else (HEAD, HEAD)
            weights, written = (
                language_map(cfg.llm, rows, kind, language_rows, head=head).under(*spellings)
                for language_rows, head in zip((stored, 0), heads, strict=True)
            )
            parts.append(Part(name, "", weights, written, *place))
            continue
        if isinstance(module.encoder, ProcessorSpec):
            weights = stored_weights(module.encoder.tensors(), directory.folder, directory.key)
            weights = weights.named(f"{ENCODER}{name}.model.model.")
            parts.append(Part(name, ENCODER, weights, weights, *place))
            continue
        parts.append(_encoder_part(name, module.encoder, directory))
        if has_projector(directory):
            assert composite.projector_weights is not None, directory.model_type
            projector = composite.projector_weights(module, cfg.llm.hidden_size).named(f"{PROJECTOR}0.")
            parts.append(Part(name, PROJECTOR, projector, projector, *place))
    return parts


def _encoder_part(name: str, spec: EncoderSpec, directory: Directory, part: str = "") -> Part:
    """Return an encoder from a directory.

    Args:
        part: name among the encoders joined in the module's; empty for the module's own.
    """
    place = f"{ENCODER}{name}." + (f"{part}." if part else "")
    composite = composite_of(directory)
    is_whole, composite = composite is None, composite or Composite("")
    weights = FAMILIES[spec.family].weight_map(spec)
    names = [
        before + prefix for before in composite.encoder_names for prefix in weights.prefixes if isinstance(prefix, str)
    ]
    weights = weights.named(place).under(*names)
    return Part(name, place if part else ENCODER, weights, weights, directory.folder, directory.key, is_whole)


def classifier_config(model_type: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the keys of config.json of a model with a value head. `model_type` is "" for a model of several parts.
    Raises UserError if `transformers` has no class for it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    if model_type not in CLASSES:
        raise UserError(
            f"train.task: transformers has no class for sequence classification of {model_type or 'several parts'}, so "
            "this reward model cannot be exported. Use its checkpoint"
        )
    # The class takes the last token that is not padding, so a token that ends answers cannot be padding.
    pads = tokenizer.pad_id not in tokenizer.template.stop_ids
    labels: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return labels | {"architectures": [CLASSES[model_type]], "pad_token_id": tokenizer.pad_id if pads else None}

"""Export a run from several sources as one `transformers` LLaVA: vision tower, two-layer MLP, language model."""

from pathlib import Path
from typing import Any

from data.text.tokens import Tokenizer
from encoders.pretrained import preprocessor_config
from encoders.registry import FAMILIES
from encoders.weight_map import WeightMap
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.composites import composite_of
from mimo_train.config.pretrained.composites.llava import LANGUAGE_NAMES, LLAVA
from mimo_train.config.pretrained.directory import read_directory
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.config.transformers_llm import TransformersLlm
from mimo_train.families.config_json import language_config_json, model_types
from mimo_train.families.registry import family_of
from mimo_train.families.weights import HEAD, TABLE, language_map
from mimo_train.hf.directory import write_json, write_run_tokenizer
from mimo_train.hf.documents import (
    Document,
    Extra,
    Written,
    carried_tensor,
    class_tensors,
    generation_config,
    special_ids,
    with_sizes,
)
from mimo_train.hf.fill import Reader
from mimo_train.hf.llava_limits import (
    ACTIVATIONS,
    TOWERS,
    NoLlava,
    require_llava,
    why_no_family,
)
from mimo_train.hf.parts import ENCODER, PROJECTOR, Part, pretrained_parts
from mimo_train.hf.tensors import TensorFolder
from mimo_train.inputs.datasets import placeholders_of

TOWER = "vision_tower."
"""Prefix of a tower's names on hubs, the only one that version 4 reads."""


def llava(cfg: ConfigContainer, tokenizer: Tokenizer, rows: int) -> Document:
    """Return the run as one LLaVA.

    Args:
        rows: rows of the language model's embedding, with padding.

    Raises:
        NoLlava: it does not form one.
    """
    require_llava(cfg)
    ((name, module),) = cfg.encoders.items()
    encoder = module.encoder
    place = placeholders_of(cfg)[name]
    pad = tokenizer.placeholder_id(place)
    _require_mark(tokenizer, pad, name)
    parts = {(part.module, part.begins): part for part in pretrained_parts(cfg, rows)}
    vision, tower, extras = _tower(name, module, parts.get((name, ENCODER)))
    text, language = _language(cfg, tokenizer, rows, parts.get((LANGUAGE, "")))
    # transformers' LLaVA embeds the placeholder too before it inserts features.
    vocabulary = max(text["vocab_size"], pad + 1)
    text["vocab_size"] = vocabulary
    assert LLAVA.projector_weights is not None
    projector = LLAVA.projector_weights(module, cfg.llm.hidden_size).named(f"{PROJECTOR}0.")
    strategy = "full" if encoder.keep_class_token or not encoder.class_token else "default"
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": vision,
        "text_config": text,
        "image_token_index": pad,
        "image_seq_length": encoder.most_tokens(1),
        "projector_hidden_act": ACTIVATIONS[module.projector.activation],
        "multimodal_projector_bias": module.projector.bias,
        "vision_feature_layer": encoder.feature_layer if module.pretrained else -1,
        "vision_feature_select_strategy": strategy,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", cfg.llm.tie_embeddings)),
    }
    preprocessor = preprocessor_config(encoder)
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": tokenizer.shown([pad]),
        "patch_size": encoder.patch_size,
        "num_additional_image_tokens": int(encoder.class_token),
        "vision_feature_select_strategy": strategy,
    }

    def write_files(to: Path) -> None:
        write_run_tokenizer(cfg, tokenizer, to)
        write_json(to / "preprocessor_config.json", preprocessor | {"processor_class": "LlavaProcessor"})
        write_json(to / "processor_config.json", processor)
        write_json(to / "generation_config.json", generation_config(tokenizer))

    return Document(
        LANGUAGE,
        f"{name} and {LANGUAGE} as one LLaVA ({vision['model_type']}, {text['model_type']})",
        config,
        [
            Written(name, tower, "model.vision_tower."),
            Written(name, projector, projector.prefixes[-1]),
            Written(LANGUAGE, language, LANGUAGE_NAMES[-1], dict.fromkeys((TABLE, HEAD), vocabulary)),
        ],
        extras,
        write_files=write_files,
    )


def _require_mark(tokenizer: Tokenizer, pad: int, name: str) -> None:
    """Raise NoLlava if LLaVA's processor would use another image placeholder."""
    text = tokenizer.shown([pad])
    written = getattr(tokenizer, "writes", lambda kind: None)("image")
    if written is not None and written.strip() != text:
        raise NoLlava(
            f"the chat template writes {written!r} for an image, and LLaVA's processor knows {text!r} alone, which "
            f"modules.{name}.placeholder.pad is"
        )


def _tower(name: str, module: ModuleConfig, part: Part | None) -> tuple[dict[str, Any], WeightMap, list[Extra]]:
    """Return the vision tower's part of config.json, its weights, and its tensors that ours lacks."""
    encoder, family = module.encoder, FAMILIES[module.encoder.family]
    weights = family.weight_map(encoder).named(f"{ENCODER}{name}.")
    before = TOWER + str(weights.prefixes[0])
    weights = weights.under(before)
    published = family.published(encoder)
    if part is None:
        return published.config, weights, class_tensors(published, TOWER)
    directory = read_directory(str(part.folder), part.key)
    composite = composite_of(directory)
    config = composite.part(directory.config, name) if composite else dict(directory.config)
    config["model_type"] = TOWERS[encoder.family]
    folder = TensorFolder(part.folder, part.key)
    reader = Reader(folder, part.weights, part.key)
    prefix = reader.spelling
    assert isinstance(prefix, str), prefix
    rest = [tensor for tensor in folder.tensors if tensor.startswith(prefix) and tensor not in reader.read_names]
    # These belong to CLIP or SigLIP but not to the tower.
    others = () if prefix else ("text_", "visual_projection", "logit_")
    rest = [tensor for tensor in rest if not tensor.endswith("position_ids") and not tensor.startswith(others)]
    return config, weights, [carried_tensor(folder, tensor, before + tensor.removeprefix(prefix)) for tensor in rest]


def _language(
    cfg: ConfigContainer, tokenizer: Tokenizer, rows: int, part: Part | None
) -> tuple[dict[str, Any], WeightMap]:
    if isinstance(cfg.language.llm, TransformersLlm):
        raise NoLlava(f"modules.{LANGUAGE} is a class of transformers as it is")
    if part is not None:
        directory = read_directory(str(part.folder), part.key)
        composite = composite_of(directory)
        config = composite.part(directory.config, LANGUAGE) if composite else dict(directory.config)
        config["vocab_size"] = cfg.llm.vocab_size
        kind, weights = config["model_type"], part.written
    else:
        spec = with_sizes(cfg, tokenizer)
        kinds = [kind for kind in model_types(spec) if not family_of(kind).scales_media]
        if not kinds:
            raise NoLlava(f"transformers has no such language model: {why_no_family(spec)}")
        kind = kinds[0]
        config = language_config_json(spec, kind) | special_ids(tokenizer)
        weights = language_map(spec, rows, kind)
    if family_of(kind).scales_media:
        raise NoLlava(f"a language model of family {kind} scales the features of images in LLaVA, and here it does not")
    return config, weights.under(LANGUAGE_NAMES[0])

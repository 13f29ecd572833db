"""Directories of which a part is trained as the class of `transformers` that it is."""

from collections.abc import Iterator, Mapping
from typing import Any

from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.composites import ALONE, ENCODERS, composite_of
from mimo_train.config.pretrained.composites.of_transformers import OfTransformers, of_transformers
from mimo_train.config.pretrained.directory import Directory
from mimo_train.config.transformers_llm import TransformersLlm, Unsupported, is_causal_language_model, saved_config
from mimo_train.families.registry import is_family


def keys_as_is(directory: Directory) -> dict[str, Any]:
    """Return the keys of `llm` for a class of transformers, which may have other parts. Raise ConfigError."""
    llm = TransformersLlm(directory.name, model_config=saved_config(directory.config))
    try:
        return {"name": llm.name, "vocab_size": llm.sizes.vocab_size, "model_config": llm.model_config}
    except Unsupported as error:
        raise ConfigError([Fault(directory.key, f"{directory.folder}: {error}")]) from error


def media_half(name: str, directory: Directory, implementation: str) -> OfTransformers | None:
    """Return how the encoder `name` is read if it is a media half of transformers as it is, else None."""
    composite = composite_of(directory)
    if name == LANGUAGE or isinstance(composite, OfTransformers):
        return composite if name != LANGUAGE and isinstance(composite, OfTransformers) else None
    as_is = implementation == "transformers" and not is_tower(name, directory, implementation)
    return of_transformers(directory.folder) if as_is else None


def is_tower(name: str, directory: Directory, implementation: str) -> bool:
    """True if the encoder `name` is the class of transformers that its directory holds, without a language model: by
    `implementation`, or since no native family reads it."""
    composite, kind = composite_of(directory), directory.model_type
    if name == LANGUAGE or composite is not None and kind not in ALONE:
        return False
    is_read = kind in (*ENCODERS, *ALONE) or is_family(kind) or is_causal_language_model(kind)
    return implementation == "transformers" or implementation == "" and not is_read


def native_encoder_faults(
    language: Directory, directories: Mapping[str, Directory], modules: Mapping[str, Any]
) -> Iterator[Fault]:
    """Yield the fault of native encoders next to the class of transformers of their own model, which may place their
    features in other ways than theirs."""
    for name, directory in directories.items():
        same = name != LANGUAGE and directory.folder == language.folder
        if same and media_half(name, directory, str((modules[name] or {}).get("implementation") or "")) is None:
            yield Fault(
                f"modules.{LANGUAGE}.implementation",
                f"transformers is not supported next to the native encoder of the same model. Remove it, or set "
                f"modules.{name}.implementation=transformers",
            )

"""Decide from the config which runs can be exported as one LLaVA of `transformers`; shared by export and `check`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from encoders.errors import EncoderError
from encoders.pretrained import ACTIVATION_NAMES, Published
from encoders.registry import FAMILIES
from mimo_train.config.errors import ConfigError
from mimo_train.config.keys import changed_fields
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.directory import read_directory
from mimo_train.config.pretrained.fill_in import has_projector
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.config.transformers_llm import TransformersLlm
from mimo_train.families.config_json import language_config_json, model_types
from mimo_train.families.registry import family_of

TOWERS = {
    "clip": "clip_vision_model",
    "siglip": "siglip_vision_model",
    "vit": "siglip_vision_model",
    "dinov2": "dinov2",
}
"""`model_type` of the vision tower, by encoder family."""
_OTHERS = {
    "siglip2": "Siglip2VisionModel requires spatial_shapes, which LLaVA does not pass",
    "dinov3": "LLaVA reads no tower with register tokens",
}
"""Known reasons why a family cannot be LLaVA's tower."""
ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATION_NAMES.items())}
"""transformers' names of activation functions, by ours."""


class NoLlava(Exception):
    """Reason in a sentence why a run's parts do not form a LLaVA."""


def export_form(cfg: ConfigContainer) -> str:
    """Return what an export of a run will be, as a sentence, with the key that decides if it is several directories."""
    folders = {module.pretrained for module in cfg.modules.values()}
    if cfg.traits.value_head and cfg.encoders and len(folders) == 1 and "" not in folders:
        return f"this run cannot be exported: transformers has no class for {folders.pop()} with a value head"
    if reason := why_several(cfg):
        form = f"a directory for each part, since transformers has no model for all: {reason}"
    elif len(folders) == 1 and "" not in folders:
        form = f"one directory, that of {folders.pop()} with the trained weights"
    elif cfg.encoders:
        form = "one directory, a LLaVA"
    else:
        is_native = not isinstance(cfg.language.llm, TransformersLlm)
        spec = replace(cfg.llm, vocab_size=cfg.llm.vocab_size or 1, max_positions=cfg.llm.max_positions or 1)
        kinds = model_types(spec) if is_native else [cfg.language.llm.model_config["model_type"]]
        form = f"one directory, of model_type {kinds[0]}" if kinds else f"by our own names: {why_no_family(spec)}"
    return f"an export of this run is {form}"


def why_several(cfg: ConfigContainer) -> str:
    """Return why an export of a run is several directories, as a clause; empty if it is one."""
    folders = {module.pretrained for module in cfg.modules.values()}
    if (
        not cfg.encoders
        or LANGUAGE not in cfg.modules
        or len(folders) == 1
        and "" not in folders
        and _projectors_come_along(cfg)
    ):
        return ""
    try:
        require_llava(cfg)
    except NoLlava as error:
        return "; ".join([str(error), *(_why_our_names(cfg, str(error)))])
    return ""


def _why_our_names(cfg: ConfigContainer, reason: str) -> Iterator[str]:
    """Yield why encoders made here are written by our names, unless `said` has the reason."""
    for name, module in cfg.encoders.items():
        if module.pretrained:
            continue
        try:
            published_encoder(module)
        except EncoderError as error:
            if str(error) not in reason:
                yield f"the encoder of {name} is written by our names, since {error}"


def published_encoder(module: ModuleConfig) -> Published:
    """Return the `transformers` form of an encoder that is made here.

    Raises:
        EncoderError: no class computes the same; with the reason.
    """
    encoder, merge = module.encoder, module.projector.merge
    family = FAMILIES.get(encoder.family)
    if family is None:
        raise EncoderError("the encoder is of your own package")
    published = family.published(encoder)
    if merge > 1 and (encoder.sizes_vary or encoder.most_inner_tokens(merge) != encoder.most_inner_tokens()):
        raise EncoderError(
            f"projector.merge is {merge}, and each {encoder.medium} is resized to a multiple of it, which no processor "
            "of transformers does"
        )
    return published


def _projectors_come_along(cfg: ConfigContainer) -> bool:
    folders = [Path(module.pretrained) for module in cfg.encoders.values()]
    return all(not folder.is_dir() or has_projector(read_directory(str(folder), "pretrained")) for folder in folders)


def require_llava(cfg: ConfigContainer) -> None:
    """Require that a run's parts form a LLaVA. Raises NoLlava if they do not."""
    if cfg.traits.value_head:
        raise NoLlava(f"train.task={cfg.train.task} ends in a value head, and LLaVA has none")
    if cfg.llm.mrope_section:
        raise NoLlava("its language model has positions of several axes (mrope_section), and LLaVA's has one")
    if len(cfg.encoders) != 1:
        raise NoLlava(f"it has {len(cfg.encoders)} encoders, and LLaVA one")
    ((name, module),) = cfg.encoders.items()
    _require_parts(name, module, cfg.llm.hidden_size)
    try:
        FAMILIES[module.encoder.family].published(module.encoder)
    except EncoderError as error:
        raise NoLlava(f"modules.{name}.encoder: {error}") from error
    if not cfg.modules[LANGUAGE].pretrained and not [
        kind for kind in model_types(cfg.llm) if not family_of(kind).scales_media
    ]:
        raise NoLlava(f"transformers has no such language model: {why_no_family(cfg.llm)}")


def _require_parts(name: str, module: ModuleConfig, width: int) -> None:
    encoder, projector, prefix = module.encoder, module.projector, f"modules.{name}"
    if getattr(encoder, "kind", "") != "image":
        raise NoLlava(f"{name} reads no images")
    if encoder.family not in TOWERS:
        reason = _OTHERS.get(encoder.family, "")
        text = f"{prefix}.encoder.family is {encoder.family}, and towers of {', '.join(TOWERS)} are written"
        raise NoLlava(f"{text}: {reason}" if reason else text)
    if encoder.register_tokens:
        raise NoLlava(
            f"{prefix}.encoder.register_tokens is {encoder.register_tokens}, and LLaVA would keep them in the sequence"
        )
    if encoder.is_tiled:
        raise NoLlava(f"{prefix}.encoder.resize is tiles, and LLaVA reads images in one piece")
    if encoder.final_norm:
        raise NoLlava(
            f"{prefix}.encoder.final_norm is true, and LLaVA reads its tower without the norm behind the layers: "
            "train with false"
        )
    wrong = {
        "projector.kind": (projector.kind, "mlp"),
        "projector.merge": (projector.merge, 1),
        "projector.norm": (projector.norm, ""),
        "projector.resampler.latents": (projector.latents, 0),
        "projector.ffn_hidden_size": (projector.ffn_hidden_size or width, width),
    }
    for key, (value, needed) in wrong.items():
        if value != needed:
            raise NoLlava(f"{prefix}.{key} is {value}, and LLaVA's projector has {needed}")
    allowed = {"name", "kind", "ffn_hidden_size", "activation", "merge", "bias"}
    for field in changed_fields(projector):
        if field not in allowed:
            raise NoLlava(f"{prefix}.projector.{field} is set, which LLaVA's projector does not support")
    if projector.activation not in ACTIVATIONS:
        raise NoLlava(f"{prefix}.projector.activation is {projector.activation}, which transformers does not support")


def why_no_family(spec: LlmSpec) -> str:
    """Return why `transformers` has no such language model: the first thing that Llama lacks."""
    try:
        language_config_json(spec, "llama")
    except ConfigError as error:
        fault = error.faults[0]
        return f"{fault.key} {fault.message}"
    return ""

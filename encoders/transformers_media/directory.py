"""A directory of `transformers` with a model of several parts: its class, what it reads, the names of its tensors."""

import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, cast

import torch
import transformers
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import (
    build_glob_alternation,
    revert_weight_conversion,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from encoders.errors import EncoderError

DROPPED = ("dropout", "layerdrop", "drop_path_rate")
"""Parts of the names of keys that set a probability of dropout."""

SPECIAL = {
    "adds features in layers of the language model": r"deepstack",
    "has positions on several axes": r"get_rope_index|compute_3d_position|rope_deltas",
    "lets tokens see later ones": r"(?<!mm_)token_type_ids|block_sequence_ids|bidirectional",
    "has inputs of images in layers or experts of the language model": r"per_layer_inputs|moe_mm",
    "projects features outside of its towers": r"visual_indicator|embed_vision",
}
"""What a model does besides putting features at their places, by the words of its `forward`. Checked against all models
of several parts in transformers 5.23."""
LAYERS, AXES, BLOCKS, INPUTS, *_ = SPECIAL
TILES_ALONE = "cuts an image into tiles only where a sample has no other, and its processor is called for each image"

BIDIRECTIONAL = {
    **dict.fromkeys(("gemma3", "gemma4", "gemma4_unified", "molmo2"), "items"),
    "paligemma": "prefix",
    "gemma3n": "",  # takes token types, and does not read them
}
"""Which tokens see each other, see `EncoderSpec.bidirectional`. Under a window, tokens of an item see only those inside
it; a prefix is seen whole."""


THINKER = "thinker_config"
"""Key of the model that reads and writes text, in the config.json of a model that speaks too."""

WORDS = {"image": ("image", "vision", "visual", "multi_modal"), "audio": ("audio", "sound", "speech")}
"""Words in the names of modules of one kind of media. Checked against all models of several kinds in transformers
5.23."""


@cache
def hf_config(path: str) -> PretrainedConfig:
    """Return the config of a directory, of one that speaks too that of its `THINKER`. Raise EncoderError if
    transformers cannot read it."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the config class may raise anything about a value
        reason = str(error).partition("\n")[0]
        raise EncoderError(f"transformers cannot read config.json: {reason}") from error
    if hasattr(config, THINKER):
        config = getattr(config, THINKER)
        config.architectures = None  # published ones name a class that never was in transformers
    return cast(PretrainedConfig, config)


def class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that config.json names, or that of its type. Raise EncoderError if transformers has none."""
    of_type = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type)
    for name in config.architectures or [of_type or ""]:
        built = getattr(transformers, name, None)
        if isinstance(built, type) and issubclass(built, PreTrainedModel):
            return built
    raise EncoderError(f"config.json: architectures is {config.architectures}, and transformers has no such class")


def kinds_of(config: PretrainedConfig) -> list[str]:
    """Return the kinds of media that a model reads: image, audio."""
    models = _models_beside(class_of(config))
    return [kind for kind in ("image", "audio") if any(hasattr(model, f"get_{kind}_features") for model in models)]


def special(config: PretrainedConfig) -> list[str]:
    """Return what a model does besides putting features at their places: keys of `SPECIAL`."""
    return [reason for reason, words in SPECIAL.items() if re.search(words, _forward(class_of(config)))]


def projects_in_forward(built: type[PreTrainedModel]) -> bool:
    """True if `get_image_features` of a class gives features that its `forward` projects."""
    return "self.multi_modal_projector(" in _forward(built)


def scales_logits(config: PretrainedConfig) -> bool:
    """True if a model multiplies logits as its language model alone does: Aya Vision and Cohere 2 Vision do not."""
    source = inspect.getsource(sys.modules[class_of(config).__module__])
    return "logit_scale" in source or not hasattr(config.get_text_config(decoder=True), "logit_scale")


def _forward(built: type[PreTrainedModel]) -> str:
    """Return the source of `forward` of a class and of the one inside it, without their signatures."""
    owners = {built, *(model for model in _models_beside(built) if hasattr(model, "get_placeholder_mask"))}
    forwards = [vars(owner)["forward"] for owner in owners if "forward" in vars(owner)]
    return "".join(inspect.getsource(forward).rpartition('"""')[2] for forward in forwards)


def unsupported(config: PretrainedConfig) -> list[str]:
    """Return what a model does that is not supported: keys of `SPECIAL`, but for positions on several axes, which are
    compared with ours, and `TILES_ALONE`."""
    inputs = inspect.signature(class_of(config).forward).parameters
    supported = {
        AXES: True,
        LAYERS: deepstack_of(config),
        BLOCKS: config.model_type in BIDIRECTIONAL,
        INPUTS: "per_layer_inputs" in inputs,
    }
    reasons = [reason for reason in special(config) if not supported.get(reason)]
    return [*reasons, TILES_ALONE] if config.model_type == "llava_onevision" else reasons


def _models_beside(built: type[PreTrainedModel]) -> list[type[PreTrainedModel]]:
    """Return the models in the module of a class: that class, and the one inside it."""
    values = vars(sys.modules[built.__module__]).values()
    return [value for value in values if inspect.isclass(value) and issubclass(value, PreTrainedModel)]


def text_key(config: PretrainedConfig) -> str:
    """Return the key of the language model's part of config.json. Raise EncoderError if there is none."""
    text = config.get_text_config(decoder=True)
    for key in config.sub_configs:
        if getattr(config, key, None) is text:
            return str(key)
    raise EncoderError(f"config.json of a {config.model_type} has no part for its language model")


def pad_id(config: PretrainedConfig, kind: str) -> int:
    """Return the id of the tokens that features replace. Raise EncoderError if config.json does not say it."""
    for key in (f"{kind}_token_id", f"{kind}_token_index"):
        if isinstance(getattr(config, key, None), int):
            return int(getattr(config, key))
    raise EncoderError(f"config.json: {kind}_token_id is missing")


def bidirectional_of(config: PretrainedConfig) -> str:
    """Return `bidirectional` of the spec of the images; empty for a causal model, as the small ones of Gemma 4 are."""
    is_causal = "gemma4" in config.model_type and config.get_text_config().use_bidirectional_attention != "vision"
    return "" if is_causal else BIDIRECTIONAL.get(config.model_type, "")


def adds_features(config: PretrainedConfig) -> bool:
    """True if a model adds features to the embeddings of their tokens, instead of replacing them."""
    return bool(re.search(r"inputs_embeds\[\w+\] \+", _forward(class_of(config))))


def deepstack_of(config: PretrainedConfig) -> list[int]:
    """Return the layers of the tower whose features the first layers of the language model add; empty for other
    models."""
    if LAYERS not in special(config):
        return []
    if hasattr(config, "deepstack_layer_map"):  # Granite 4 Vision
        layers = [layer for layer, _ in config.deepstack_layer_map or ()]
        layers += [config.spatial_vision_layer] * len(config.spatial_target_layers)
        return [int(layer) % config.vision_config.num_hidden_layers for layer in layers]
    name = MODEL_MAPPING_NAMES.get(config.get_text_config(decoder=True).model_type)
    decoders = [*_models_beside(class_of(config)), *([getattr(transformers, name)] if name else [])]
    if not any("deepstack_visual_embeds" in inspect.signature(decoder.forward).parameters for decoder in decoders):
        return []
    return next((list(value) for _, key, value in _media_values(config) if key == "deepstack_visual_indexes"), [])


def deepstack_targets(config: PretrainedConfig) -> list[int]:
    """Return the layers of the language model that add the features of `deepstack_of`, in its order; empty: the first
    ones."""
    layers = [layer for _, layer in getattr(config, "deepstack_layer_map", None) or ()]
    return [*layers, *getattr(config, "spatial_target_layers", ())]


@cache
def _of_positions(path: str) -> PreTrainedModel:
    """Return the model of a directory that has `get_rope_index`, on the meta device."""
    model = skeleton(hf_config(path))
    return model if hasattr(model, "get_rope_index") else model.base_model


def has_positions_of_images(path: str) -> bool:
    """True if the class of a directory computes positions from tokens and sizes of images alone."""
    arguments = inspect.signature(_of_positions(path).get_rope_index).parameters
    by_size = {"image_grid_thw", "target_sizes"} & arguments.keys()
    return kinds_of(hf_config(path)) == ["image"] and "mm_token_type_ids" in arguments and bool(by_size)


def positions(path: str, ids: Sequence[int], kinds: Sequence[int], sizes: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return positions as the model's class computes them, int64 [axes, S].

    Args:
        path: directory of the model.
        ids: tokens of a text.
        kinds: 1 for tokens that features of an image replace, 2 for those of a video, else 0.
        sizes: tensors of the processor with the sizes of images, videos and audio, by name.
    """
    owner = _of_positions(path)
    options = {"input_ids": torch.tensor([ids]), **sizes}
    if "mm_token_type_ids" in inspect.signature(owner.get_rope_index).parameters:
        options["mm_token_type_ids"] = torch.tensor([kinds], dtype=torch.int32)
        options.pop("audio_seqlens", None)
    else:  # Qwen-Omni
        options["attention_mask"] = torch.ones(1, len(ids), dtype=torch.int64)
    return cast(torch.Tensor, owner.get_rope_index(**options)[0][:, 0])


def dropout_of(config: PretrainedConfig) -> float:
    """Return the largest probability of dropout outside of the language model."""
    rates = [value for _, key, value in _media_values(config) if any(word in key for word in DROPPED)]
    return max((float(rate) for rate in rates if isinstance(rate, int | float)), default=0.0)


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config without dropout outside of the language model."""
    config = type(config).from_dict(config.to_dict())
    for owner, key, value in list(_media_values(config)):
        if any(word in key for word in DROPPED) and isinstance(value, int | float):
            setattr(owner, key, 0.0)
    return config


def _media_values(config: PretrainedConfig) -> Iterable[tuple[PretrainedConfig, str, Any]]:
    text = config.get_text_config(decoder=True)
    for owner in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        if owner is not None and owner is not text:
            yield from ((owner, key, value) for key, value in vars(owner).items())


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model on the meta device."""
    with torch.device("meta"):
        return class_of(config)._from_config(config)


def without_language(model: PreTrainedModel, kind: str = "") -> PreTrainedModel:
    """Take the language model and the output layer out of a model in place, and return it; with `kind` also the modules
    of other kinds of media. Buffers with weights, such as statistics of batch norms, become frozen parameters."""
    language, head = model.get_decoder(), output_of(model)
    removed = {id(module) for module in language.modules()} | {id(head)}
    if kind:
        removed |= {id(module) for name, module in model.named_modules() if is_of_others(model.config, name, kind)}
    for owner in [owner for owner in model.modules() if id(owner) not in removed]:
        for name, child in list(owner.named_children()):
            if id(child) in removed:
                setattr(owner, name, None)
    for owner in model.modules():
        for name, value in list(owner.named_buffers(recurse=False)):
            if name not in owner._non_persistent_buffers_set and value.is_floating_point() and value.dim():
                delattr(owner, name)
                owner.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        if isinstance(owner, _BatchNorm):
            owner._non_persistent_buffers_set.add("num_batches_tracked")
    return model


def saved_buffers(model: PreTrainedModel) -> set[str]:
    """Return the names of the buffers that a directory has."""
    return model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()


def is_of_others(config: PretrainedConfig, name: str, kind: str) -> bool:
    """True if a module or parameter belongs to a kind of media that a model reads other than `kind`."""
    named = [other for other in kinds_of(config) if any(word in name for word in WORDS[other])]
    return bool(named) and kind not in named


def without_media(model: PreTrainedModel) -> PreTrainedModel:
    """Take all parameters but those of the language model and the output layer out of a model in place, and return
    it."""
    language, head = model.get_decoder(), output_of(model)
    kept = {id(module) for module in (*language.modules(), *(head.modules() if head is not None else ()))}
    owners = [owner for owner in model.modules() if kept & {id(child) for child in owner.modules()}]
    for owner in [owner for owner in owners if id(owner) not in kept]:
        for name, child in list(owner.named_children()):
            if next(child.parameters(), None) is not None and not any(child is other for other in owners):
                setattr(owner, name, None)
        for name, _ in list(owner.named_parameters(recurse=False)):
            owner.register_parameter(name, None)
    return model


def output_of(model: PreTrainedModel) -> torch.nn.Module | None:
    """Return the output layer, which may belong to the language model inside a model (Nemotron)."""
    return cast(torch.nn.Module | None, model.get_output_embeddings() or model.get_decoder().get_output_embeddings())


def per_layer_inputs(model: PreTrainedModel, ids_BS: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the `per_layer_inputs` of a model whose layers have embeddings of their own (Gemma 3n, Gemma 4), as it
    computes them from `input_ids`; empty for other models."""
    decoder, config = model.get_decoder(), model.config
    takes = "per_layer_inputs" in inspect.signature(model.forward).parameters
    if not takes or not decoder.config.hidden_size_per_layer_input:
        return {}
    if config.model_type != "gemma3n":  # Gemma 4 gives tokens of media what padding has
        media = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")]
        is_media_BS = torch.isin(ids_BS, ids_BS.new_tensor([token for token in media if token is not None]))
        ids_BS = ids_BS.masked_fill(is_media_BS, decoder.config.pad_token_id)
    return {"per_layer_inputs": decoder.get_per_layer_inputs(ids_BS)}


def float32_names(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Return the names of the parameters and buffers that a class keeps in float32 if its weights have `dtype`, such as
    biases of routers."""
    kept = model._get_dtype_plan(dtype)
    names = (name for name, _ in chain(model.named_parameters(), model.named_buffers()))
    return {name for name in names if kept and build_glob_alternation(list(kept))[0].search(name)}


def keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast what a class keeps in float32 next to weights of `dtype`, in place."""
    names = float32_names(model, dtype)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if name in names:
            tensor.data = tensor.data.float()


def hub_state(
    model: PreTrainedModel, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Return tensors by their hub names, tied ones once.

    Args:
        state: tensors by their names in memory.
        dtype: dtype of weights; None: as they are.
    """
    once = {name for name, _ in chain(model.named_parameters(), model.named_buffers())}
    state = {name: value for name, value in state.items() if name in once}
    if dtype is not None:
        float32 = float32_names(model, dtype)
        state = {
            name: value.to(torch.float32 if name in float32 else dtype) if value.is_floating_point() else value
            for name, value in state.items()
        }
    return cast(dict[str, torch.Tensor], revert_weight_conversion(model, state))

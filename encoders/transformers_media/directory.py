"""A directory of `transformers` with a model of several parts: its class, what it reads, the names of its tensors."""

import inspect
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cache
from itertools import chain
from math import prod
from typing import Any, cast

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from encoders.errors import EncoderError

DROPPED = ("dropout", "layerdrop", "drop_path_rate")
"""Parts of the names of keys that set a probability of dropout."""

SPECIAL = {
    "adds features in layers of the language model": r"per_layer_inputs|moe_mm|deepstack",
    "has positions on several axes": r"get_rope_index|compute_3d_position|rope_deltas",
    "lets tokens see later ones": r"(?<!mm_)token_type_ids|block_sequence_ids|bidirectional",
    "projects features outside of its towers": r"visual_indicator|multi_modal_projector|embed_vision",
}
"""What a model does besides putting features at their places, by the words of its `forward`. Checked against all models
of several parts in transformers 5.23."""
LAYERS, AXES, BLOCKS, _ = SPECIAL

DEEPSTACK = ("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text")
"""Language models whose first layers get one of the `deepstack_features` each."""
BIDIRECTIONAL = {"gemma3": "items", "paligemma": "prefix"}
"""Which tokens see each other, see `EncoderSpec.bidirectional`. Under a window, tokens of an item see only those inside
it; a prefix is seen whole."""


THINKER = "thinker_config"
"""Key of the model that reads and writes text, in the config.json of a model that speaks too."""

WORDS = {"image": ("image", "vision", "visual"), "audio": ("audio", "sound", "speech")}
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
    built = class_of(config)
    owners = {built, *(model for model in _models_beside(built) if hasattr(model, "get_placeholder_mask"))}
    forwards = [vars(owner)["forward"] for owner in owners if "forward" in vars(owner)]
    bodies = "".join(inspect.getsource(forward).rpartition('"""')[2] for forward in forwards)
    return [reason for reason, words in SPECIAL.items() if re.search(words, bodies)]


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
    """Return `bidirectional` of the encoder's spec; empty for a model whose masks are not known."""
    return BIDIRECTIONAL.get(config.model_type, "")


def deepstack_of(config: PretrainedConfig) -> list[int]:
    """Return the layers of the tower of images whose features layers of the language model get; empty for other
    models."""
    if LAYERS not in special(config) or config.get_text_config(decoder=True).model_type not in DEEPSTACK:
        return []
    return next((list(value) for _, key, value in _media_values(config) if key == "deepstack_visual_indexes"), [])


def positions(
    config: PretrainedConfig, ids: Sequence[int], kinds: Sequence[int], grids: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Return positions as the model's class computes them, int64 [3, S].

    Args:
        ids: tokens of a text.
        kinds: 1 for tokens that features of an image replace, else 0.
        grids: patches of each image in time, height and width, [N, 3].
        lengths: frames of each audio, [N].
    """
    model = skeleton(config)
    owner = model if hasattr(model, "get_rope_index") else model.base_model
    options = {"input_ids": torch.tensor([ids]), "image_grid_thw": grids}
    if "mm_token_type_ids" in inspect.signature(owner.get_rope_index).parameters:
        options["mm_token_type_ids"] = torch.tensor([kinds], dtype=torch.int32)
    else:  # Qwen-Omni
        options |= {"attention_mask": torch.ones(1, len(ids), dtype=torch.int64), "audio_seqlens": lengths}
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
    of other kinds of media."""
    language, head = model.get_decoder(), model.get_output_embeddings()
    removed = {id(module) for module in language.modules()} | {id(head)}
    if kind:
        removed |= {id(module) for name, module in model.named_modules() if _is_of_others(model.config, name, kind)}
    for owner in [owner for owner in model.modules() if id(owner) not in removed]:
        for name, child in list(owner.named_children()):
            if id(child) in removed:
                setattr(owner, name, None)
    return model


def _is_of_others(config: PretrainedConfig, name: str, kind: str) -> bool:
    """True if a module or parameter belongs to a kind of media that a model reads other than `kind`."""
    named = [other for other in kinds_of(config) if any(word in name for word in WORDS[other])]
    return bool(named) and kind not in named


def without_media(model: PreTrainedModel) -> PreTrainedModel:
    """Take all but the language model and the output layer out of a model in place, and return it."""
    language, head = model.get_decoder(), model.get_output_embeddings()
    kept = {id(module) for module in (*language.modules(), *(head.modules() if head is not None else ()))}
    owners = [owner for owner in model.modules() if kept & {id(child) for child in owner.modules()}]
    for owner in [owner for owner in owners if id(owner) not in kept]:
        for name, child in list(owner.named_children()):
            if not any(child is other for other in owners):
                setattr(owner, name, None)
    return model


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


class Tensors:
    """The names of a model's tensors, in memory and in directories.

    Attributes:
        shapes: shape of each trained parameter, by its name in memory.
        num_parameters: those of all `shapes` together.
        float32: names of those that stay in float32 in half precision.
        others: names of parameters that are not trained, and that an export copies.
    """

    shapes: dict[str, tuple[int, ...]]
    others: Collection[str] = ()

    @property
    def num_parameters(self) -> int:
        return sum(map(prod, self.shapes.values()))

    def __init__(self, model: PreTrainedModel):
        self._prefix, self._state = model.base_model_prefix, model.state_dict()
        self.float32 = float32_names(model, torch.bfloat16)
        self._optional = "|".join((*model.all_tied_weights_keys, *(model._keys_to_ignore_on_load_missing or ())))
        conversions = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]

    def stored_names(self, files: Iterable[str]) -> dict[str, str]:
        """Return {name in memory: name in the directory} of tensors that a directory with the names `files` stores as
        they are in memory."""
        stored = {}
        for file in files:
            name, converter = self._renamed(file)
            if converter is None and name in self._state:
                stored[name] = file
        return stored

    def unlike(self, files: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return what a directory with tensors of these shapes lacks: missing tensors, and those with other shapes. Of
        tensors that transformers joins as it reads them only names are compared, and none if it splits any."""
        missing, wrong = set(self._state), []
        for file, shape in files.items():
            name, pattern = self._renamed(file)
            if name not in self._state and file in self._state:
                name, pattern = file, None  # saved as it is in memory
            if any(pattern in entry.source_patterns and len(entry.target_patterns) > 1 for entry in self._converters):
                return []
            missing.discard(name)
            if pattern is None and name in self._state and tuple(self._state[name].shape) != shape:
                wrong.append(f"{file} is {shape}, and {tuple(self._state[name].shape)} here")
        required = (name for name in sorted(missing) if not (self._optional and re.search(self._optional, name)))
        return [*(f"{name} is missing" for name in required), *wrong]

    def _renamed(self, file: str) -> tuple[str, str | None]:
        return cast(
            tuple[str, str | None],
            rename_source_key(file, self._renamings, self._converters, self._prefix, self._state),
        )


class Structure(Tensors):
    """A model of several parts without its weights.

    Attributes:
        shapes: those of the media half.
        tied: True if the output layer is the embedding.
    """

    def __init__(self, config: PretrainedConfig):
        """Build the model on the meta device."""
        model = skeleton(config)
        super().__init__(model)
        places = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
        language, head = model.get_decoder(), model.get_output_embeddings()
        self._class = type(model).__name__
        self._table = f"{places[id(language)]}.embed_tokens.weight"
        self._head = f"{places.get(id(head), 'lm_head')}.weight"
        self.tied = head is None or head.weight is language.get_input_embeddings().weight
        self._config = config
        self.shapes = {name: tuple(value.shape) for name, value in without_language(model).named_parameters()}

    def of_kind(self, kind: str) -> "Structure":
        """Return it with the shapes of the media half for a kind of media alone."""
        part = copy(self)
        part.others = {name for name in self.shapes if _is_of_others(self._config, name, kind)}
        part.shapes = {name: shape for name, shape in self.shapes.items() if name not in part.others}
        return part

    def is_media(self, file: str) -> bool:
        """True if a tensor of the directory belongs to the media half."""
        return self._renamed(file)[0] in self.shapes

    def language_names(self, files: Iterable[str]) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return the prefixes (of the language model alone, in a directory with the names `files`) of its tensors and
        of the output layer's. Raise EncoderError if the directory lacks it."""
        stored = self.stored_names(files)
        if self._table not in stored:
            raise EncoderError(f"it has no tensor for {self._table} of {self._class}")
        table, head = stored[self._table], stored.get(self._head, "lm_head.weight")
        return ("model.", table.removesuffix("embed_tokens.weight")), ("lm_head.", head.removesuffix("weight"))


@cache
def structure_of(path: str) -> Structure:
    """Return the structure of a directory's model. Raise EncoderError if transformers cannot build it."""
    return Structure(hf_config(path))

"""A language model that is a class of `transformers`, as it is: its sizes, from its config.json."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from encoders.errors import EncoderError
from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, key, value_faults
from mimo_train.config.llm_spec import LlmSpec

if TYPE_CHECKING:
    from encoders.transformers_media.tensors import Tensors

NOT_SAVED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "auto_map")
"""Keys of a config.json that say how it was saved, or name code to load."""

RECURRENT = ("conv", "linear_attention", "hybrid", "hybrid_sliding")
"""Entries of `layer_types` of layers that see earlier documents of a packed row."""
CHOOSING = ("index_topk", "indexer_budget", "compress_rates")
"""Beginnings of keys of classes in which tokens attend to chosen ones, or to several as one."""
MODEL = "model."
"""Prefix of the parameters of the class in its module."""


_NOT_ADAPTED = re.compile(r"\bexperts\.|\b(gate|router)$|\b(mixer|mamba)\.out_proj$")
"""Matches linear layers of experts and routers, and those whose weight fused kernels of Mamba read past the layer."""


TEXT_PARTS = {"text_config", "llm_config", "thinker_config"}
"""Keys of the language model's part in a config.json of several parts."""


class Unsupported(ValueError):
    """A model that transformers has no class for, or that cannot be trained; says why."""


@dataclass
class TransformersLlm(Section):
    """A causal language model of `transformers`, as it is, has these keys instead."""

    name: str = "transformers"
    """Free name, shown in tables."""
    vocab_size: int = key(0, at_least=0, at_most=2**28, zero_means="as in `model_config`")
    """Rows of the embedding; 0: as in `model_config`. Further rows are initialised."""
    model_config: dict[str, Any] = field(default_factory=dict)
    """Contents of config.json."""

    @property
    def sizes(self) -> "TransformersSizes":
        """Sizes of the model. Raises Unsupported."""
        return _sizes(self.name, self.vocab_size, _text(self.model_config))

    def faults(self, prefix: str) -> Iterator[Fault]:
        """Yield values that make no model; `prefix`: config key of this section."""
        faults = list(value_faults(self, prefix))
        yield from faults
        if faults:
            return
        try:
            sizes = self.sizes
            parameters_of(self.model_config)
        except Unsupported as error:
            yield Fault(f"{prefix}.model_config", str(error))
            return
        stored = sizes.stored_vocab_size
        if sizes.vocab_size < stored:
            yield Fault(
                f"{prefix}.vocab_size",
                f"must be at least the {stored} rows of the model, is {self.vocab_size}. Set it to {stored} or more",
            )


@dataclass
class TransformersSizes(LlmSpec):
    """Sizes of a model of `transformers`, for estimates. Those that its config.json does not name have defaults."""

    model_config: dict[str, Any] = field(default_factory=dict)
    """Contents of config.json."""
    stored_vocab_size: int = 0
    """Rows of the embedding by config.json."""
    is_balanced: bool = False
    """True if the class adds a load-balancing loss over a microbatch (`output_router_logits`)."""

    @property
    def balances_microbatches(self) -> bool:
        return self.is_balanced


def saved_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json that make the model."""
    return {name: value for name, value in config.items() if name not in NOT_SAVED}


def is_causal_language_model(model_type: object) -> bool:
    """True if transformers has a causal language model of a type. Imports transformers."""
    return model_type in causal_classes()


def causal_classes() -> dict[str, str]:
    """Return the class of each type of causal language model. Imports transformers."""
    from transformers.models.auto import modeling_auto as auto

    # Text alone, but only in the mapping of models with media: Mistral 4.
    further = {kind: name for kind, name in auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items() if "CausalLM" in name}
    return {**further, **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}


def class_of(config: Any) -> Any:
    """Return the class of a `PretrainedConfig`: a causal language model, or a model of several parts. Imports
    transformers. Raises Unsupported."""
    import transformers

    if is_of_parts(config):
        from encoders.transformers_media import directory

        try:
            return directory.class_of(config)
        except EncoderError as error:
            raise Unsupported(str(error)) from error
    return getattr(transformers, causal_classes()[config.model_type])


def is_of_parts(config: Any) -> bool:
    """True if a model has a language model among other parts."""
    return config.get_text_config(decoder=True) is not config


def alone(model: Any) -> Any:
    """Take the other parts out of a model of `class_of`, in place, and return it."""
    from encoders.transformers_media.directory import without_media

    return without_media(model) if is_of_parts(model.config) else model


def parameters_of(model_config: Mapping[str, Any]) -> "Parameters":
    """Return the parameters of a model, built without memory. Raises Unsupported."""
    return _parameters(_text(model_config))


def unlike(model_config: Mapping[str, Any], files: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return what a directory with tensors of these shapes lacks of a model. Raises Unsupported."""
    return tensors_of_class(model_config).unlike(files)


def tensors_of_class(model_config: Mapping[str, Any]) -> "Tensors":
    """Return the names of a model's parameters and saved buffers, in memory and in directories. Raises Unsupported."""
    import torch

    from encoders.transformers_media.tensors import Tensors

    config = transformers_config(model_config)
    with torch.device("meta"):
        model = alone(class_of(config)._from_config(config))
    tensors = Tensors(model)
    tensors.shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    return tensors


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each parameter by its name; tied ones once."""
    embedding: str
    """Name of the input embedding."""
    output: str
    """Name of the output layer's weight; that of the embedding if they are tied."""
    is_recurrent: bool
    """True if layers carry a state from one token to the next, so that packed documents would mix."""
    chooses_tokens: bool
    """True if a token attends to chosen ones (sparse indexers), which the documents of a packed row would change."""
    chunk: int
    """Tokens of a row that attend to each other alone in some layers (Llama 4); 0 without such layers."""
    can_recompute: bool
    """True if the class supports gradient checkpointing."""
    linears: Mapping[str, tuple[int, int]]
    """(outputs, inputs) of each linear layer that can have adapters."""
    has_deepstack: bool
    """True if the first layers can add features of media (`deepstack_visual_embeds`)."""
    active_experts: float
    """Share of the experts that a token goes through; 1 without experts."""

    def count(self, rows: int = 0) -> int:
        """Return the number of parameters, with `rows` further rows of the embedding and of the output layer."""
        tables = {self.embedding, self.output}
        return sum(prod(shape) for shape in self.shapes.values()) + rows * sum(self.shapes[name][1] for name in tables)

    def multiplied(self) -> Iterator[tuple[str, float]]:
        """Yield (name, elements that multiply a token) of every matrix but the two of the vocabulary. Experts are
        tensors of three dimensions, or lists."""
        for name, shape in self.shapes.items():
            if len(shape) > 1 and name not in (self.embedding, self.output):
                share = self.active_experts if len(shape) == 3 and "expert" in name or ".experts." in name else 1.0
                yield name, prod(shape) * share


def _text(model_config: Mapping[str, Any]) -> str:
    return json.dumps(model_config, sort_keys=True)


@cache
def _hf_config(text: str) -> Any:
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    config = json.loads(text)
    kind = config.get("model_type")
    # Early files of several parts may have the language model's keys at the top level.
    parts = {*config, *(CONFIG_MAPPING[kind].sub_configs if kind in CONFIG_MAPPING else ())}
    if kind not in CONFIG_MAPPING or not (is_causal_language_model(kind) or TEXT_PARTS & parts):
        import transformers

        raise Unsupported(
            f"model_type {kind!r} is no causal language model of transformers {transformers.__version__}. Choose "
            "another model, or a version that has it"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise Unsupported(
            f"quantization_config {method}: quantised weights cannot be trained. Load the model with "
            "transformers, dequantise it and save it"
        )
    try:
        decoded = PreTrainedConfig._decode_special_floats(config)  # infinity
        if kind == "rwkv":  # divides its weights in evaluation, against overflows of fp16
            decoded["rescale_every"] = 0
        read = CONFIG_MAPPING[kind].from_dict(decoded)
    except Exception as error:  # whatever a class raises for values that it does not accept
        raise Unsupported(f"transformers cannot read it: {' '.join(str(error).split())}. Correct the key") from error
    if any(part.is_encoder_decoder for part in (read, getattr(read, "text_config", read))):
        names = ", ".join(config.get("architectures") or [kind])
        raise Unsupported(f"{names} has an encoder and a decoder of text, which is not supported. Choose another model")
    return read


def transformers_config(model_config: Mapping[str, Any]) -> Any:
    """Return a new `PretrainedConfig`. Raises Unsupported."""
    import copy

    return copy.deepcopy(_hf_config(_text(model_config)))


@cache
def _sizes(name: str, vocab_size: int, text: str) -> TransformersSizes:
    outer = _hf_config(text)
    config = outer.get_text_config(decoder=True)

    def number(*names: str, default: int = 0) -> int:
        values = (_value(config, name) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), default)

    hidden, stored = number("hidden_size", "d_model"), number("vocab_size")
    layers = number("num_hidden_layers", "num_layers")
    if not (hidden and stored and layers):
        raise Unsupported(
            f"{type(config).__name__} has no hidden_size, num_hidden_layers or vocab_size. Choose another model"
        )
    heads = number("num_attention_heads", "num_heads", default=1)
    return TransformersSizes(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=number("num_key_value_heads"),
        head_size=number("head_dim", default=max(1, hidden // heads)),
        ffn_hidden_size=number("intermediate_size", "ffn_dim", default=4 * hidden),
        vocab_size=vocab_size or stored,
        max_positions=number("max_position_embeddings"),
        tie_embeddings=bool(getattr(outer, "tie_word_embeddings", False)),
        init_std=float(getattr(config, "initializer_range", None) or LlmSpec.init_std),
        mrope_section=_mrope_section(getattr(config, "rope_parameters", None) or {}),
        model_config=json.loads(text),
        stored_vocab_size=stored,
        is_balanced=bool(getattr(config, "output_router_logits", False)),
    )


def _value(config: Any, name: str) -> Any:
    """Return the value of a key, the largest if layers have values of their own; None if it is absent."""
    if name in (config.per_layer_attributes or ()):
        return max(getattr(layer, name, None) or 0 for layer in config.per_layer_config)
    return getattr(config, name, None)


def _mrope_section(rope: Mapping[str, Any]) -> list[int]:
    """Return the sections of rotary parameters, which may be those of each type of layers; empty without sections."""
    parts = (rope, *(part for part in rope.values() if isinstance(part, Mapping)))
    return next((list(part["mrope_section"]) for part in parts if part.get("mrope_section")), [])


@cache
def _parameters(model_config: str) -> Parameters:
    import torch

    from encoders.transformers_media.directory import output_of

    config = transformers_config(json.loads(model_config))
    try:
        with torch.device("meta"):
            model = alone(class_of(config)._from_config(config))
    except Exception as error:  # whatever a class raises for sizes that do not fit
        raise Unsupported(
            f"transformers cannot build it: {str(error).splitlines()[0] if str(error) else repr(error)}"
        ) from error
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embedding, output = model.get_input_embeddings(), output_of(model)
    if embedding is None or output is None:
        raise Unsupported(f"{type(model).__name__} has no input embedding or no output layer. Choose another model")
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or ()
    return Parameters(
        {name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        names[id(embedding.weight)],
        names[id(output.weight)],
        bool(getattr(model, "_is_stateful", False)) or any(kind in RECURRENT for kind in kinds),
        any(name.startswith(CHOOSING) and getattr(text, name) for name in vars(text)),
        int(getattr(text, "attention_chunk_size", None) or 0),
        bool(model.supports_gradient_checkpointing),
        {
            name: (module.out_features, module.in_features)
            for name, module in model.named_modules()
            if type(module) is torch.nn.Linear and module is not output and not _NOT_ADAPTED.search(name)
        },
        not {"deepstack_visual_embeds", "deepstack_features"}.isdisjoint(
            inspect.signature(model.get_decoder().forward).parameters
        ),
        _active_experts(text),
    )


def _active_experts(config: Any) -> float:
    def first(*names: str) -> Any:
        return next((value for name in names if (value := _value(config, name))), None)

    chosen = first("num_experts_per_tok", "moe_topk", "top_k_experts")
    experts = first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return chosen / experts if isinstance(chosen, int) and isinstance(experts, int) and 0 < chosen <= experts else 1.0

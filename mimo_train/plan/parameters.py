"""Numbers of parameters, of whole modules and of one rank, from sizes alone. Imports no torch."""

import math
from dataclasses import dataclass

from encoders.plain.spec import PlainSpec
from encoders.projectors.spec import ProjectorSpec
from encoders.spec import EncoderSpec, joined_width, layer_parameters
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE, PARTS
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.plan.layout import layers_of_stage

VOCAB_MULTIPLE = 128
"""Vocabularies are padded to a multiple of this, whatever the layout: padding with tp would change the softmax."""


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the embedding for a tokenizer of `vocab_size` tokens."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a part, by whether they are trained."""

    total: int
    trainable: int

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        return ParameterCount(self.total + other.total, self.trainable + other.trainable)


def language_parameters(
    llm: LlmSpec, vocab: int, sequence_length: int, *, tp: int = 1, stage: int = 0, stages: int = 1
) -> int:
    """Parameters of a language model on one rank of pipeline stage `stage` (from 0) of `stages`, without its experts.

    Attention and feed-forward matrices are divided over tp; norms, routers and the biases behind row-parallel layers
    are not.
    The first stage has the embeddings, the last one the output layer and the final norm; tied embeddings are on both
    when these are two stages.
    """
    hidden, head = llm.hidden_size, llm.hidden_size // llm.num_attention_heads
    qkv = head * (llm.num_attention_heads + 2 * (llm.num_query_groups or llm.num_attention_heads))
    ffn = llm.shared_expert_ffn_hidden_size if llm.num_experts else llm.ffn_hidden_size
    up = (2 if llm.activation == "swiglu" else 1) * ffn
    norm = 2 if llm.normalization == "LayerNorm" else 1
    split = hidden * qkv + hidden * hidden + hidden * up + ffn * hidden
    whole = 2 * hidden * norm + (2 * head * norm if llm.qk_norm else 0)
    whole += hidden * (llm.num_experts + llm.shared_expert_gate)
    if llm.bias:
        split, whole = split + qkv + up, whole + 2 * hidden
    count = layers_of_stage(llm.num_layers, stage, stages) * (split // tp + whole)
    first, last = stage == 0, stage == stages - 1
    if first:
        count += sequence_length * hidden if llm.position == "learned" else 0
    if last:
        count += hidden * norm
    tables = 1 if llm.tie_embeddings else first + last
    return count + (tables if first or last else 0) * math.ceil(vocab / tp) * hidden


def expert_parameters(llm: LlmSpec, *, ep: int = 1, etp: int = 1, stage: int = 0, stages: int = 1) -> int:
    """Parameters of the experts on one rank of a pipeline stage: dealt to ep ranks, each cut over etp."""
    matrices = 3 if llm.activation == "swiglu" else 2
    expert = matrices * llm.hidden_size * (llm.expert_ffn_hidden_size or llm.ffn_hidden_size)
    return layers_of_stage(llm.num_layers, stage, stages) * llm.num_experts // ep * expert // etp


def encoder_parameters(encoder: EncoderSpec | PlainSpec, *, tp: int = 1, stage: int = 0, stages: int = 1) -> int:
    """Parameters of an encoder on one rank of pipeline stage `stage` (from 0) of `stages`.

    The matrices of its layers are divided over tp, the rest is not. The first stage has the embeddings, the last one
    the final norm.
    """
    if isinstance(encoder, PlainSpec):
        return encoder.num_parameters()
    hidden, ffn = encoder.hidden_size, encoder.ffn_hidden_size
    layer, norm = layer_parameters(encoder)
    split = 4 * hidden * hidden + 3 * hidden + 2 * hidden * ffn + ffn
    count = layers_of_stage(encoder.num_layers, stage, stages) * (layer - split + split // tp)
    if stage == 0:
        count += encoder.num_parameters() - encoder.num_layers * layer - norm
    return count + (norm if stage == stages - 1 else 0)


def projector_parameters(projector: ProjectorSpec, width: int, language_width: int, *, tp: int = 1) -> int:
    """Parameters on one rank of a projector of features of `width`: all but the last bias of an mlp are divided over
    tp."""
    total = projector.num_parameters(width, language_width)
    whole = language_width if projector.kind == "mlp" else 0
    return whole + (total - whole) // tp


def freeze_patterns(module: ModuleConfig) -> list[str]:
    """The entries of `freeze` that are shell patterns of parameter names. Counts here take them as trained."""
    return [entry for entry in module.freeze if entry not in PARTS]


def module_parameters(
    cfg: ConfigContainer,
    name: str,
    vocab: int,
    *,
    tp: int = 1,
    ep: int = 1,
    etp: int = 1,
    stage: int = 0,
    stages: int = 1,
) -> dict[str, ParameterCount]:
    """Parameters on one rank by part: encoder and projector, or llm and its experts. With the defaults, those of the
    whole module."""
    module, place = cfg.modules[name], {"stage": stage, "stages": stages}
    if name == LANGUAGE:
        counts = {"llm": language_parameters(cfg.llm, vocab, cfg.data.sequence_length, tp=tp, **place)}
        if cfg.llm.num_experts:
            counts["experts"] = expert_parameters(cfg.llm, ep=ep, etp=etp, **place)
    else:
        width = cfg.llm.hidden_size
        counts = {"encoder": encoder_parameters(module.encoder, tp=tp, **place)}
        if stage == stages - 1:
            counts["projector"] = projector_parameters(
                module.projector, joined_width(module.encoder, module.projector), width, tp=tp
            )
    frozen = [*module.freeze, *(["experts"] if "llm" in module.freeze else [])]
    if module.lora.rank:
        frozen += ["llm", "experts", "encoder"]
    parts = {part: ParameterCount(count, 0 if part in frozen else count) for part, count in counts.items()}
    if module.lora.rank and not isinstance(module.encoder, PlainSpec):
        spec = module.llm or module.encoder
        adapters = layers_of_stage(spec.num_layers, stage, stages) * module.lora.num_parameters(spec, tp)
        parts["adapters"] = ParameterCount(adapters, adapters)
    return parts

"""Numbers of parameters of modules and of single ranks, from sizes alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from data.text_format import plural
from encoders.base import LayeredSpec
from encoders.plain.spec import PlainSpec
from encoders.projectors.spec import ProjectorSpec
from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE, PARTS
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.config.transformers_llm import TransformersSizes, parameters_of
from mimo_train.layout.adapters import adapted_linears, adapter_parameters, adapts_projector
from mimo_train.layout.ranks import layers_of_stage, stage_layers

VOCAB_MULTIPLE = 128
"""Vocabularies are padded to a multiple of this at any layout, so that checkpoints fit every tp."""


def padded_vocab_size(vocab_size: int) -> int:
    """Return the rows of the embedding for a vocabulary of `vocab_size` tokens."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def embedding_rows(llm: LlmSpec, tokens: int) -> int:
    """Return the rows of the embedding, padding included, for a tokenizer of `tokens` tokens."""
    if isinstance(llm, TransformersSizes):
        return llm.vocab_size  # as the class has them, without padding
    return padded_vocab_size(llm.vocab_size or tokens)


def vocabulary_faults(llm: LlmSpec, tokens: int) -> Iterator[Fault]:
    """Yield the fault of an embedding with fewer rows than `tokens` text tokens; media placeholders need none."""
    if 0 < llm.vocab_size < tokens:
        yield Fault(
            f"modules.{LANGUAGE}.llm.vocab_size",
            f"the embedding has {plural(llm.vocab_size, 'row')} and the tokenizer {plural(tokens, 'token')} of text: "
            "set it to at least "
            f"{tokens}, or change data.tokenizer",
        )


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a part: all, and those that are trained."""

    total: int
    trainable: int

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        return ParameterCount(self.total + other.total, self.trainable + other.trainable)


def output_rows(cfg: ConfigContainer, vocab: int) -> int:
    """Return the rows of the language model's output layer; `vocab`: rows of the embedding."""
    return 1 if cfg.traits.value_head else vocab


def language_parameters(
    llm: LlmSpec,
    vocab: int,
    sequence_length: int,
    *,
    tp: int = 1,
    stage: int = 0,
    stages: int = 1,
    chunks: int = 1,
    value_head: bool = False,
) -> int:
    """Return the parameters of a language model on one rank of stage `stage` (from 0) of `stages`, without its experts.
    tp divides attention and feed-forward matrices, but not norms, routers and the biases after row-parallel layers. The
    first stage has the embeddings, the last one the output layer and the final norm; tied embeddings are on both.
    `value_head`: it ends in one number for each token."""
    if isinstance(llm, TransformersSizes):
        return parameters_of(llm.model_config).count(llm.vocab_size - llm.stored_vocab_size)
    hidden = llm.hidden_size
    layers = stage_layers(llm.num_layers, stage, stages, chunks)
    count = sum(llm.layer(layer).parameters(tp) for layer in layers)
    first, last = stage == 0, stage == stages - 1
    if first:
        count += sequence_length * hidden if llm.position == "learned" else 0
    if last:
        count += hidden * (llm.norm_vectors + value_head)
    return count + vocabulary_parameters(llm, vocab, tp, stage, stages, value_head=value_head)


def vocabulary_parameters(
    llm: LlmSpec, vocab: int, tp: int, stage: int, stages: int, *, value_head: bool = False
) -> int:
    """Return the parameters of embedding and output layer on one rank. Arguments as in `language_parameters`."""
    first, last = stage == 0, stage == stages - 1
    tables = first if value_head else first or last if llm.tie_embeddings else first + last
    return tables * math.ceil(vocab / tp) * llm.hidden_size


def expert_parameters(
    llm: LlmSpec, *, ep: int = 1, etp: int = 1, stage: int = 0, stages: int = 1, chunks: int = 1
) -> int:
    """Return the parameters of the experts on one rank of a pipeline stage: split over ep ranks, and each over etp."""
    layers = stage_layers(llm.num_layers, stage, stages, chunks)
    return sum(llm.layer(layer).feed_forward.expert_parameters(ep, etp) for layer in layers)


def encoder_parameters(encoder: LayeredSpec, *, tp: int = 1, stage: int = 0, stages: int = 1) -> int:
    """Return the parameters of an encoder on one rank of pipeline stage `stage` (from 0) of `stages`. tp divides the
    matrices of its layers, and nothing else. The first stage has the embeddings, the last one the final norm."""
    if isinstance(encoder, PlainSpec):
        return encoder.num_parameters()
    if len(parts := encoder.parts) > 1:
        return sum(encoder_parameters(part, tp=tp, stage=stage, stages=stages) for part in parts.values())
    assert isinstance(encoder, LayeredSpec)
    layer, split, layers = encoder.layer_parameters, encoder.split_parameters, encoder.built_layers
    last = encoder.norm_parameters if encoder.final_norm else 0
    count = layers_of_stage(layers, stage, stages) * (layer - split + split // tp)
    if stage == 0:
        count += encoder.num_parameters() - layers * layer - last
    return count + (last if stage == stages - 1 else 0)


def projector_parameters(projector: ProjectorSpec, width: int, language_width: int, *, tp: int = 1) -> int:
    """Return the parameters on one rank of a projector of features of `width`."""
    split, replicated = projector.parameters(width, language_width)
    return replicated + split // tp


def freeze_patterns(module: ModuleConfig) -> list[str]:
    """Return the entries of `freeze` that are shell patterns of parameter names. Counts here take them as trained."""
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
    vpp: int = 1,
) -> dict[str, ParameterCount]:
    """Return the parameters on one rank by part: encoder and projector, or llm and experts (with their adapters), and
    adapters."""
    module, place = cfg.modules[name], {"stage": stage, "stages": stages}
    if name == LANGUAGE:
        chunks = vpp if stages > 1 else 1
        llm = language_parameters(
            cfg.llm,
            vocab,
            cfg.data.sequence_length,
            tp=tp,
            stage=stage,
            stages=stages,
            chunks=chunks,
            value_head=cfg.traits.value_head,
        )
        counts = {"llm": llm}
        if cfg.llm.num_experts:
            counts["experts"] = expert_parameters(cfg.llm, ep=ep, etp=etp, **place, chunks=chunks)
    else:
        width = cfg.llm.hidden_size
        counts = {"encoder": encoder_parameters(module.encoder, tp=tp, **place)}
        if stage == stages - 1:
            counts["projector"] = projector_parameters(
                module.projector, module.encoder.joined_width(module.projector.merge), width, tp=tp
            )
    frozen = [*module.freeze, *(["experts"] if "llm" in module.freeze else [])]
    if module.lora.rank:
        frozen += ["llm", "experts", "encoder"]
        frozen += ["projector"] if adapts_projector(adapted_linears(name, module, cfg.llm.hidden_size)) else []
    parts = {part: ParameterCount(count, 0 if part in frozen else count) for part, count in counts.items()}
    if module.lora.modules_to_save:
        tables = _saved_tables(module, first=stage == 0, last=stage == stages - 1)
        saved = tables * math.ceil(vocab / tp) * cfg.llm.hidden_size
        parts["llm"] = ParameterCount(counts["llm"], 0 if "llm" in module.freeze else saved)
    if module.lora.rank and not isinstance(module.encoder, PlainSpec):
        dense, of_experts = adapter_parameters(
            name, module, cfg.llm.hidden_size, tp=tp, ep=ep, etp=etp, **place, vpp=vpp
        )
        parts["adapters"] = ParameterCount(dense, dense)
        if of_experts:
            parts["experts"] += ParameterCount(of_experts, of_experts)
    return parts


def _saved_tables(module: ModuleConfig, *, first: bool, last: bool) -> int:
    """Return the number of vocabulary tables on a stage that are trained next to adapters."""
    has_input, has_output = ("embed_tokens" in module.lora.modules_to_save, "lm_head" in module.lora.modules_to_save)
    if module.llm.tie_embeddings:
        return int(has_input and (first or last))
    return (has_input and first) + (has_output and last)

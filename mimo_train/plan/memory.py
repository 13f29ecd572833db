"""Estimates of memory per rank, from sizes alone. Imports no torch.

Counted: weights, gradients, optimizer states, and the activations that the backward pass needs. Not counted: the CUDA
context, communication buffers, temporary workspaces, fragmentation, and pictures as they are read.

Symbols in the formulas: s tokens of one sample, b samples of one microbatch on one rank, h hidden size, f feed-forward
width, k width of all key heads, t tensor parallel size, v vocabulary, e bytes of one activation (4 in fp32, 2 in bf16).
Activations follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198), for attention that never stores the s x s scores. What autograd saves on a CPU in fp32, where norms
are not fused, was counted once: 6 % more than the estimate for gpt_tiny and for gpt_tiny_moe, 11 % more for vit_tiny
with its projector.
"""

import math
from dataclasses import dataclass

from encoders.plain.spec import PlainSpec
from encoders.spec import (
    GATED,
    EncoderSpec,
    built_layers,
    deepstack_layers,
    encoders_in,
    joined_width,
    layer_options,
    most_features,
)
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.plan.layout import layers_of_stage, stage_layers
from mimo_train.plan.padding import pack_length
from mimo_train.plan.parameters import ParameterCount, module_parameters
from mimo_train.plan.run import Run
from mimo_train.plan.stages import in_flight

GIB = 1024**3

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one weight or activation, by `train.precision`."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.activations + other.activations,
        )


@dataclass(frozen=True)
class StageMemory:
    """Memory of every rank of one pipeline stage of one module."""

    module: str
    stage: int
    """From 0, within the module."""
    ranks: tuple[int, ...]
    memory: Memory


def parameter_memory(count: ParameterCount, precision: str, dp: int) -> Memory:
    """Weights, gradients and optimizer states of the parameters of one rank, whose states are divided over `dp` ranks.

    Bytes per trained parameter with Megatron-Core's distributed optimizer and Adam (its "Distributed Optimizer" page):
    fp32 4 + 4 + 8 / dp (two moments); bf16 2 + 4 + 12 / dp (fp32 gradients; fp32 master weights and two moments).
    Without the distributed optimizer dp is 1.
    A frozen parameter is a weight and nothing else.
    """
    states = 8 if precision == "fp32" else 12
    return Memory(
        weights=count.total * BYTES[precision],
        gradients=count.trainable * 4,
        optimizer=math.ceil(count.trainable * states / dp),
    )


def layer_activations(
    tokens: int,
    hidden: int,
    ffn: int,
    precision: str,
    *,
    key_width: int = 0,
    gated: bool = False,
    rope: bool = False,
    scaled: bool = False,
    dropout: bool = False,
    query_width: int = 0,
    post_norms: bool = False,
    tp: int = 1,
    sp: bool = False,
) -> int:
    """Bytes that one transformer layer keeps for its backward pass, for `tokens` = s * b tokens on one rank.

    Kept in full on each tensor-parallel rank: the inputs of the two norms and of the two linear layers behind them
    (4 h), what the learned scales of the two branches multiply (2 h where there are some), and the dropout masks of the
    two branches (1 byte each per h). Divided by t: queries, keys, values, the
    output of attention (2 h + 2 k), queries and keys once more when rotated (h + k, since the values keep the unrotated
    ones alive), and the feed-forward activations before and after its function (2 f; 5 f when gated without a fused
    kernel). Sequence parallel divides the first part too. With f = 4 h, k = h, dropout, bf16, no gate and no rotation
    this is the paper's s b h (10 + 24 / t), without its 5 a s / (h t) of stored attention scores, and 34 s b h / t with
    sequence parallel. Where queries have another width q than the hidden states, it takes the place of h in the second
    part. Norms behind attention and the feed-forward block keep their inputs: 2 h more in full.
    """
    size, keys, query = BYTES[precision], key_width or hidden, query_width or hidden
    whole = (6 if post_norms or scaled else 4) * hidden * size + (2 * hidden if dropout else 0)
    split = (2 * query + 2 * keys + (query + keys if rope else 0) + (5 if gated else 2) * ffn) * size
    return tokens * (whole + split) // tp if sp else tokens * whole + tokens * split // tp


def stack_activations(layers: int, layer: int, boundary: int, in_flight: int, recompute: str) -> int:
    """Bytes of `layers` layers with `in_flight` microbatches between their forward and their backward pass.

    `layer`: `layer_activations`. `boundary`: the input of one layer (e s b h; 2 s b h in the paper's half precision),
    which is all that full recompute keeps per layer; the layer that is being computed again is there in full once.
    Selective recompute saves the attention scores, which our attention does not store: it counts as none.
    """
    if recompute == "full":
        return layers * boundary * in_flight + (layer if layers else 0)
    return layers * layer * in_flight


def expert_activations(
    tokens: int, llm: LlmSpec, precision: str, *, tp: int = 1, etp: int = 1, sp: bool = False
) -> int:
    """Bytes that the experts of one layer keep for the backward pass, in the place of its feed-forward activations.

    With k experts a token of width f, E experts and balanced routing, a rank's experts see k rows for each token of
    each of the etp ranks that share an expert. A row keeps its input h and 6 f / etp (3 f without a gate): one f more
    than in a dense layer, the product with the router's probability. The router keeps 3 E numbers in fp32, the shared
    expert what a dense block does.
    """
    size, gated, width = BYTES[precision], llm.is_gated, llm.expert_width
    own = tokens // (tp if sp else 1)
    rows = own * llm.experts_per_token * etp
    routed = rows * (llm.hidden_size + (6 if gated else 3) * width // etp) * size
    shared = tokens * (5 if gated else 2) * llm.shared_expert_ffn_hidden_size * size // tp
    return routed + shared + own * 3 * llm.num_experts * 4


def output_activations(tokens: int, hidden: int, vocab: int, precision: str, tp: int = 1, sp: bool = False) -> int:
    """Bytes of the end of the language model, for one microbatch: the inputs of the final norm and of the output layer
    (2 h), the logits (v / t), and their softmax in fp32 that the cross entropy keeps (4 v / t)."""
    size = BYTES[precision]
    return tokens * 2 * hidden * size // (tp if sp else 1) + tokens * math.ceil(vocab / tp) * (size + 4)


def stage_memory(run: Run, name: str, vocab: int, media_per_sample: float = 1.0) -> list[StageMemory]:
    """Memory of each pipeline stage of one module.

    Args:
        vocab: rows of the embedding (see `padded_vocab_size`).
        media_per_sample: pictures of this module in one sample, on average.
    """
    cfg, module, stages = run.cfg, run.layout.modules[name], []
    for stage in range(module.pp):
        sizes = {"tp": module.tp, "ep": module.ep, "etp": module.etp, "vpp": module.vpp}
        sizes |= {"stage": stage, "stages": module.pp}
        counts = module_parameters(cfg, name, vocab, **sizes)
        experts = counts.pop("experts", ParameterCount(0, 0))
        dense, divided = sum(counts.values(), ParameterCount(0, 0)), cfg.optim.distributed_optimizer
        memory = parameter_memory(dense, cfg.train.precision, module.dp * module.cp if divided else 1)
        memory += parameter_memory(experts, cfg.train.precision, module.expert_dp if divided else 1)
        if name == LANGUAGE:
            activations = _language_activations(run, stage, vocab)
        else:
            activations = _encoder_activations(run, name, stage, media_per_sample)
        stages.append(
            StageMemory(name, stage, tuple(module.stage_ranks(stage)), memory + Memory(activations=activations))
        )
    return stages


def rank_memory(stages: list[StageMemory]) -> dict[int, Memory]:
    """Memory of each rank, over all modules on it."""
    total: dict[int, Memory] = {}
    for stage in stages:
        for rank in stage.ranks:
            total[rank] = total.get(rank, Memory()) + stage.memory
    return dict(sorted(total.items()))


def score_activations(sequence: int, samples: int, heads: int, tp: int = 1, cp: int = 1) -> int:
    """Bytes that soft-capped scores of one layer keep for the backward pass: their tanh and their softmax, 4 + 4 bytes
    in fp32, 2 + 4 + 2 in half precision with the rounded weights."""
    return samples * heads // tp * sequence * sequence // cp * 8


def _language_activations(run: Run, stage: int, vocab: int) -> int:
    cfg, sizes, recompute = run.cfg, run.layout.language, run.cfg.recompute_of(LANGUAGE)
    llm, train = cfg.llm, cfg.train
    size, length = BYTES[train.precision], cfg.data.sequence_length
    row = pack_length(cfg) if cfg.data.pack else length * train.micro_batch_size
    samples, tokens = math.ceil(row / length), row // sizes.cp
    scores = 0
    if llm.attention_softcap:
        scores = score_activations(length, samples, llm.num_attention_heads, sizes.tp, sizes.cp)
    own = stage_layers(llm.num_layers, stage, sizes.pp, sizes.vpp)
    kinds = [llm.has_experts(layer) for layer in own]
    each = {kind: _layer_activations(run, tokens, experts=kind) for kind in set(kinds)}
    layer = -(-sum(each[kind] for kind in kinds) // len(kinds)) + (scores if recompute != "selective" else 0)
    boundary = tokens * llm.hidden_size * size // (sizes.tp if sizes.sp else 1)
    kept = stack_activations(len(own) // sizes.vpp, layer, boundary, in_flight(run, LANGUAGE, stage), recompute)
    kept += scores if recompute == "selective" else 0  # of the layer that is computed again
    if stage == sizes.pp - 1:
        kept += output_activations(tokens, llm.hidden_size, vocab, train.precision, sizes.tp, sizes.sp)
        kept += tokens * math.ceil(vocab / sizes.tp) * size if llm.logit_softcap else 0  # their tanh
    return kept


def _layer_activations(run: Run, tokens: int, *, experts: bool) -> int:
    """Of one layer of the language model, scores left out."""
    llm, train, sizes = run.cfg.llm, run.cfg.train, run.layout.language
    kept = layer_activations(
        tokens,
        llm.hidden_size,
        0 if experts else llm.ffn_hidden_size,
        train.precision,
        # With fewer key heads than tensor-parallel ranks, each rank has one.
        key_width=llm.head_width * max(llm.key_heads, sizes.tp),
        query_width=llm.query_width,
        gated=llm.is_gated,
        rope=llm.position == "rope",
        dropout=llm.dropout > 0,
        post_norms=llm.post_norms,
        tp=sizes.tp,
        sp=sizes.sp,
    )
    if experts:
        kept += expert_activations(tokens, llm, train.precision, tp=sizes.tp, etp=sizes.etp, sp=sizes.sp)
    return kept


def _encoder_activations(run: Run, name: str, stage: int, media_per_sample: float) -> int:
    """A frozen encoder keeps nothing for a backward pass; one layer is there while it computes. Media of different
    sizes count as the largest."""
    cfg, sizes = run.cfg, run.layout.modules[name]
    module, train = cfg.modules[name], cfg.train
    encoder, projector, size = module.encoder, module.projector, BYTES[train.precision]
    media = math.ceil(run.batch.microbatch_samples / sizes.dp * media_per_sample)
    flying = in_flight(run, name, stage)
    if isinstance(encoder, PlainSpec):
        module_kept = media * encoder.activations() * size
        kept = 0 if "encoder" in module.freeze else module_kept * (1 if cfg.recompute_of(name) == "full" else flying)
        return kept + _projector_activations(cfg, name, media, sizes.tp) * flying
    kept = sum(
        _layers_activations(run, name, stage, part, media * part.most_inner_tokens(projector.merge))
        for part in encoders_in(encoder).values()
    )
    return kept if stage < sizes.pp - 1 else kept + _projector_activations(cfg, name, media, sizes.tp) * flying


def _layers_activations(run: Run, name: str, stage: int, encoder: EncoderSpec, tokens: int) -> int:
    """Bytes that the layers of an encoder on one rank of a stage keep of `tokens` in each microbatch."""
    module, train, sizes = run.cfg.modules[name], run.cfg.train, run.layout.modules[name]
    layer = layer_activations(
        tokens,
        encoder.hidden_size,
        encoder.ffn_hidden_size,
        train.precision,
        gated=encoder.activation == GATED,
        rope=getattr(encoder, "rotary_positions", False),
        scaled=layer_options(encoder)["layer_scale"] > 0,
        dropout=encoder.dropout > 0,
        tp=sizes.tp,
        sp=sizes.sp,
    )
    layers = layers_of_stage(built_layers(encoder), stage, sizes.pp)
    if "encoder" in module.freeze:
        return layer if layers else 0
    boundary = tokens * encoder.hidden_size * BYTES[train.precision] // (sizes.tp if sizes.sp else 1)
    return stack_activations(layers, layer, boundary, in_flight(run, name, stage), run.cfg.recompute_of(name))


def _projector_activations(cfg: ConfigContainer, name: str, media: int, tp: int) -> int:
    """Bytes that the projector of module `name` keeps of one microbatch: its input and output, and inside an mlp; of
    each layer of a resampler its normalised features, keys and values, and what a layer keeps of the latents."""
    module, width, size = cfg.modules[name], cfg.llm.hidden_size, BYTES[cfg.train.precision]
    encoder, projector, resampler = module.encoder, module.projector, module.projector.resampler
    joined = joined_width(encoder, projector)
    per_token = joined + width + (joined if projector.norm else 0)
    if projector.kind == "mlp":
        per_token += (5 if projector.gated else 2) * (projector.ffn_hidden_size or width) // tp
    # Mergers of states keep their input, and what is behind norm, first linear layer and activation.
    per_token += deepstack_layers(encoder) * (4 * joined + width)
    kept = most_features(encoder, projector) * per_token * size
    if resampler.latents:
        head = resampler.head_width(width)
        keys = resampler.key_heads * head
        layer = layer_activations(
            resampler.latents,
            width,
            resampler.ffn_width(width),
            cfg.train.precision,
            key_width=keys,
            query_width=resampler.num_attention_heads * head,
            gated=resampler.activation == GATED,
            tp=tp,
        )
        features = most_features(encoder, projector) * (2 * width + 2 * keys // tp) * size
        kept += resampler.num_layers * (layer + features)
    return media * kept

"""Estimates of parameters and memory per rank, from sizes alone. Imports no torch.

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

from encoders.projectors.spec import ProjectorSpec
from encoders.spec import EncoderSpec, joined_width, layer_parameters
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema import LANGUAGE, ConfigContainer, ModuleConfig
from mimo_train.plan.layout import RunLayout, layers_of_stage

GIB = 1024**3

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one weight or activation, by `train.precision`."""


VOCAB_MULTIPLE = 128
"""Vocabularies are padded to a multiple of this, whatever the layout: padding with tp would change the softmax."""


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the embedding for a tokenizer of `vocab_size` tokens."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


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
class ParameterCount:
    """Parameters of a part, by whether they are trained."""

    total: int
    trainable: int

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        return ParameterCount(self.total + other.total, self.trainable + other.trainable)


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
    dropout: bool = False,
    tp: int = 1,
    sp: bool = False,
) -> int:
    """Bytes that one transformer layer keeps for its backward pass, for `tokens` = s * b tokens on one rank.

    Kept in full on each tensor-parallel rank: the inputs of the two norms and of the two linear layers behind them
    (4 h), and the dropout masks of the two branches (1 byte each per h). Divided by t: queries, keys, values, the
    output of attention (2 h + 2 k), queries and keys once more when rotated (h + k, since the values keep the unrotated
    ones alive), and the feed-forward activations before and after its function (2 f; 5 f when gated without a fused
    kernel). Sequence parallel divides the first part too. With f = 4 h, k = h, dropout, bf16, no gate and no rotation
    this is the paper's s b h (10 + 24 / t), without its 5 a s / (h t) of stored attention scores, and 34 s b h / t with
    sequence parallel.
    """
    size, keys = BYTES[precision], key_width or hidden
    whole = 4 * hidden * size + (2 * hidden if dropout else 0)
    split = (2 * hidden + 2 * keys + (hidden + keys if rope else 0) + (5 if gated else 2) * ffn) * size
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
    size, gated = BYTES[precision], llm.activation == "swiglu"
    own = tokens // (tp if sp else 1)
    width = llm.expert_ffn_hidden_size or llm.ffn_hidden_size
    rows = own * llm.experts_per_token * etp
    routed = rows * (llm.hidden_size + (6 if gated else 3) * width // etp) * size
    shared = tokens * (5 if gated else 2) * llm.shared_expert_ffn_hidden_size * size // tp
    return routed + shared + own * 3 * llm.num_experts * 4


def output_activations(tokens: int, hidden: int, vocab: int, precision: str, tp: int = 1, sp: bool = False) -> int:
    """Bytes of the end of the language model, for one microbatch: the inputs of the final norm and of the output layer
    (2 h), the logits (v / t), and their softmax in fp32 that the cross entropy keeps (4 v / t)."""
    size = BYTES[precision]
    return tokens * 2 * hidden * size // (tp if sp else 1) + tokens * math.ceil(vocab / tp) * (size + 4)


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


def encoder_parameters(encoder: EncoderSpec, *, tp: int = 1, stage: int = 0, stages: int = 1) -> int:
    """Parameters of an encoder on one rank of pipeline stage `stage` (from 0) of `stages`.

    The matrices of its layers are divided over tp, the rest is not. The first stage has the embeddings, the last one
    the final norm.
    """
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


PARTS = {"encoder": "encoders.*", "projector": "input_projections.*", "llm": "*"}
"""What `freeze` names as a whole, with the pattern of parameter names it stands for; anything else in it is a shell
pattern itself."""


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
        counts = {"llm": language_parameters(module.llm, vocab, cfg.data.sequence_length, tp=tp, **place)}
        if module.llm.num_experts:
            counts["experts"] = expert_parameters(module.llm, ep=ep, etp=etp, **place)
    else:
        width = cfg.language.llm.hidden_size
        counts = {"encoder": encoder_parameters(module.encoder, tp=tp, **place)}
        if stage == stages - 1:
            counts["projector"] = projector_parameters(
                module.projector, joined_width(module.encoder, module.projector), width, tp=tp
            )
    frozen = [*module.freeze, *(["experts"] if "llm" in module.freeze else [])]
    if module.lora.rank:
        frozen += ["llm", "experts", "encoder"]
    parts = {part: ParameterCount(count, 0 if part in frozen else count) for part, count in counts.items()}
    if module.lora.rank:
        spec = module.llm or module.encoder
        adapters = layers_of_stage(spec.num_layers, stage, stages) * module.lora.num_parameters(spec, tp)
        parts["adapters"] = ParameterCount(adapters, adapters)
    return parts


def pipeline_stages(layout: RunLayout) -> int:
    """Stages that a microbatch passes: the longest encoder that stands apart, then the language model."""
    return max((layout.modules[name].pp for name in layout.apart_encoders), default=0) + layout.language.pp


def bubble(layout: RunLayout) -> float:
    """Share of a step in which a rank waits for the pipeline to fill and drain: (p - 1) / (v m + p - 1) for p stages of
    equal duration, v chunks a stage and m microbatches. Narayanan et al. 2021 (arXiv 2104.04473) give (p - 1) / (v m),
    of the time without the bubble."""
    stages, chunks = pipeline_stages(layout), layout.language.vpp * layout.num_microbatches
    return (stages - 1) / (chunks + stages - 1)


def in_flight(layout: RunLayout, name: str, stage: int) -> int:
    """Microbatches between forward and backward on a stage: as many as stages are left, at most m, under the 1F1B
    schedule. Interleaved in v chunks a stage, those of one chunk each: min(v m, 2 (stages - stage - 1) + (v - 1) stages
    + 1), the warm-up of Megatron-Core 0.19.2 (schedules.py:902) and one more."""
    stages, chunks = pipeline_stages(layout), layout.language.vpp
    if chunks > 1:
        return min(chunks * layout.num_microbatches, 2 * (stages - stage - 1) + (chunks - 1) * stages + 1)
    left = layout.modules[name].pp - stage
    if name != LANGUAGE:
        left = layout.language.pp if name in layout.local_encoders else left + layout.language.pp
    return min(layout.num_microbatches, left)


def stage_memory(
    cfg: ConfigContainer, layout: RunLayout, name: str, vocab: int, media_per_sample: float = 1.0
) -> list[StageMemory]:
    """Memory of each pipeline stage of one module.

    Args:
        vocab: rows of the embedding (see `padded_vocab_size`).
        media_per_sample: pictures of this module in one sample, on average.
    """
    module = layout.modules[name]
    per_stage, stages = module.size // module.pp, []
    for stage in range(module.pp):
        sizes = {"tp": module.tp, "ep": module.ep, "etp": module.etp, "stage": stage, "stages": module.pp}
        counts = module_parameters(cfg, name, vocab, **sizes)
        experts = counts.pop("experts", ParameterCount(0, 0))
        dense, divided = sum(counts.values(), ParameterCount(0, 0)), cfg.optim.distributed_optimizer
        memory = parameter_memory(dense, cfg.train.precision, module.dp * module.cp if divided else 1)
        memory += parameter_memory(experts, cfg.train.precision, module.expert_dp if divided else 1)
        if name == LANGUAGE:
            activations = _language_activations(cfg, layout, stage, vocab)
        else:
            activations = _encoder_activations(cfg, layout, name, stage, media_per_sample)
        first = module.first_rank + stage * per_stage
        ranks = tuple(range(first, first + per_stage))
        stages.append(StageMemory(name, stage, ranks, memory + Memory(activations=activations)))
    return stages


def rank_memory(stages: list[StageMemory]) -> dict[int, Memory]:
    """Memory of each rank, over all modules that stand on it."""
    total: dict[int, Memory] = {}
    for stage in stages:
        for rank in stage.ranks:
            total[rank] = total.get(rank, Memory()) + stage.memory
    return dict(sorted(total.items()))


def _language_activations(cfg: ConfigContainer, layout: RunLayout, stage: int, vocab: int) -> int:
    llm, sizes, train = cfg.language.llm, layout.language, cfg.train
    tokens = cfg.data.sequence_length * train.micro_batch_size // sizes.cp
    key_width = llm.hidden_size // llm.num_attention_heads * (llm.num_query_groups or llm.num_attention_heads)
    layer = layer_activations(
        tokens,
        llm.hidden_size,
        0 if llm.num_experts else llm.ffn_hidden_size,
        train.precision,
        key_width=key_width,
        gated=llm.activation == "swiglu",
        rope=llm.position == "rope",
        dropout=llm.dropout > 0,
        tp=sizes.tp,
        sp=sizes.sp,
    )
    if llm.num_experts:
        layer += expert_activations(tokens, llm, train.precision, tp=sizes.tp, etp=sizes.etp, sp=sizes.sp)
    boundary = tokens * llm.hidden_size * BYTES[train.precision] // (sizes.tp if sizes.sp else 1)
    layers = layers_of_stage(llm.num_layers, stage, sizes.pp) // sizes.vpp
    kept = stack_activations(layers, layer, boundary, in_flight(layout, LANGUAGE, stage), cfg.recompute_of(LANGUAGE))
    if stage == sizes.pp - 1:
        kept += output_activations(tokens, llm.hidden_size, vocab, train.precision, sizes.tp, sizes.sp)
    return kept


def _encoder_activations(
    cfg: ConfigContainer, layout: RunLayout, name: str, stage: int, media_per_sample: float
) -> int:
    """A frozen encoder keeps nothing for a backward pass; one layer is there while it computes. Media of different
    sizes count as the largest."""
    module, sizes, train = cfg.modules[name], layout.modules[name], cfg.train
    encoder, projector, size = module.encoder, module.projector, BYTES[train.precision]
    media = math.ceil(layout.microbatch_samples / sizes.dp * media_per_sample)
    tokens = media * encoder.most_inner_tokens(projector.merge)
    layer = layer_activations(
        tokens,
        encoder.hidden_size,
        encoder.ffn_hidden_size,
        train.precision,
        dropout=encoder.dropout > 0,
        tp=sizes.tp,
        sp=sizes.sp,
    )
    flying, layers = in_flight(layout, name, stage), layers_of_stage(encoder.num_layers, stage, sizes.pp)
    if "encoder" in module.freeze:
        kept = layer if layers else 0
    else:
        boundary = tokens * encoder.hidden_size * size // (sizes.tp if sizes.sp else 1)
        kept = stack_activations(layers, layer, boundary, flying, cfg.recompute_of(name))
    if stage < sizes.pp - 1:
        return kept
    width = cfg.language.llm.hidden_size
    per_token = joined_width(encoder, projector) + width
    if projector.kind == "mlp":
        per_token += 2 * (projector.ffn_hidden_size or width) // sizes.tp
    return kept + media * encoder.most_tokens(projector.merge) * per_token * size * flying

"""Estimates of memory per rank, from sizes alone, for the kernels of a GPU.

Counted for full rows: weights, gradients, optimizer states, activations, and the work at the peak (formulas:
`mimo_train.estimate.activations`). Not counted: the CUDA context, NCCL buffers, fragmentation.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from encoders.base import GATED, LayeredSpec
from encoders.plain.spec import PlainSpec
from mimo_train.config.parts import LANGUAGE, SAVED
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_optim import CHUNK, OptimConfig
from mimo_train.config.schema_train import recompute_parts
from mimo_train.estimate.activations import BYTES, WIDEST_HEAD, output_work
from mimo_train.estimate.flops import frozen_patterns
from mimo_train.estimate.low_precision import fp8_weight_bytes, quantized_bytes
from mimo_train.estimate.parameters import ParameterCount, module_parameters, output_rows, vocabulary_parameters
from mimo_train.estimate.sharding import sharded_bytes
from mimo_train.layout.adapters import quantized_parameters
from mimo_train.layout.batch import pack_length
from mimo_train.layout.fusions import NO_COMPILER, fusions_of
from mimo_train.layout.kernels import NOT_PLAIN
from mimo_train.layout.ranks import ModuleLayout, layers_of_stage, stage_layers
from mimo_train.layout.run import Run, in_flight
from mimo_train.models.blocks.attention.spec import Attention
from mimo_train.models.blocks.base import Layer, Share
from mimo_train.models.blocks.encoder_layer import encoder_layer
from mimo_train.models.blocks.mlp.spec import Mlp

GIB = 1024**3
OFFLOADED_LAYERS = 2
"""Layers on the device with `offload_activations`: the one that runs, and the one that is copied."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Bytes kept for the backward pass."""
    work: int = 0
    """Further bytes at the peak."""
    update: int = 0
    """Further bytes in the optimizer's step, when no activations are kept."""
    host: int = 0
    """Bytes of optimizer states in the host's memory, not in `total`."""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.gradients + self.optimizer + max(self.activations + self.work, self.update)

    def __add__(self, other: "Memory") -> "Memory":
        """Return the memory of two modules on one rank, which run one after the other."""
        return Memory(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.activations + other.activations,
            max(self.work, other.work),
            max(self.update, other.update),
            self.host + other.host,
        )

    def with_activations(self, other: "Memory") -> "Memory":
        """Return the memory of weights and optimizer with that of activations, whose work is at the same time."""
        return replace(self + other, work=self.work + other.work)


@dataclass(frozen=True)
class StageMemory:
    """Memory of every rank of one pipeline stage of one module."""

    module: str
    stage: int
    """From 0, within the module."""
    ranks: tuple[int, ...]
    memory: Memory


def parameter_memory(count: ParameterCount, precision: str, dp: int, states: float = 8.0) -> Memory:
    """Return weights, gradients and optimizer states of the parameters of one rank. Bytes per trained parameter with
    Megatron-Core's distributed optimizer over `dp` ranks and Adam (its "Distributed Optimizer" page): fp32 4 + 4 + 8 /
    dp (two moments); bf16 2 + 4 + 12 / dp (fp32 gradients; fp32 master weights and two moments). Without the
    distributed optimizer dp is 1. A frozen parameter is only a weight. `states`: bytes of a parameter's moments and of
    the average of its weight."""
    states += 0 if precision == "fp32" else 4
    return Memory(
        weights=count.total * BYTES[precision],
        gradients=count.trainable * 4,
        optimizer=math.ceil(count.trainable * states / dp),
    )


MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "8bit": 1 + 4 / 256}
"""Bytes of a moment by `optim.moments`; 8 bit has a scale for 256 elements."""

MOMENTS = {"adamw": 2, "muon": 1, "lion": 1, "adafactor": 0}
"""Moments by `optim.name`: of matrices with Muon, whose embeddings and output layers have AdamW's. The rows and columns
of Adafactor, and the moments of vectors with both, are not counted."""


def _state_bytes(optim: OptimConfig, name: str) -> float:
    """Return the bytes of a parameter's moments with optimizer `name`, and of the average of its weight."""
    return MOMENTS[name] * MOMENT_BYTES[optim.moments] + (4 if optim.ema else 0)


def _update_bytes(optim: OptimConfig, parameters: float) -> int:
    """Return the further bytes of the update of a rank's parameters, without those of one matrix or 8-bit moment:
    states in fp32 or from the host, two numbers of each element of Lion, the directions of all matrices of Muon."""
    elements = min(parameters, CHUNK)
    in_fp32 = 4 * MOMENTS[optim.name] if optim.moments != "fp32" else 0
    copied = _state_bytes(optim, optim.name) if optim.offloads else 0
    if optim.name == "muon":
        return math.ceil(4 * parameters)
    return math.ceil(elements * (in_fp32 + copied + (8 if optim.name == "lion" else 0)))


def states_text(cfg: ConfigContainer) -> str:
    """Return what each module's optimizer keeps of a parameter; empty if it is the moments of AdamW in fp32."""
    optims = {name: cfg.optim_of(name) for name in cfg.modules}
    if all((optim.name, optim.moments, optim.ema) == ("adamw", "fp32", 0) for optim in optims.values()):
        return ""
    averages = {name: " and an average of weights" if optim.ema else "" for name, optim in optims.items()}
    texts = [
        f"{optim.name} with moments in {optim.moments}{averages[name]} of {name}" for name, optim in optims.items()
    ]
    return ", ".join(texts)


def stage_memory(run: Run, name: str, vocab: int, media_per_sample: float = 1.0) -> list[StageMemory]:
    """Return the memory of each pipeline stage of one module. `vocab`: rows of the embedding (`padded_vocab_size`);
    `media_per_sample`: mean number of media items of this module in a sample."""
    module = run.layout.modules[name]
    return [
        StageMemory(
            name, stage, tuple(module.stage_ranks(stage)), memory_of_stage(run, name, stage, vocab, media_per_sample)
        )
        for stage in range(module.pp)
    ]


def run_memory(run: Run, vocab: int, media_per_sample: Mapping[str, float] | None = None) -> list[StageMemory]:
    """Return the memory of each pipeline stage of all modules. `vocab`: rows of the embedding; `media_per_sample`: mean
    number of media items in a sample, by encoder; 1 for missing encoders."""
    media = media_per_sample or {}
    return [stage for name in run.cfg.modules for stage in stage_memory(run, name, vocab, media.get(name, 1.0))]


def memory_of_stage(run: Run, name: str, stage: int, vocab: int, media_per_sample: float = 1.0) -> Memory:
    """Return the memory of a rank of one pipeline stage. Arguments as in `stage_memory`."""
    state = state_of_stage(run.cfg, run.layout.modules[name], stage, vocab)
    return state.with_activations(activations_of_stage(run, name, stage, vocab, media_per_sample))


def activations_of_stage(run: Run, name: str, stage: int, vocab: int, media_per_sample: float = 1.0) -> Memory:
    """Return the activations of a rank of one pipeline stage, and their work. Arguments as in `stage_memory`."""
    if name == LANGUAGE:
        return _language_activations(run, stage, vocab)
    return _encoder_activations(run, name, stage, media_per_sample)


def state_of_stage(cfg: ConfigContainer, module: ModuleLayout, stage: int, vocab: int) -> Memory:
    """Return the memory of a rank of one pipeline stage without activations; as work, weights while they are used."""
    name = module.name
    sizes = {"tp": module.tp, "ep": module.ep, "etp": module.etp, "vpp": module.vpp}
    sizes |= {"stage": stage, "stages": module.pp}
    counts = module_parameters(cfg, name, vocab, **sizes)
    experts = counts.pop("experts", ParameterCount(0, 0))
    dense, divided = sum(counts.values(), ParameterCount(0, 0)), cfg.optim.distributed_optimizer
    optim, replicas, gathered = cfg.optim_of(name), module.dp * module.cp if divided else 1, 0
    kept = _state_bytes(optim, optim.name)
    states = 0 if optim.offloads else kept
    memory = parameter_memory(dense, cfg.train.precision, replicas, states)
    if module.fsdp:
        shards = sharded_bytes(cfg, name, dense, module.dp)
        replicas, of_rank = module.dp, math.ceil(dense.trainable * states / module.dp)
        memory, gathered = Memory(shards.weights, shards.gradients, of_rank), shards.gathered
    of_experts = module.expert_dp if divided else 1
    memory += parameter_memory(experts, cfg.train.precision, of_experts, states)
    updated = [dense.trainable / replicas, experts.trainable / of_experts]
    if optim.offloads:
        memory += Memory(host=math.ceil(sum(updated) * kept))
    if name == LANGUAGE and optim.name == "muon" and dense.trainable == dense.total:
        vocabulary = vocabulary_parameters(cfg.llm, vocab, module.tp, stage, module.pp) / replicas
        more = math.ceil(vocabulary * (_state_bytes(optim, "adamw") - kept))
        memory += Memory(host=more) if optim.offloads else Memory(optimizer=more)
        updated[0] -= vocabulary
    memory += Memory(update=max(_update_bytes(optim, parameters) for parameters in updated))
    copies = {"tp": module.tp, "stages": module.pp, "vpp": module.vpp, "ep": module.ep, "etp": module.etp}
    memory += Memory(weights=fp8_weight_bytes(cfg, name, stage, **copies))
    quantized, largest = quantized_parameters(name, cfg.modules[name], cfg.llm.hidden_size, **sizes)
    # A weight is dequantized while it is used.
    memory += Memory(weights=quantized_bytes(quantized) - quantized * BYTES[cfg.train.precision])
    return memory + Memory(work=gathered + largest * BYTES[cfg.train.precision])


def rank_memory(stages: list[StageMemory]) -> dict[int, Memory]:
    """Return the memory of each rank, over all modules on it."""
    total: dict[int, Memory] = {}
    for stage in stages:
        for rank in stage.ranks:
            total[rank] = total.get(rank, Memory()) + stage.memory
    return dict(sorted(total.items()))


def microbatch_tokens(run: Run) -> int:
    """Return the tokens of a full microbatch on one rank of the language model."""
    cfg = run.cfg
    row = pack_length(cfg) if cfg.data.pack else cfg.sample_length * cfg.train.micro_batch_size
    return row // run.layout.language.cp


def _language_activations(run: Run, stage: int, vocab: int) -> Memory:
    cfg, sizes, recompute = run.cfg, run.layout.language, run.cfg.recompute_of(LANGUAGE)
    llm, train, frozen = cfg.llm, cfg.train, "llm" in cfg.language.freeze
    size, length = BYTES[train.precision], cfg.data.sequence_length
    tokens = microbatch_tokens(run)
    samples = math.ceil(tokens * sizes.cp / length)
    layers = [llm.layer(number) for number in stage_layers(llm.num_layers, stage, sizes.pp, sizes.vpp)]
    share = Share(
        tokens, size, tp=sizes.tp, sp=sizes.sp, cp=sizes.cp, etp=sizes.etp, frozen=frozen,
        plain=_is_plain(cfg, LANGUAGE, sizes.tp, llm.dropout) and llm.residual_multiplier == 1
        and not any(getattr(llm, name) for name in NOT_PLAIN),
        fused=_fuses(cfg, LANGUAGE), whole_rows=_copies_heads(cfg),
    )  # fmt: skip
    scores = max(layer.mixer.scores(length, samples, sizes.tp, sizes.cp) for layer in layers)
    parts = recompute_parts(recompute)
    has_scores = recompute != "selective" and "attention" not in parts
    layer = -(-sum(each.kept(share, parts) for each in layers) // len(layers)) + (scores if has_scores else 0)
    boundary = tokens * llm.hidden_size * size // (sizes.tp if sizes.sp else 1)
    flying, last = in_flight(run, LANGUAGE, stage), stage == sizes.pp - 1
    # Full recompute keeps the input of each layer; the layer that is recomputed is work.
    kept = len(layers) // sizes.vpp * flying * (boundary if recompute == "full" else layer)
    if cfg.offload_of(LANGUAGE):
        kept = 0
    kept += mask_bytes(cfg) * flying
    # Sent outputs stay until their gradients arrive; interleaved, those of all chunks but the last.
    kept += boundary * (flying if not last else flying * (sizes.vpp - 1) // sizes.vpp)
    adapted = replace(share, frozen=frozen or cfg.language.lora.rank > 0)
    work = max(each.work(adapted, parts) for each in layers)
    work += 0 if has_scores else scores
    work += layer if recompute == "full" else 0
    work += OFFLOADED_LAYERS * layer if cfg.offload_of(LANGUAGE) else 0
    # Autograd gets the gradient of a table as a whole. If both are tied, that of the output waits for the embedding's.
    table = math.ceil(vocab / sizes.tp) * llm.hidden_size * size
    tied = llm.tie_embeddings and last and not cfg.traits.value_head
    if stage == 0 and _is_trained(cfg, "embed_tokens"):
        work = max(work + table * tied, table * (1 + tied) + boundary - kept // flying)
    if last:
        numbers = tokens, llm.hidden_size, output_rows(cfg, vocab), train.precision
        end = output_work(
            *numbers, tp=sizes.tp, sp=sizes.sp, chosen=train.logits == "learned",
            frozen=not _is_trained(cfg, "embed_tokens" if llm.tie_embeddings else "lm_head"),
            capped=bool(llm.logit_softcap), has_teacher=cfg.traits.has_teacher,
            most_logits=0 if cfg.traits.has_teacher else train.max_logits_mib * 2**20,
        )  # fmt: skip
        work = max(work, end)
    # The input that was received ahead of its use, and the gradient that is sent back.
    kept += 2 * boundary if sizes.pp > 1 and last else 0
    return Memory(activations=kept, work=work)


def _is_trained(cfg: ConfigContainer, table: str) -> bool:
    """True if a table of the vocabulary is trained in some step; `table`: one of `SAVED`."""
    return not any(fnmatchcase(SAVED[table], pattern) for pattern in frozen_patterns(cfg.language, sys.maxsize))


def _is_plain(cfg: ConfigContainer, name: str, tp: int, dropout: float) -> bool:
    """True if `mimo_train.models.dense_layer` computes dense layers (without norms or scales after their parts)."""
    module = cfg.modules[name]
    kind = "cpu" if cfg.run.device == "cpu" else "cuda"
    # Fused kernels are Megatron-Core's layers'.
    is_used = cfg.compile_of(name) == "layers" or (
        cfg.run.cpu_kernels and bool(fusions_of(cfg, name, kind)["gradient_accumulation"]) and not _fuses(cfg, name)
    )
    return is_used and tp == 1 and not module.lora.rank and not dropout and cfg.recompute_of(name) in ("none", "full")


def _fuses(cfg: ConfigContainer, name: str) -> bool:
    """True if one kernel computes the activation function of a module's layers."""
    reasons = fusions_of(cfg, name, "cpu" if cfg.run.device == "cpu" else "cuda")
    return reasons["activation"] in ("", NO_COMPILER)  # whatever machine estimates


def mask_bytes(cfg: ConfigContainer) -> int:
    """Return the bytes of the masks of a microbatch in which some tokens see later ones (`attention_mask`): one for
    layers without a window, one for those with it. 0 for causal attention."""
    train, rows = cfg.train, cfg.traits.answers * cfg.train.micro_batch_size
    pairs = pack_length(cfg) ** 2 if cfg.data.pack else rows * cfg.data.sequence_length**2
    return (1 + (cfg.llm.window > 0)) * pairs * BYTES[train.precision] if cfg.bidirectional else 0


def _copies_heads(cfg: ConfigContainer) -> bool:
    """True if attention has as many key heads as query heads, by copies: under a mask, and where one kernel computes
    all documents of a packed row, see `SdpaAttention`."""
    if cfg.bidirectional:
        return True
    llm, half = cfg.llm, cfg.train.precision != "fp32" and cfg.run.device != "cpu"
    without = llm.attention_softcap or llm.attention_sinks or llm.dropout
    return cfg.data.pack and half and not without and llm.head_width <= WIDEST_HEAD


def _encoder_activations(run: Run, name: str, stage: int, media_per_sample: float) -> Memory:
    """A frozen encoder keeps nothing for backward, and holds one layer at a time. Media count as the largest."""
    cfg, sizes = run.cfg, run.layout.modules[name]
    module, train = cfg.modules[name], cfg.train
    encoder, projector, size = module.encoder, module.projector, BYTES[train.precision]
    media = math.ceil(run.batch.microbatch_samples / sizes.dp * media_per_sample)
    flying = in_flight(run, name, stage)
    # Features of fewer than two passes are kept ahead.
    together = module.prefetch_microbatches
    rows = media * max(0, 2 * together - 1) * encoder.most_features(projector.merge)
    ahead = Memory(activations=rows * encoder.joined_width(projector.merge) * size)
    if isinstance(encoder, PlainSpec):
        module_kept = media * encoder.activations() * size
        kept = 0 if "encoder" in module.freeze else module_kept * (1 if cfg.recompute_of(name) == "full" else flying)
        return ahead + Memory(activations=kept + _projector_activations(cfg, name, media, sizes.tp) * flying)
    memory = ahead
    for part in encoder.parts.values():
        tokens = media * max(1, together) * part.most_inner_tokens(projector.merge)
        memory += _layers_activations(run, name, stage, part, tokens)
    if stage < sizes.pp - 1:
        return memory
    return memory + Memory(activations=_projector_activations(cfg, name, media, sizes.tp) * flying)


def _layers_activations(run: Run, name: str, stage: int, encoder: LayeredSpec, tokens: int) -> Memory:
    """Return the bytes that the layers of an encoder keep and work with on one rank, for `tokens` per pass."""
    cfg, sizes = run.cfg, run.layout.modules[name]
    module, precision = cfg.modules[name], cfg.train.precision
    size, hidden, layer = BYTES[precision], encoder.hidden_size, encoder_layer(encoder)
    adapted, flying, recompute = module.lora.rank > 0, in_flight(run, name, stage), cfg.recompute_of(name)
    plain = not layer.scaled and _is_plain(cfg, name, sizes.tp, encoder.dropout)
    share = Share(tokens, size, tp=sizes.tp, sp=sizes.sp, plain=plain, fused=_fuses(cfg, name))
    parts = recompute_parts(recompute)
    layer_kept = layer.kept(share, parts)
    layers = layers_of_stage(encoder.built_layers, stage, sizes.pp)
    # The input of the patch embedding arrives in fp32, and is copied to cut and round it.
    inputs = tokens * sum(encoder.embedding_products().values()) // hidden if stage == 0 else 0
    if "encoder" in module.freeze and not adapted:
        return Memory(work=max(layer_kept if layers else 0, inputs * (2 * 4 + size)))
    boundary = tokens * hidden * size // (sizes.tp if sizes.sp else 1)
    offloads = cfg.offload_of(name)
    of_layer = 0 if offloads else boundary if recompute == "full" else layer_kept
    kept = (layers * of_layer + inputs * size) * flying
    kept += boundary * flying if stage < sizes.pp - 1 else 0  # outputs, until their gradients arrive
    work = layer.work(replace(share, frozen=adapted), parts) + (layer_kept if recompute == "full" else 0)
    work += OFFLOADED_LAYERS * layer_kept if offloads else 0
    return Memory(activations=kept, work=max(work, inputs * 2 * 4))


def _projector_activations(cfg: ConfigContainer, name: str, media: int, tp: int) -> int:
    """Return the bytes that the projector of module `name` keeps of one microbatch: its input and output, the inside of
    an mlp, and for each resampler layer the normalized features, keys and values, and the latents' activations."""
    module, width, size = cfg.modules[name], cfg.llm.hidden_size, BYTES[cfg.train.precision]
    if module.projector.kind == "none":
        return 0
    encoder, projector, resampler = module.encoder, module.projector, module.projector.resampler
    joined = encoder.joined_width(projector.merge)
    per_token = joined + width + (joined if projector.norm else 0)
    if projector.kind == "mlp":
        per_token += (5 if projector.gated else 2) * (projector.ffn_hidden_size or width) // tp
    # State mergers keep their input, and the outputs of norm, first linear layer and activation.
    per_token += len(encoder.deepstack) * (4 * joined + width)
    kept = encoder.most_features(projector.merge) * per_token * size
    if resampler.latents:
        head = resampler.head_width(width)
        keys = resampler.key_heads * head
        attention = Attention(width, resampler.num_attention_heads, resampler.key_heads, head)
        layer = Layer(width, attention, Mlp(width, resampler.ffn_width(width), resampler.activation == GATED))
        features = encoder.most_features(projector.merge) * (2 * width + 2 * keys // tp) * size
        kept += resampler.num_layers * (layer.kept(Share(resampler.latents, size, tp=tp)) + features)
    return media * kept

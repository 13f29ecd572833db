"""Tables from the config alone: parameters, ranks, memory, work, batch, media tokens, `launch.layouts`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from data.text_format import plural
from encoders.plain.spec import PlainSpec
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.config.transformers_llm import TransformersLlm
from mimo_train.estimate.activations import logits_bytes
from mimo_train.estimate.flops import module_work
from mimo_train.estimate.low_precision import quantized_bytes
from mimo_train.estimate.memory import (
    GIB,
    Memory,
    mask_bytes,
    microbatch_tokens,
    rank_memory,
    run_memory,
    states_text,
)
from mimo_train.estimate.parameters import ParameterCount, freeze_patterns, module_parameters
from mimo_train.estimate.sharding import sharded_bytes
from mimo_train.launch.start import launch_of, processes_per_node
from mimo_train.layout.adapters import quantized_parameters
from mimo_train.layout.batch import pack_length
from mimo_train.layout.fusions import fusions_text
from mimo_train.layout.kernels import fp8_text, torch_layers_because
from mimo_train.layout.placement import Edge, moved_for_nodes, span_text, teacher_spans
from mimo_train.layout.ranks import RunLayout, lay_out, pipeline_stages
from mimo_train.layout.run import Run, warm_up_warnings
from mimo_train.preflight.check.report import Report, Table

IMBALANCE = 2.0
"""Warn if the fullest rank needs this many times the emptiest rank's memory, and a GiB more."""


def add_modules(report: Report, cfg: ConfigContainer, layout: RunLayout | None, vocab: int | None) -> None:
    """Add the parameters of each module, and its ranks if the layout is valid. `vocab`: None if unknown."""
    rows, notes, totals = [], [], ParameterCount(0, 0)
    for name, module in cfg.modules.items():
        counts = module_parameters(cfg, name, vocab or 0)
        count = sum(counts.values(), ParameterCount(0, 0))
        totals += count
        patterns = freeze_patterns(module)
        if patterns:
            notes.append(f"* patterns of modules.{name}.freeze ({', '.join(patterns)}) are not counted as frozen")
        where = (str(layout.modules[name]), _span(layout, layout.modules[name].ranks)) if layout else ("at fault", "")
        is_torch = isinstance(module.llm, TransformersLlm) or isinstance(module.encoder, PlainSpec)
        if cfg.run.device != "cpu" and not is_torch and (reason := torch_layers_because(cfg, name)):
            notes.append(f"all layers of {name} are torch's, also where Transformer Engine is installed: {reason}")
        kind = "cpu" if cfg.run.device == "cpu" else "cuda"
        notes.append(f"fused kernels of {name} on {kind.upper()}: {fusions_text(cfg, name, kind)}")
        mark = "*" if patterns else ""
        rows.append((name, _module_text(module), *where, f"{count.total:,}", f"{count.trainable:,}{mark}"))
    if len(rows) > 1:
        rows.append(("all", "", "", "", f"{totals.total:,}", f"{totals.trainable:,}"))
    if vocab is None:
        notes.append("without token embeddings: the size of the vocabulary is not known")
    header = ("module", "what it is", "layout", "ranks", "parameters", "trained")
    report.tables.append(Table("Modules", header, rows, notes, left=4))


def add_memory(report: Report, run: Run, vocab: int | None, media_per_sample: dict[str, float]) -> None:
    """Add the estimated memory of each pipeline stage of each module, and of the fullest rank."""
    cfg, layout = run.cfg, run.layout
    stages = run_memory(run, vocab or 0, media_per_sample)
    rows = [
        (layout.modules[stage.module].stage_name(stage.stage), _span(layout, stage.ranks), *_gib(stage.memory))
        for stage in stages
    ]
    ranks = rank_memory(stages)
    fullest = max(ranks, key=lambda rank: ranks[rank].total)
    emptiest = min(ranks, key=lambda rank: ranks[rank].total)
    if any(len(layout.on_rank(rank)) > 1 for rank in ranks):
        rows.append(("the fullest rank", f"{layout.processes[fullest]}", *_gib(ranks[fullest])))
    recompute = [f"{module.recompute} of {name}" for name, module in cfg.modules.items() if module.recompute]
    notes = [
        f"an estimate, without workspaces, buffers of NCCL and the CUDA context; {cfg.train.precision}, "
        f"recompute {', '.join([cfg.train.recompute, *recompute])}"
    ]
    notes += [text for name in cfg.modules if (text := _sharding_text(run, name, vocab or 0))]
    if states := states_text(cfg):
        host = max(memory.host for memory in ranks.values()) / GIB
        notes.append(f"optimizer: {states}" + (f"; {host:.3f} GiB of them on the host (optim.offload)" if host else ""))
    for name, module in cfg.modules.items():
        if weights := quantized_parameters(name, module, cfg.llm.hidden_size)[0]:
            size = f"{weights:,} weights in 4 bits, {quantized_bytes(weights) / GIB:.3f} GiB in all layers"
            notes.append(f"{name}: {size} (lora.quantization={module.lora.quantization})")
    if offloaded := [name for name in cfg.modules if cfg.offload_of(name)]:
        notes.append(f"activations of {', '.join(offloaded)}: on the host between forward and backward, not counted")
    if in_fp8 := fp8_text(cfg):
        notes.append(f"{in_fp8}; activations as in {cfg.train.precision}")
    if mask := mask_bytes(cfg):
        whose = "an image" if cfg.bidirectional == "items" else "the text before the first answer"
        notes.append(
            f"activations of {LANGUAGE}: with {mask / GIB:.2f} GiB a microbatch for its mask, because the tokens of "
            f"{whose} see each other"
        )
    if vocab and not cfg.traits.value_head:
        notes.append(_logits_text(run, vocab))
    for name in cfg.encoders:
        is_measured, medium = name in media_per_sample, cfg.modules[name].encoder.medium
        count = f"{media_per_sample[name]:.2f} {medium}s" if is_measured else f"1 {medium} (no sample was read)"
        notes.append(f"activations of {name}: for {count} a sample")
        encoder = cfg.modules[name].encoder
        if isinstance(encoder, PlainSpec) and not encoder.activations():
            notes.append(f"activations of {name}: without those inside its encoder, of which its spec says nothing")
    header = ("module", "ranks", "weights", "gradients", "optimizer", "activations", "work", "GiB a rank")
    report.tables.append(Table("Memory of a rank (GiB)", header, rows, notes, left=2))
    most, least = ranks[fullest].total, ranks[emptiest].total
    if most > IMBALANCE * least and most - least > GIB:
        report.warnings.append(
            f"memory is uneven: rank {layout.processes[fullest]} ({', '.join(layout.on_rank(fullest))}) needs "
            f"{most / GIB:.1f} GiB, rank {layout.processes[emptiest]} ({', '.join(layout.on_rank(emptiest))}) "
            f"{least / GIB:.1f} GiB; give the fuller module more ranks "
            "(modules.*.layout), or let modules share ranks (placement.mode=shared)"
        )


def _sharding_text(run: Run, name: str, vocab: int) -> str:
    """Return what a sharded module gathers and reduces; empty for another module."""
    layout = run.layout.modules[name]
    if not layout.fsdp:
        return ""
    count = sum(module_parameters(run.cfg, name, vocab).values(), ParameterCount(0, 0))
    shards = sharded_bytes(run.cfg, name, count, layout.dp)
    when = "nothing is trained"
    if count.trainable:
        when = f"gradients are reduced {'once a step' if shards.reduces_once else 'in every microbatch'}"
    whole = "layers are" if name == LANGUAGE else "the encoder is"
    return (
        f"{name}: sharded over {layout.dp} ranks (fsdp); {whole} gathered to compute, in {shards.gathered / GIB:.3f} "
        f"GiB of work; {when}"
    )


def _logits_text(run: Run, vocab: int) -> str:
    """Return how the loss is computed: with logits or without."""
    most, train = logits_bytes(microbatch_tokens(run), vocab, run.layout.language.tp) / 2**20, run.cfg.train
    text = f"loss: logits of a microbatch take up to {most:,.0f} MiB"
    limit = f"train.max_logits_mib {train.max_logits_mib}"
    if run.cfg.traits.has_teacher:
        return f"{text}, and are never stored: train.task={train.task} compares blocks of the vocabulary"
    if most <= train.max_logits_mib:
        return f"{text} and are stored: {limit} allows it"
    where = " if the class computes them by its lm_head alone" if isinstance(run.cfg.llm, TransformersLlm) else ""
    return f"{text}; above {limit} they are not stored, but computed in blocks of the vocabulary{where}"


def _packed_rows(cfg: ConfigContainer, layout: RunLayout) -> list[tuple[str, str]]:
    length, replicas = pack_length(cfg), layout.language.dp
    most = -(-cfg.train.global_batch_size * cfg.sample_length // (length * replicas))
    return [
        (
            "microbatch",
            f"a row of up to {length:,} tokens on each of dp {replicas} of {LANGUAGE}: several samples (data.pack)",
        ),
        ("microbatches", f"as many as the texts of a step take, about {most} if all had data.sequence_length"),
    ]


def add_batch(report: Report, run: Run) -> None:
    """Add batch arithmetic and the pipeline bubble."""
    cfg, layout, batch = run.cfg, run.layout, run.batch
    train, microbatches, stages = cfg.train, batch.num_microbatches, pipeline_stages(layout)
    share, chunks = bubble(run), f"{layout.language.vpp} x " if layout.language.vpp > 1 else ""
    # Held-out samples of several documents each have their own row.
    apart, replicas = cfg.data.separate_documents, layout.language.dp
    together = replicas if apart else batch.microbatch_samples
    divisor = "data.separate_documents: 1" if apart else f"train.micro_batch_size {train.micro_batch_size}"
    per_rank = ", ".join(f"{name} {together // sizes.dp}" for name, sizes in layout.modules.items())
    tokens, answers = train.global_batch_size * cfg.sample_length, cfg.traits.answers
    packed = cfg.data.pack
    rows = [
        ("processes", _processes(layout)),
        ("global batch", f"{plural(train.global_batch_size, 'sample')}"),
        *(_packed_rows(cfg, layout) if packed else ()),
        (
            "microbatch of an evaluation" if packed else "microbatch",
            f"{plural(together, 'sample')} ({divisor} x dp of {LANGUAGE} {replicas})",
        ),
        *(() if packed else (("microbatches", f"{microbatches} a step"),)),
        ("samples of a microbatch on a rank", f"{per_rank}{' in an evaluation' if packed else ''}"),
        (
            "tokens",
            f"{'at most ' * (cfg.data.pad == 'microbatch')}{tokens:,} a step, padding included "
            f"({train.global_batch_size} x {f'{answers} answers x ' if answers > 1 else ''}{cfg.data.sequence_length})",
        ),
        (
            "run",
            f"{plural(train.iters, 'step')}, {plural(batch.samples_of(train.iters), 'sample')}"
            if train.iters
            else f"{train.epochs:g} epoch{'s' * (train.epochs != 1)} of the data",
        ),
        (
            "pipeline",
            f"{plural(stages, 'stage')}, bubble about {share:.0%} = ({stages} - 1) / "
            f"({chunks}{microbatches} + {stages} - 1)",
        ),
    ]
    report.tables.append(Table("Batch", (), rows))
    if share > 0.5:
        report.warnings.append(
            f"the pipeline waits about {share:.0%} of the time: {plural(microbatches, 'microbatch')} for "
            f"{plural(stages, 'stage')}; "
            f"raise train.global_batch_size {train.global_batch_size} or lower "
            f"train.micro_batch_size {train.micro_batch_size}"
        )
    report.warnings += warm_up_warnings(cfg)


def _processes(layout: RunLayout) -> str:
    idle = layout.processes[-1] + 1 - layout.world_size
    return f"{layout.world_size}" + (f", and {idle} idle" if idle else "")


def _module_text(module: ModuleConfig) -> str:
    if module.llm is not None:
        llm = module.llm.sizes if isinstance(module.llm, TransformersLlm) else module.llm
        if isinstance(module.llm, TransformersLlm):
            kind = module.llm.model_config["model_type"]
            return f"{llm.name}: {plural(llm.num_layers, 'layer')} x {llm.hidden_size}, {kind} of transformers as it is"
        heads = plural(llm.num_attention_heads, "head")
        return f"{llm.name}: {plural(llm.num_layers, 'layer')} x {llm.hidden_size}, {heads}"
    encoder, projector = module.encoder, module.projector
    frozen = [part for part in ("encoder", "projector") if part in module.freeze]
    sizes = (
        f"features of {encoder.hidden_size}"
        if isinstance(encoder, PlainSpec)
        else " and ".join(
            f"{plural(part.built_layers, 'layer')} x {part.hidden_size}, {plural(part.num_attention_heads, 'head')}"
            for part in encoder.parts.values()
        )
    )
    name, kind = projector.name, projector.kind
    if kind == "none":
        return f"{encoder.name}: {sizes}" + (f"; frozen: {', '.join(frozen)}" if frozen else "")
    joined = name if name.startswith(kind) else f"{name} ({kind})" if name else kind
    return f"{encoder.name}: {sizes}; {joined}" + (f"; frozen: {', '.join(frozen)}" if frozen else "")


def _gib(memory: Memory) -> tuple[str, ...]:
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.work, memory.total)
    return tuple(f"{part / GIB:.3f}" for part in parts)


def _span(layout: RunLayout, ranks: Sequence[int]) -> str:
    return span_text(layout.processes_of(ranks))


def bubble(run: Run) -> float:
    """Return the share of a step in which a rank waits for the pipeline to fill and drain: (p - 1) / (v m + p - 1) for
    p equal stages, v chunks per stage and m microbatches. Narayanan et al. 2021 (arXiv 2104.04473) give its ratio to
    the rest of the step, (p - 1) / (v m). A stage of an encoder has no chunks, and counts as v of the last stages."""
    language = run.layout.language
    filling = language.pp - 1 + language.vpp * (pipeline_stages(run.layout) - language.pp)
    return filling / (language.vpp * run.batch.num_microbatches + filling)


def add_ranks(report: Report, cfg: ConfigContainer, layout: RunLayout) -> None:
    """Add one row per range of equal ranks; ranks are the launcher's, idle ones included."""
    node = cfg.placement.ranks_per_node
    rows = []
    for modules, span in _spans(cfg, layout):
        where = (span_text(range(span[0] // node, span[-1] // node + 1)),) if node else ()
        rows.append((span_text(span), *where, modules))
    notes = [_route(layout, edge) for edge in layout.edges]
    moved = moved_for_nodes(cfg)
    if moved:
        notes.append(moved)
    if not node and any(module.tp > 1 for module in layout.modules.values()):
        notes.append(
            "on one node; with several, placement.ranks_per_node shows here what the launcher's nodes will change"
        )
    header = ("ranks", *(("nodes",) if node else ()), "modules")
    report.tables.append(Table("Ranks", header, rows, notes))


def _spans(cfg: ConfigContainer, layout: RunLayout) -> Iterator[tuple[str, range]]:
    """Yield ranges of processes with equal modules, and the names of these, the teacher included."""
    modules: dict[int, list[str]] = {process: [] for process in range(layout.processes[-1] + 1)}
    for module in layout.modules.values():
        for stage in range(module.pp):
            title = module.stage_name(stage)
            for process in layout.processes_of(module.stage_ranks(stage)):
                modules[process].append(title)
    for process in {process for span in teacher_spans(cfg).values() for process in span}:
        modules[process].append("teacher")
    for titles, processes in groupby(modules, lambda process: modules[process]):
        numbers = [*processes]
        yield " + ".join(titles) or "idle", range(numbers[0], numbers[-1] + 1)


def _route(layout: RunLayout, edge: Edge) -> str:
    source, destination = layout.modules[edge.source], layout.modules[edge.destination]
    taking = span_text(layout.processes_of(destination.stage_ranks(0)))
    if edge.is_shared:
        stage = replace(destination, pp=1, ep=1, etp=1, sp=False)
        same = (source.tp, source.dp) == (stage.tp, stage.dp)
        dealt = "stay where they are" if same else f"are redistributed, from {replace(source, sp=False)} to {stage}"
        return f"features of {source.name} {dealt}: it is on the first ranks of {destination.name} ({taking})"
    giving = span_text(layout.processes_of(source.stage_ranks(source.pp - 1)))
    return f"features of {source.name} are sent from ranks {giving} to {taking}"


_UNITS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (0.0, "FLOP"))


def flops_of_ranks(run: Run, vocab: int, media_per_sample: dict[str, float]) -> dict[range, dict[str, float]]:
    """Return the FLOPs of one rank in a step, with recomputation: ranks with equal work -> module and stage, as
    `RunLayout.kind_of` names them -> FLOPs.

    Every row counts as full, every media item as the largest, and parts as trained if they are at the end of the run.
    Ranks of tp, cp and ep share the work of their replica evenly.

    Args:
        vocab: rows of the embedding.
        media_per_sample: media items in a sample, by encoder; 1 for missing encoders.
    """
    flops_of: dict[range, dict[str, float]] = {}
    for name, module in run.layout.modules.items():
        work = module_work(run.cfg, name, vocab, media_per_sample.get(name, 1.0))
        samples = run.batch.global_batch_size / (module.dp * module.tp * module.cp)
        for stage in range(module.pp):
            title = module.stage_name(stage)
            flops = samples * work.of_stage(stage, module.pp, module.vpp).total
            flops_of.setdefault(module.stage_ranks(stage), {})[title] = flops
    return flops_of


def add_work(report: Report, run: Run, vocab: int | None, media_per_sample: dict[str, float]) -> None:
    """Add one row per kind of rank. `vocab`: None if unknown."""
    flops_of = flops_of_ranks(run, vocab or 0, media_per_sample)
    most = max(sum(modules.values()) for modules in flops_of.values())
    rows = []
    for ranks, modules in sorted(flops_of.items(), key=lambda item: item[0].start):
        total = sum(modules.values())
        several = len(modules) > 1 and total  # 0 if the first samples have no media
        parts = [f"{name} ({part / total:.0%})" if several else name for name, part in modules.items()]
        rows.append((" + ".join(parts), _span(run.layout, ranks), flops_text(total), f"{total / most:.0%}"))
    notes = ["forward, backward and what is recomputed, every row full; ranks with less than the busiest wait for it"]
    if vocab is None:
        notes.append(f"without the output layer of {LANGUAGE}: the size of the vocabulary is not known")
    header = ("modules", "ranks", "a step", "of the busiest")
    report.tables.append(Table("Work of a rank (FLOPs)", header, rows, notes, left=2))


def flops_text(flops: float) -> str:
    """Return text such as 350 MFLOP or 1,250 PFLOP."""
    size, unit = next(entry for entry in _UNITS if flops >= entry[0])
    number = flops / (size or 1.0)
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def add_layouts(
    report: Report, config: str, overrides: Sequence[str], cfg: ConfigContainer, *, without_data: bool
) -> None:
    """Add a table of the layouts by nodes, with their faults; `cfg` was loaded from `config` and `overrides`."""
    if any(fault.key.startswith("launch.") for fault in report.faults):
        return
    rows, earlier = [], [*report.faults]
    for nodes in sorted(cfg.launch.layouts):
        key = f"launch.layouts.{nodes}"
        try:
            changed = launch_of(config, overrides, nodes, {}, without_data=without_data).cfg
            per_node = processes_per_node(changed, nodes, without_data=without_data)
        except ConfigError as error:
            new_faults = [fault for fault in error.faults if fault not in earlier]  # without those of every layout
            report.faults += [fault if fault.key == key else Fault(key, str(fault)) for fault in new_faults]
        except UserError as error:
            report.faults.append(Fault(key, str(error)))
        else:
            modules = ", ".join(f"{name} ({sizes})" for name, sizes in lay_out(changed).modules.items())
            rows.append((str(nodes), str(per_node), str(changed.train.micro_batch_size), modules))
    if rows:
        report.tables.append(Table("layouts by nodes", ("nodes", "processes each", "micro batch", "modules"), rows))

"""The run of a teacher (`train.task=distill`): its model at its own layout, over the samples of the student's run."""

import math
from collections.abc import Iterator
from dataclasses import replace

from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_distill import SFT, DistillConfig
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.config.schema_run import PlacementConfig
from mimo_train.config.transformers_llm import TransformersLlm
from mimo_train.layout.batch import Batch
from mimo_train.layout.placement import teacher_layout, teacher_spans
from mimo_train.layout.ranks import ModuleLayout, RunLayout, lay_out
from mimo_train.layout.run import Run, config_faults

TEXT_KEYS = ("tokenizer", "chat_template", "template_variables", "special_tokens_in_text")
"""Keys of `data` that the teacher has itself: how records become its tokens."""


def teacher_run(run: Run, model: ConfigContainer) -> Run:
    """Return the run of a teacher: its samples, precision and device are those of `run`, its ranks have the same
    numbers.

    Args:
        model: config of the teacher, frozen, on one process.

    Raises:
        ConfigError: it cannot be a teacher of this run, with the keys of `distill`.
    """
    cfg = run.cfg
    if faults := [*_faults_of_kind(cfg, model)]:
        raise ConfigError(faults)
    layouts = _layouts(cfg, model)
    replicas = layouts[LANGUAGE].dp
    sizes = [*run.batch.sizes()]
    if wrong := [size for size in sizes if size % replicas]:
        text = f"dp {replicas} of the teacher does not divide a step of {wrong[0]} samples. Choose a divisor"
        raise ConfigError([Fault(f"distill.layout.{LANGUAGE}.dp", text)])
    micro = math.gcd(cfg.train.micro_batch_size, *(size // replicas for size in sizes))
    modules = {
        name: replace(
            module,
            layout=layouts[name],
            # Any number of replicas is possible where work is balanced.
            balance="samples" if name == LANGUAGE or not micro * replicas % layouts[name].dp else "images",
        )
        for name, module in model.modules.items()
    }
    length = cfg.distill.sequence_length or cfg.data.sequence_length
    texts = {name: getattr(model.data, name) for name in TEXT_KEYS}
    pack_length = max(cfg.data.pack_length, length) if cfg.data.pack_length else 0
    data = replace(cfg.data, **texts, sequence_length=length, pack_length=pack_length)
    teacher = replace(
        model,
        run=replace(cfg.run, seed=model.run.seed),  # of weights that a checkpoint leaves out
        modules=modules,
        placement=replace(_placement(cfg, model), ranks_per_node=cfg.placement.ranks_per_node),
        data=data,
        train=replace(cfg.train, task=SFT, micro_batch_size=micro, fp8="none", compile="none", recompute="none"),
        preference=cfg.preference,
        optim=cfg.optim,
        checkpoint=replace(cfg.checkpoint, weights="", load_modules={}),
        distill=DistillConfig(),
    )
    if faults := config_faults(teacher):
        raise ConfigError([_named(fault) for fault in faults])
    return Run(teacher, _on_ranks(lay_out(teacher), run.layout), Batch.of(teacher))


def _faults_of_kind(cfg: ConfigContainer, model: ConfigContainer) -> Iterator[Fault]:
    teacher = cfg.distill.teacher
    if isinstance(model.language.llm, TransformersLlm):
        text = f"{teacher} is a class of transformers as it is. Choose a model with a native implementation"
        yield Fault("distill.teacher", text)
    vpp = teacher_layout(cfg).vpp
    if vpp > 1:
        yield Fault(f"distill.layout.{LANGUAGE}.vpp", f"a teacher has no interleaved stages: set it to 1 (is {vpp})")
    for section in ("layout", "first_rank"):
        for name in getattr(cfg.distill, section):
            if name not in model.modules:
                yield Fault(f"distill.{section}.{name}", f"the teacher has no such module. It has {_names(model)}")


def _names(model: ConfigContainer) -> str:
    return ", ".join(model.modules)


def _layouts(cfg: ConfigContainer, model: ConfigContainer) -> dict[str, LayoutConfig]:
    language = teacher_layout(cfg)
    encoder = LayoutConfig(dp=language.tp * language.cp * language.dp)
    return {name: language if name == LANGUAGE else cfg.distill.layout.get(name, encoder) for name in model.modules}


def _placement(cfg: ConfigContainer, model: ConfigContainer) -> PlacementConfig:
    language = teacher_spans(cfg)[f"{LANGUAGE} of the teacher"][0]
    firsts = {name: cfg.distill.first_rank.get(name, language) for name in model.modules}
    return PlacementConfig(first_rank=firsts, allow_idle=True, tp_across_nodes=cfg.placement.tp_across_nodes)


def _on_ranks(teacher: RunLayout, run: RunLayout) -> RunLayout:
    """Return the teacher's layout with the numbers that ranks have in the run."""

    def renumbered(module: ModuleLayout) -> ModuleLayout:
        return replace(module, first_rank=run.processes.index(teacher.processes[module.first_rank]))

    modules = {name: renumbered(module) for name, module in teacher.modules.items()}
    return replace(teacher, modules=modules, processes=run.processes)


def _named(fault: Fault) -> Fault:
    """Return a fault of the teacher's run by the keys that the user has set."""
    section, _, rest = fault.key.partition(".")
    name, _, inner = rest.partition(".")
    if section == "modules" and inner.startswith("layout"):
        key = f"distill.layout.{name}{inner.removeprefix('layout')}"
    elif fault.key.startswith("placement.first_rank"):
        key = f"distill.{rest}"
    elif fault.key == "data.sequence_length":
        key = "distill.sequence_length"
    else:
        return Fault("distill.teacher", f"{fault.key}: {fault.message}")
    return Fault(key, f"of the teacher: {fault.message}")

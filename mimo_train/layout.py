"""Arithmetic of per-module layouts: ranks, divisibility, samples per rank. Imports no torch.

A module's ranks are tp * cp * dp * pp, counted from its first rank with tp innermost, then cp, dp, pp (the order of
the `HyperCommGrid` in `groups`). One microbatch is `micro_batch_size * dp(language)` samples; each data-parallel rank
of a module takes its `1/dp` of them, so that every module sees the same samples in the same order at any layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.batch_size import rampup_faults
from mimo_train.bridge_faults import bridge_faults
from mimo_train.config import LANGUAGE, ConfigContainer, ConfigError, Fault, LayoutConfig, ModuleConfig
from mimo_train.llm_faults import llm_faults, tp_faults

AXES = ("tp", "pp", "vpp", "dp", "cp", "ep", "etp")
"""Parallel sizes of a module, in the order in which they are written."""

BALANCES = ("samples", "patches")
"""What an encoder's work is divided by over its data-parallel ranks."""


@dataclass(frozen=True)
class ModuleLayout:
    """Parallel sizes of one module and the ranks it stands on."""

    name: str
    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    sp: bool
    first_rank: int
    etp: int = 1
    vpp: int = 1
    balance: str = "samples"
    """How an encoder's samples are divided over its replicas: samples or patches."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert: what ep and etp leave of a stage's ranks."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def ranks(self) -> range:
        """The ranks, in order."""
        return range(self.first_rank, self.first_rank + self.size)

    def stage_ranks(self, stage: int) -> range:
        """Ranks of one pipeline stage."""
        width = self.size // self.pp
        return range(self.first_rank + stage * width, self.first_rank + (stage + 1) * width)

    def __str__(self) -> str:
        sizes = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " ".join(sizes + (["sp"] if self.sp else [])) or "one rank"


@dataclass(frozen=True)
class RunLayout:
    """The layouts of all modules and the arithmetic of a batch over them."""

    modules: dict[str, ModuleLayout]
    shared: bool
    global_batch_size: int
    micro_batch_size: int

    @property
    def language(self) -> ModuleLayout:
        """The language module's layout."""
        return self.modules[LANGUAGE]

    @property
    def local_encoders(self) -> list[str]:
        """Encoders on the ranks of the language model's first stage."""
        first = self.language.stage_ranks(0)
        return [name for name, module in self.modules.items() if name != LANGUAGE and module.ranks == first]

    @property
    def apart_encoders(self) -> list[str]:
        """Encoders on other ranks than the language model."""
        return [name for name in self.modules if name != LANGUAGE and name not in self.local_encoders]

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return max(module.first_rank + module.size for module in self.modules.values())

    @property
    def logging_rank(self) -> int:
        """The one rank that writes the log: the first of those that compute the loss."""
        language = self.language
        return language.first_rank + (language.pp - 1) * language.tp * language.cp * language.dp

    @property
    def microbatch_samples(self) -> int:
        """Samples of one microbatch over all data-parallel ranks."""
        return self.micro_batch_size * self.language.dp

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one optimizer step."""
        return self.global_batch_size // self.microbatch_samples

    def on_rank(self, rank: int) -> list[str]:
        """Names of the modules that stand on `rank`, in the order of the config."""
        return [name for name, module in self.modules.items() if rank in module.ranks]


def layers_of_stage(num_layers: int, stage: int, stages: int) -> int:
    """Layers of one pipeline stage: equal parts, and what is left over on the first stage, since the last one has the
    output layer to compute."""
    share = num_layers // stages
    return num_layers - (stages - 1) * share if stage == 0 else share


def plan(cfg: ConfigContainer) -> RunLayout:
    """The layout of a run.

    Raises:
        ConfigError: every fault of `faults`.
    """
    found = list(faults(cfg))
    if found:
        raise ConfigError(found)
    return _place(cfg)


def faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Everything that is wrong with modules, sizes, ranks and batch, each with its key and numbers."""
    module_faults = [fault for name, module in cfg.modules.items() for fault in _module_faults(name, module, cfg)]
    yield from module_faults
    if LANGUAGE not in cfg.modules:
        yield Fault("modules", f"a run needs a module named {LANGUAGE!r}, has {', '.join(cfg.modules) or 'none'}")
        return
    placement_faults = list(_placement_faults(cfg))
    yield from placement_faults
    if cfg.encoders and cfg.language.layout.vpp > 1:
        yield Fault(
            f"modules.{LANGUAGE}.layout.vpp",
            f"interleaving is for a language model alone, and this run has {', '.join(cfg.encoders)}: vpp is "
            f"{cfg.language.layout.vpp}, set it to 1",
        )
    if not module_faults and not placement_faults:
        layout = _place(cfg)
        yield from _rank_faults(cfg, layout)
        yield from _dropout_faults(cfg, layout)
        yield from bridge_faults(cfg, layout.apart_encoders)
        yield from _batch_faults(cfg)


def _module_faults(name: str, module: ModuleConfig, cfg: ConfigContainer) -> Iterator[Fault]:
    layout, key = module.layout, f"modules.{name}"
    for axis in AXES:
        if getattr(layout, axis) < 1:
            yield Fault(f"{key}.layout.{axis}", f"must be at least 1, is {getattr(layout, axis)}")
            return
    if name == LANGUAGE:
        if module.llm is None:
            yield Fault(
                f"{key}.llm",
                "the language module needs an llm: pick one, for example llm@modules.language.llm=gpt_tiny",
            )
            return
        for part in ("encoder", "projector"):
            if getattr(module, part) is not None:
                yield Fault(f"{key}.{part}", "the language module has no encoder and no projector: remove this key")
        yield from llm_faults(module.llm, layout, key)
    else:
        for part in ("encoder", "projector"):
            if getattr(module, part) is None:
                yield Fault(f"{key}.{part}", f"missing: every module but {LANGUAGE!r} has an encoder and a projector")
                return
        if module.llm is not None:
            yield Fault(f"{key}.llm", f"only the module named {LANGUAGE!r} has an llm: remove this key")
        yield from _encoder_faults(module, key)
    if layout.sp and layout.tp == 1 and name == LANGUAGE:
        yield Fault(f"{key}.layout.sp", "sequence parallel needs tp > 1, tp is 1: set sp to false or raise tp")


def _encoder_faults(module: ModuleConfig, key: str) -> Iterator[Fault]:
    from encoders.spec import joint_faults

    own = [(f"encoder.{field}", text) for field, text in module.encoder.faults()]
    own += [(f"projector.{field}", text) for field, text in module.projector.faults()]
    for field, text in own or joint_faults(module.encoder, module.projector):
        yield Fault(f"{key}.{field}", text)
    layout, encoder = module.layout, module.encoder
    yield from tp_faults(
        layout.tp, key, num_attention_heads=encoder.num_attention_heads, ffn_hidden_size=encoder.ffn_hidden_size
    )
    if module.balance not in BALANCES:
        yield Fault(f"{key}.balance", f"must be {' or '.join(BALANCES)}, is {module.balance!r}")
    for axis, why in _ENCODER_AXES.items():
        if getattr(layout, axis) > 1:
            yield Fault(f"{key}.layout.{axis}", f"{why}, is {getattr(layout, axis)}: set it to 1")
    if layout.sp:
        yield Fault(f"{key}.layout.sp", "sequence parallel of encoders is not available yet: set it to false")


_ENCODER_AXES = {
    "pp": "encoders in several pipeline stages are not available yet",
    "cp": "an encoder reads whole pictures, context parallel does not apply",
    "ep": "an encoder has no experts, expert parallel does not apply",
    "etp": "an encoder has no experts, expert tensor parallel does not apply",
    "vpp": "encoders are not interleaved",
}


def _placement_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    mode = cfg.placement.mode
    if mode not in ("disjoint", "shared"):
        yield Fault("placement.mode", f"must be disjoint or shared, is {mode!r}")
    for name, rank in cfg.placement.first_rank.items():
        if name not in cfg.modules:
            yield Fault(f"placement.first_rank.{name}", f"no such module; modules are {', '.join(cfg.modules)}")
        if rank < 0:
            yield Fault(f"placement.first_rank.{name}", f"must be at least 0, is {rank}")
    if cfg.placement.first_rank and mode == "shared":
        yield Fault("placement.first_rank", "applies to mode disjoint; shared modules all start at rank 0: remove it")
    missing = set(cfg.modules) - set(cfg.placement.first_rank)
    if cfg.placement.first_rank and missing:
        yield Fault(
            "placement.first_rank", f"gives no rank for {', '.join(sorted(missing))}: name every module or none"
        )


def _place(cfg: ConfigContainer) -> RunLayout:
    shared = cfg.placement.mode == "shared"
    modules, next_rank = {}, 0
    for name, module in cfg.modules.items():
        sizes = module.layout
        first = 0 if shared else cfg.placement.first_rank.get(name, next_rank)
        modules[name] = ModuleLayout(
            name=name,
            tp=sizes.tp,
            pp=sizes.pp,
            dp=sizes.dp,
            cp=sizes.cp,
            ep=sizes.ep,
            sp=sizes.sp and sizes.tp > 1,
            first_rank=first,
            etp=sizes.etp,
            vpp=sizes.vpp,
            balance=module.balance,
        )
        next_rank += modules[name].size
    return RunLayout(modules, shared, cfg.train.global_batch_size, cfg.train.micro_batch_size)


def _rank_faults(cfg: ConfigContainer, layout: RunLayout) -> Iterator[Fault]:
    modules = list(layout.modules.values())
    if layout.shared:
        yield from _shared_faults(modules)
        return
    for index, module in enumerate(modules):
        for other in modules[:index]:
            overlap = sorted(set(module.ranks) & set(other.ranks))
            if overlap:
                yield Fault(
                    f"placement.first_rank.{module.name}",
                    f"{module.name} (ranks {_span(module.ranks)}) and {other.name} (ranks {_span(other.ranks)}) "
                    f"both stand on rank {overlap[0]}: move one, or use placement.mode=shared",
                )
    idle = sorted(set(range(layout.world_size)) - {rank for module in modules for rank in module.ranks})
    if idle:
        yield Fault(
            "placement.first_rank", f"no module stands on rank {idle[0]}: {len(idle)} idle of {layout.world_size}"
        )


def _shared_faults(modules: list[ModuleLayout]) -> Iterator[Fault]:
    language = next(module for module in modules if module.name == LANGUAGE)
    first = language.stage_ranks(0)
    for module in modules:
        if module is not language and module.ranks != first:
            yield Fault(
                f"modules.{module.name}.layout",
                f"{module} is {module.size} ranks, and the first stage of {LANGUAGE} ({language}) is {len(first)}: "
                f"shared modules stand on the same ranks, so make tp x dp x pp {len(first)}",
            )
        elif module is not language and module.pp > 1:
            yield Fault(
                f"modules.{module.name}.layout.pp",
                f"an encoder on the ranks of {LANGUAGE} has one stage, pp is {module.pp}: set it to 1",
            )


def _dropout_faults(cfg: ConfigContainer, layout: RunLayout) -> Iterator[Fault]:
    """A rank has one generator: what one module's tensor-parallel ranks must draw alike, the other's draw apart."""
    language = layout.language
    for name in layout.local_encoders:
        module, encoder = layout.modules[name], cfg.modules[name].encoder
        same = (module.tp, module.dp) == (language.tp, language.dp)
        if not same and (encoder.dropout or cfg.language.llm.dropout):
            yield Fault(
                f"modules.{name}.layout",
                f"{module} on the ranks of {LANGUAGE} ({language}) with dropout (encoder {encoder.dropout}, llm "
                f"{cfg.language.llm.dropout}): set both to 0, or give both modules the same tp and dp, or other ranks",
            )


def _span(ranks: range) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _batch_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    train, language = cfg.train, cfg.language.layout
    for field in ("iters", "global_batch_size", "micro_batch_size"):
        if getattr(train, field) < 1:
            yield Fault(f"train.{field}", f"must be at least 1, is {getattr(train, field)}")
            return
    microbatch = train.micro_batch_size * language.dp
    if train.global_batch_size % microbatch:
        yield Fault(
            "train.global_batch_size",
            f"{train.global_batch_size} samples are not a whole number of microbatches of {microbatch} "
            f"(train.micro_batch_size {train.micro_batch_size} x modules.{LANGUAGE}.layout.dp {language.dp}): "
            f"use a multiple of {microbatch}",
        )
    yield from _sequence_faults(cfg.data.sequence_length, language)
    microbatches, rest = divmod(train.global_batch_size, microbatch)
    if language.vpp > 1 and not rest and microbatches % language.pp:
        yield Fault(
            "train.global_batch_size",
            f"{train.global_batch_size} samples are {microbatches} microbatches of "
            f"{microbatch}; interleaving (modules.{LANGUAGE}.layout.vpp {language.vpp}) needs a multiple of pp "
            f"{language.pp}: use a multiple of {microbatch * language.pp}, or set vpp to 1",
        )
    if train.global_batch_size % microbatch == 0:
        yield from rampup_faults(cfg)
    for name, module in cfg.encoders.items():
        if module.balance == "samples" and microbatch % module.layout.dp:
            yield Fault(
                f"modules.{name}.layout.dp",
                f"dp {module.layout.dp} does not divide a microbatch of {microbatch} samples "
                f"(train.micro_batch_size {train.micro_batch_size} x modules.{LANGUAGE}.layout.dp {language.dp}): "
                f"use a divisor of {microbatch}",
            )


def _sequence_faults(length: int, language: LayoutConfig) -> Iterator[Fault]:
    key = f"modules.{LANGUAGE}.layout"
    chunks, tp = 2 * language.cp if language.cp > 1 else 1, language.tp if language.sp else 1
    if length % chunks:
        yield Fault(
            "data.sequence_length",
            f"{length} tokens are not {chunks} equal chunks, as {key}.cp {language.cp} needs: use a multiple of "
            f"{chunks * tp}, or another cp",
        )
    elif length % (chunks * tp):
        of = f"tp {tp}" if chunks == 1 else f"2 x cp {language.cp} x tp {tp}"
        yield Fault(
            "data.sequence_length",
            f"{length} tokens are not equal parts of {of}, and {key}.sp splits sequences: use a multiple of "
            f"{chunks * tp}, or set sp to false",
        )

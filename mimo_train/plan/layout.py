"""Arithmetic of per-module layouts: ranks, divisibility, samples per rank. Imports no torch.

A module's ranks are tp * cp * dp * pp, counted from its first rank with tp innermost, then cp, dp, pp (the order of
the `HyperCommGrid` in `groups`). One microbatch is `micro_batch_size * dp(language)` samples; each data-parallel rank
of a module takes its `1/dp` of them, so that every module sees the same samples in the same order at any layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mimo_train.config.schema import LANGUAGE, ConfigContainer, ConfigError, Fault, ModuleConfig
from mimo_train.plan.batch import batch_faults
from mimo_train.plan.bridge_limits import bridge_faults
from mimo_train.plan.llm_faults import llm_faults, tp_faults
from mimo_train.plan.placement import place, placement_faults

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
    processes: tuple[int, ...]
    """The launcher's rank of each rank: a process without a module has none."""
    global_batch_size: int
    micro_batch_size: int
    ranks_per_node: int = 0
    """0 where it is not known, or all stand on one node."""

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
        """Processes that have a module."""
        return len(self.processes)

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

    def processes_of(self, ranks: Sequence[int]) -> range:
        """The launcher's ranks of neighbouring ranks of one module, which are neighbours there too."""
        return range(self.processes[ranks[0]], self.processes[ranks[-1]] + 1)

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
    if cfg.encoders and cfg.language.layout.vpp > 1:
        yield Fault(
            f"modules.{LANGUAGE}.layout.vpp",
            f"interleaving is for a language model alone, and this run has {', '.join(cfg.encoders)}: vpp is "
            f"{cfg.language.layout.vpp}, set it to 1",
        )
    if not module_faults:
        misplaced = list(placement_faults(cfg))
        yield from misplaced
        if not misplaced:
            yield from bridge_faults(cfg, _place(cfg).apart_encoders)
        yield from batch_faults(cfg)


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
    if layout.sp and layout.tp == 1:
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
    if layout.pp > encoder.num_layers:
        yield Fault(
            f"{key}.layout.pp",
            f"pp {layout.pp} is more than the {encoder.num_layers} layers of {key}.encoder.num_layers: each stage "
            "needs one",
        )
    for axis, why in _ENCODER_AXES.items():
        if getattr(layout, axis) > 1:
            yield Fault(f"{key}.layout.{axis}", f"{why}, is {getattr(layout, axis)}: set it to 1")
    if layout.sp and not own and (tokens := encoder.token_unit(module.projector.merge)) % layout.tp:
        medium = encoder.medium
        have = f"{medium}s of any size have multiples of" if encoder.sizes_vary else f"a {medium} has"
        yield Fault(
            f"{key}.layout.sp",
            f"{have} {tokens} tokens inside the encoder, which tp {layout.tp} does not divide into equal parts: set sp "
            f"to false, or change tp, or {key}.{', '.join(encoder.token_unit_fields)}",
        )


_ENCODER_AXES = {
    "cp": "an encoder reads whole pictures or clips, context parallel does not apply",
    "ep": "an encoder has no experts, expert parallel does not apply",
    "etp": "an encoder has no experts, expert tensor parallel does not apply",
    "vpp": "encoders are not interleaved",
}


def _place(cfg: ConfigContainer) -> RunLayout:
    placement, modules = place(cfg), {}
    for name, module in cfg.modules.items():
        sizes = module.layout
        modules[name] = ModuleLayout(
            name=name,
            tp=sizes.tp,
            pp=sizes.pp,
            dp=sizes.dp,
            cp=sizes.cp,
            ep=sizes.ep,
            sp=sizes.sp and sizes.tp > 1,
            first_rank=placement.first_ranks[name],
            etp=sizes.etp,
            vpp=sizes.vpp,
            balance=module.balance,
        )
    train, node = cfg.train, cfg.placement.ranks_per_node
    return RunLayout(modules, placement.processes, train.global_batch_size, train.micro_batch_size, node)

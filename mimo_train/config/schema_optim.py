"""Keys of the optimizer and its schedule: `optim` and `modules.NAME.optim`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, changed_fields, key, shown, value_faults
from mimo_train.config.parts import LANGUAGE, why_no_parameter

DECAYS = ("cosine", "linear", "constant", "wsd", "inverse_sqrt")
"""Values of `optim.decay`."""

MOST_RATE, MOST_DECAY = 1000.0, 1000.0
"""Maximum learning rate and weight decay; more is a typo."""

MOST_SCALE = 2.0**126
"""Maximum loss scale: above it, a gradient of 1 is not finite in fp32."""


OPTIMIZERS = ("adamw", "muon", "lion", "adafactor")
"""Values of `optim.name`."""

MOMENTS = ("fp32", "bf16", "8bit")
"""Values of `optim.moments`."""

CHUNK = 2**26
"""Elements whose states are in fp32, or on the device, at the same time, if they are stored in less, or on the host.
A multiple of the blocks of 8 bit."""

MUON_ITERATIONS = 5
"""Iterations of Newton and Schulz that orthogonalise a matrix of Muon."""

OF_WHOLE_MATRICES = ("muon", "adafactor")
"""Optimizers whose updates of an element depend on the others of its matrix."""

OF_OPTIMIZERS = {
    "beta1": ("adamw", "muon", "lion"),
    "beta2": ("adamw", "muon", "lion"),
    "eps": ("adamw", "muon"),
    "momentum": ("muon",),
    "moments": ("adamw", "muon", "lion"),
    "offload": ("adamw", "muon", "lion"),
}
"""Keys that some optimizers have no use for."""


@dataclass
class OptimConfig(Section):
    """The optimizer and its schedule, the same for every module."""

    name: str = key("adamw", choices=OPTIMIZERS)
    """`adamw`, `muon` (matrices by Muon, the rest by AdamW), `lion` or `adafactor`. See
    docs/configuration.md#optimizers."""
    lr: float = key(1e-3, at_least=0, at_most=MOST_RATE)
    """Peak learning rate."""
    min_lr: float = key(1e-5, at_least=0, at_most=MOST_RATE)
    """Learning rate at the last step. At most `lr`."""
    warmup_iters: int = key(0, at_least=0)
    """Steps of linear warm-up from 0."""
    decay: str = key("cosine", choices=DECAYS)
    """`cosine`, `linear`, `constant`, `wsd` or `inverse_sqrt`, from the end of warm-up to `train.iters`. See
    docs/configuration.md#schedules."""
    wsd_decay_fraction: float = key(0.1, above=0, at_most=1)
    """Share of the steps after warm-up in which the rate of `wsd` falls."""
    weight_decay: float = key(0.01, at_least=0, at_most=MOST_DECAY)
    """Decoupled weight decay, on matrices only."""
    beta1: float = key(0.9, at_least=0, below=1)
    """Decay rate of the first moment. Not of `adafactor`."""
    beta2: float = key(0.95, at_least=0, below=1)
    """Decay rate of the second moment; of the momentum of `lion`. Not of `adafactor`."""
    eps: float = key(1e-8, above=0, at_most=1000)
    """Added to the denominator of the update of AdamW."""
    momentum: float = key(0.95, at_least=0, below=1)
    """Decay rate of the momentum of `muon`."""
    moments: str = key("fp32", choices=MOMENTS)
    """Precision of moments: `fp32`, `bf16` or `8bit`. See docs/configuration.md#optimizers."""
    ema: float = key(0.0, at_least=0, below=1, zero_means="no average")
    """Decay rate of an average of the weights, in fp32; 0: no average. See docs/configuration.md#average-of-weights."""
    offload: bool = False
    """Keep moments and averages in pinned memory of the host between steps. See docs/configuration.md#optimizers."""
    clip_grad: float = key(1.0, at_least=0)
    """Largest gradient norm over all modules without `clip_grad` of their own; 0: no clipping."""
    loss_scale: float = key(0.0, at_least=0, at_most=MOST_SCALE, zero_means="dynamic")
    """Fixed loss scale of fp16, a power of 2; 0: dynamic. See docs/configuration.md#fp16."""
    initial_loss_scale: float = key(65536.0, at_least=1, at_most=MOST_SCALE)
    """First dynamic loss scale."""
    loss_scale_window: int = key(1000, at_least=1)
    """Steps without overflow before the dynamic loss scale doubles."""
    distributed_optimizer: bool = True
    """Shard master weights and moments over data-parallel replicas. Checkpoints fit both."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during the last backward pass of a step. See docs/configuration.md#overlap."""
    overlap_param_gather: bool = False
    """Gather the language model's updated parameters during the next forward pass. Needs `overlap_grad_reduce`."""

    @property
    def offloads(self) -> bool:
        """True if states of the optimizer are on the host between steps. Those of Adafactor are small."""
        return self.offload and self.name in OF_OPTIMIZERS["offload"]

    def faults(self, precision: str, of_modules: Sequence["OptimConfig"]) -> Iterator[Fault]:
        """Yield invalid values, alone and together; `precision`: `train.precision`; `of_modules`: the settings of all
        modules."""
        yield from value_faults(self, "optim")
        names = {each.name for each in of_modules}
        for changed in {*changed_fields(self)} & OF_OPTIMIZERS.keys():
            if not names & {*OF_OPTIMIZERS[changed]}:
                text = f"is {shown(getattr(self, changed))}, but {' and '.join(sorted(names))} cannot use it"
                yield Fault(f"optim.{changed}", f"{text}. Remove it, or set optim.name={OF_OPTIMIZERS[changed][0]}")
        if "wsd_decay_fraction" in changed_fields(self) and "wsd" not in {each.decay for each in of_modules}:
            text = f"is {self.wsd_decay_fraction}, which requires optim.decay=wsd. Set it, or remove this key"
            yield Fault("optim.wsd_decay_fraction", text)
        if 0 <= self.lr < self.min_lr:
            yield Fault("optim.min_lr", f"must be at most optim.lr {self.lr}, is {self.min_lr}")
        if self.loss_scale > 0 and precision != "fp16":
            yield Fault(
                "optim.loss_scale",
                f"is {self.loss_scale:g}, but only fp16 scales losses and train.precision is {precision}: leave it "
                "at 0",
            )
        yield from self._overlap_faults()

    def _overlap_faults(self) -> Iterator[Fault]:
        if not self.overlap_param_gather:
            return
        if not self.distributed_optimizer:
            yield Fault(
                "optim.overlap_param_gather",
                "requires optim.distributed_optimizer=true. Set it, or optim.overlap_param_gather=false",
            )
        elif not self.overlap_grad_reduce:
            yield Fault(
                "optim.overlap_param_gather",
                "requires optim.overlap_grad_reduce=true. Set it, or optim.overlap_param_gather=false",
            )


@dataclass
class GroupConfig(Section):
    """Settings of the parameters whose names match a pattern; not set: those of the module."""

    lr: float | None = key(None, at_least=0, at_most=MOST_RATE)
    """Peak learning rate."""
    min_lr: float | None = key(None, at_least=0, at_most=MOST_RATE)
    """Learning rate at the last step."""
    weight_decay: float | None = key(None, at_least=0, at_most=MOST_DECAY)
    """Weight decay of all matching parameters, vectors included."""


@dataclass
class ModuleOptimConfig(Section):
    """Values of this module that differ from `optim`; not set: as there."""

    name: str | None = key(None, choices=OPTIMIZERS)
    """As `optim.name`: `adamw`, `muon`, `lion` or `adafactor`."""
    lr: float | None = key(None, at_least=0, at_most=MOST_RATE)
    """As `optim.lr`."""
    min_lr: float | None = key(None, at_least=0, at_most=MOST_RATE)
    """As `optim.min_lr`."""
    warmup_iters: int | None = key(None, at_least=0)
    """As `optim.warmup_iters`."""
    decay: str | None = key(None, choices=DECAYS)
    """As `optim.decay`: `cosine`, `linear`, `constant`, `wsd` or `inverse_sqrt`."""
    wsd_decay_fraction: float | None = key(None, above=0, at_most=1)
    """As `optim.wsd_decay_fraction`."""
    weight_decay: float | None = key(None, at_least=0, at_most=MOST_DECAY)
    """As `optim.weight_decay`."""
    moments: str | None = key(None, choices=MOMENTS)
    """As `optim.moments`: `fp32`, `bf16` or `8bit`."""
    ema: float | None = key(None, at_least=0, below=1)
    """As `optim.ema`: the decay rate of an average of the weights; 0: no average."""
    offload: bool | None = None
    """As `optim.offload`: keep moments and averages in pinned memory of the host between steps."""
    clip_grad: float | None = key(None, at_least=0)
    """Largest gradient norm of this module, clipped apart from the others; 0: no clipping."""
    projector_lr: float | None = key(None, at_least=0, at_most=MOST_RATE)
    """Peak learning rate of the projector, if it differs from the encoder's."""
    groups: dict[str, GroupConfig] = field(default_factory=dict)
    """Settings by part or shell pattern of parameter names: `{"*embedding*": {lr: 1e-4}}`. The last match counts. See
    docs/configuration.md#parameter-groups."""

    def faults(self, name: str, optim: OptimConfig) -> Iterator[Fault]:
        """Yield invalid values of module `name`, alone and with those of `optim`, which apply if this module sets
        none."""
        prefix = f"modules.{name}.optim"
        yield from value_faults(self, prefix)
        if self.projector_lr is not None and name == LANGUAGE:
            yield Fault(
                f"{prefix}.projector_lr",
                "applies to encoders only: the language model has no projector. Set it at the encoder's module",
            )
        optimizer, decay = self.name or optim.name, self.decay or optim.decay
        for unused in ("moments", "offload"):
            value = getattr(self, unused)
            if value not in (None, getattr(OptimConfig, unused)) and optimizer not in OF_OPTIMIZERS[unused]:
                text = f"is {shown(value)}, but {optimizer} cannot use it. Remove it, or set {prefix}.name=adamw"
                yield Fault(f"{prefix}.{unused}", text)
        if self.wsd_decay_fraction is not None and decay != "wsd":
            text = f"is {self.wsd_decay_fraction}, which requires decay wsd (is {decay}). Set {prefix}.decay=wsd"
            yield Fault(f"{prefix}.wsd_decay_fraction", text)
        for pattern, group in self.groups.items():
            if reason := why_no_parameter(name, pattern):
                yield Fault(f"{prefix}.groups", reason)
            yield from value_faults(group, f"{prefix}.groups.{pattern}")
        if decay == "constant":
            return
        least_key, least = self._least(prefix, optim)
        peaks = {"lr": optim.lr if self.lr is None else self.lr, "projector_lr": self.projector_lr}
        for field_name, peak in peaks.items():
            is_set = getattr(self, field_name) is not None
            if (is_set or self.min_lr is not None) and peak is not None and 0 <= peak < least:
                yield _rising(f"{prefix}.{field_name if is_set else 'min_lr'}", peak, least_key, least, prefix)
        for pattern, group in self.groups.items():
            key_name, peak = f"{prefix}.groups.{pattern}", peaks["lr"] if group.lr is None else group.lr
            group_least = (f"{key_name}.min_lr", group.min_lr) if group.min_lr is not None else (least_key, least)
            is_set = group.lr is not None or group.min_lr is not None
            if is_set and peak is not None and 0 <= peak < group_least[1]:
                yield _rising(key_name, peak, *group_least, key_name)

    def _least(self, prefix: str, optim: OptimConfig) -> tuple[str, float]:
        """Return the key of the module's last learning rate, and the rate."""
        return (f"{prefix}.min_lr", self.min_lr) if self.min_lr is not None else ("optim.min_lr", optim.min_lr)


def _rising(key_name: str, peak: float, least_key: str, least: float, prefix: str) -> Fault:
    return Fault(
        key_name,
        f"a rate of {peak:g} would rise to {least_key} {least:g} at the end: set {prefix}.min_lr to at most {peak:g}",
    )

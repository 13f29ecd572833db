"""Keys of the training loop: `train`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, key, value_faults
from mimo_train.config.schema_fusions import FusionsConfig
from mimo_train.config.schema_selection import StopEarlyConfig
from mimo_train.config.tasks import TASKS

RECOMPUTE = ("none", "selective", "full")
"""Values of `train.recompute`, besides parts of a layer."""

RECOMPUTE_PARTS = ("attention", "mlp", "experts", "norms")
"""Parts of a layer that `train.recompute` names."""

OFFLOAD = ("none", "layers")
"""Values of `train.offload_activations`."""

FP8 = ("none", "tensorwise", "blockwise", "mxfp8")
"""Values of `train.fp8`."""

COMPILE = ("none", "layers")
"""Values of `train.compile`."""

ENTRY = r"\w+(\.\w+)*:\w+"
"""Format of entries in `train.callbacks` and `train.forward_step`."""

MOST_MINUTES = 100 * 365 * 24 * 60
"""A hundred years."""


def recompute_parts(recompute: str) -> tuple[str, ...]:
    """Return the parts of a layer that a value of `train.recompute` names; none for values of `RECOMPUTE`."""
    return () if recompute in RECOMPUTE else tuple(recompute.split("+"))


def recompute_faults(recompute: str, key_name: str) -> Iterator[Fault]:
    """Yield the fault of an unknown value."""
    parts = recompute_parts(recompute) if isinstance(recompute, str) else ("",)
    if len(set(parts)) < len(parts) or not set(parts) <= set(RECOMPUTE_PARTS):
        names = f"{', '.join(RECOMPUTE)}, or parts of {', '.join(RECOMPUTE_PARTS)} joined by +"
        yield Fault(key_name, f"must be {names}, is {recompute!r}")


@dataclass
class TrainConfig(Section):
    """The training loop."""

    task: str = key("sft", choices=tuple(TASKS))
    """What to learn: `sft` (the answers), a teacher's next tokens (`distill`, see docs/distillation.md), or from
    preferences `dpo`, `ipo`, `simpo`, `orpo`, `kto` or `reward`. See docs/preferences.md."""
    iters: int = key(1000, at_least=0)
    """Optimizer steps; 0: as many as `epochs` takes."""
    epochs: float = key(0.0, at_least=0, at_most=1e6, zero_means="iters counts")
    """Epochs to train, instead of `iters`. An epoch of a mixture is the sum of its sources."""
    global_batch_size: int = key(32, at_least=1, at_most=2**24)
    """Samples of an optimizer step."""
    micro_batch_size: int = key(8, at_least=1, at_most=2**24)
    """Samples of a microbatch on one data-parallel rank of `language`."""
    precision: str = key("fp32", choices=("fp32", "bf16", "fp16"))
    """Weights and activations in `fp32`, `bf16` or `fp16`. Master weights and gradients stay fp32."""
    fp8: str = key("none", choices=FP8)
    """Matmuls of transformer layers in fp8: `none`, `tensorwise`, `blockwise` or `mxfp8`. See
    docs/performance.md#fp8."""
    num_layers_at_start_in_bf16: int = key(0, at_least=0)
    """First layers of each fp8 module that stay in bf16."""
    num_layers_at_end_in_bf16: int = key(0, at_least=0)
    """Last layers of each fp8 module that stay in bf16."""
    compile: str = key("none", choices=COMPILE)
    """Compile torch's `layers`, or `none`. See docs/performance.md#compiled-layers."""
    fusions: FusionsConfig = field(default_factory=FusionsConfig)
    """Fused kernels of layers. See docs/performance.md#fusions."""
    recompute: str = "none"
    """Recompute activations in backward: `none`, `selective` (core attention), `full` (every layer), or parts of each
    layer: `attention`, `mlp`, `experts`, `norms` (in front of both), joined by `+`. See
    docs/performance.md#recompute."""
    offload_activations: str = key("none", choices=OFFLOAD)
    """Keep what `layers` need for backward in the host's memory, or `none`. See
    docs/performance.md#activations-on-the-host."""
    logits: str = key("learned", choices=("learned", "all"))
    """Positions that get logits: `learned` (those with a loss) or `all`."""
    max_logits_mib: int = key(256, at_least=0, at_most=2**30)
    """Most logits of a microbatch on a rank, in MiB of fp32. Larger ones are not stored: the loss is computed in blocks
    of the vocabulary. See docs/performance.md#loss-without-logits."""
    eval_interval: int = key(0, at_least=0)
    """Steps between evaluations; 0: at the end only."""
    eval_samples: int = key(0, at_least=0)
    """Held-out samples per evaluation; 0: all."""
    eval_metrics: list[str] = field(default_factory=list)
    """Metrics of generated answers at evaluations: `anls`, `vqa`, ..., or `package.module:function`. See
    docs/data.md#held-out-sets."""
    eval_max_new_tokens: int = key(64, at_least=1)
    """Longest answer generated for `eval_metrics`, in tokens."""
    report_samples: int = key(24, at_least=0)
    """Held-out samples shown in the report."""
    log_interval: int = key(1, at_least=1)
    """Steps between log lines."""
    rampup_batch_size: list[int] = key(factory=list, at_least=0, at_most=2**53)
    """`[first size, increment, samples]`: grow the global batch in equal steps over that many samples."""
    stop_early: StopEarlyConfig = field(default_factory=StopEarlyConfig)
    """End the run if a metric of evaluations no longer improves. See
    docs/checkpoints.md#the-best-checkpoints."""
    skip_iters: list[int] = key(factory=list, at_least=1)
    """Steps, counted from 1, to skip with their samples."""
    loss_weights: dict[str, float] = field(default_factory=dict)
    """Weights of losses that a loss function returns by name; others weigh 1."""
    on_nan: str = key("raise", choices=("raise", "skip", "bisect"))
    """After a loss or gradient that is not finite: `raise`, `skip` the update, or `bisect` (find the origin, then
    raise). See docs/reliability.md."""
    rerun: str = key("disabled", choices=("disabled", "validate_results", "report_determinism_stats"))
    """Megatron-Core's rerun state machine: `disabled`, `validate_results` or `report_determinism_stats`. See
    docs/reliability.md#suspect-losses."""
    exit_interval: int = key(0, at_least=0)
    """Save and exit at multiples of this step."""
    exit_duration_minutes: float = key(0.0, at_least=0, at_most=MOST_MINUTES)
    """Save and exit after this many minutes."""
    manual_gc_interval: int = key(0, at_least=0)
    """Steps between garbage collections on all ranks at once; 0: leave it to Python."""
    max_empty_steps: int = key(0, at_least=0)
    """Steps without loss that a run accepts. See docs/data.md#steps-without-loss."""
    callbacks: list[str] = field(default_factory=list)
    """Callback classes `package.module:Class`. See docs/callbacks.md."""
    forward_step: str = ""
    """Your forward step, `package.module:name`. Empty: the default one. See docs/training-api.md."""

    def faults(self) -> Iterator[Fault]:
        """Yield invalid values."""
        yield from value_faults(self, "train")
        yield from recompute_faults(self.recompute, "train.recompute")
        if self.epochs > 0 and self.iters > 0:
            yield Fault(
                "train.epochs",
                f"is {self.epochs:g}, but train.iters is {self.iters}. Set train.iters=0 or train.epochs=0",
            )
        elif self.epochs == 0 and self.iters == 0:
            yield Fault("train.iters", "is 0, and so is train.epochs. Set one of them")
        for entry in self.callbacks if isinstance(self.callbacks, list) else ():
            if not re.fullmatch(ENTRY, entry):
                yield Fault("train.callbacks", f"must be entries package.module:Class, one is {entry!r}")
        if self.forward_step and not (isinstance(self.forward_step, str) and re.fullmatch(ENTRY, self.forward_step)):
            text = f"must be package.module:name, got {self.forward_step!r}. A program passes its function to pretrain"
            yield Fault("train.forward_step", text)
        elif self.forward_step and self.task != "sft":
            text = f"is {self.forward_step}, and train.task={self.task} has a loss of its own. Set one of them only"
            yield Fault("train.forward_step", text)

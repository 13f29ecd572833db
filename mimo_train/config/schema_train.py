"""Keys of the loop and of the optimizer: `train` and `optim`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, key, value_faults

RECOMPUTE = ("none", "selective", "full")
"""Values of `train.recompute`."""

FP8 = ("none", "tensorwise", "blockwise", "mxfp8")
"""Values of `train.fp8`."""

COMPILE = ("none", "layers")
"""Values of `train.compile`."""

DECAYS = ("cosine", "linear", "constant")
"""Values of `optim.decay`."""

MOST_RATE, MOST_DECAY = 1000.0, 1000.0
"""Largest learning rate and weight decay: what is above is a slip of the pen."""

MOST_SCALE = 2.0**126
"""Largest loss scale: above it, a gradient of 1 is not finite in fp32."""

ENTRY = r"\w+(\.\w+)*:\w+"
"""How `train.callbacks` and `train.forward_step` name code."""

MOST_MINUTES = 100 * 365 * 24 * 60
"""A hundred years."""


@dataclass
class TrainConfig(Section):
    """The loop."""

    iters: int = key(1000, at_least=0)
    """Optimizer steps in all. 0: as many as `epochs` takes."""
    epochs: float = key(0.0, at_least=0, at_most=1e6, zero_means="iters counts")
    """Length of the run in epochs of its data, in place of `iters`: a mixture's is as many samples as all its sources
    have together. The last step is whole, with samples of the next epoch."""
    global_batch_size: int = key(32, at_least=1, at_most=2**24)
    """Samples of one optimizer step."""
    micro_batch_size: int = key(8, at_least=1, at_most=2**24)
    """Samples of one microbatch on one data-parallel rank of the language module. `micro_batch_size * dp` must divide
    every global batch."""
    precision: str = key("fp32", choices=("fp32", "bf16", "fp16"))
    """`fp32`, `bf16` or `fp16`, of weights and activations; master weights and gradients stay fp32, and fp16 scales the
    loss."""
    fp8: str = key("none", choices=FP8)
    """Products of matrices of the transformer layers in fp8, by Transformer Engine on CUDA: `none`, `tensorwise` (one
    scale a tensor), `blockwise` (one for 128 numbers, of weights for 128 x 128) or `mxfp8` (one for 32). Needs
    `precision` bf16. `modules.NAME.fp8` sets it for one module. See docs/fp8.md."""
    num_layers_at_start_in_bf16: int = key(0, at_least=0)
    """First layers that stay in bf16, in each module that has fp8. At most the layers of a pipeline stage."""
    num_layers_at_end_in_bf16: int = key(0, at_least=0)
    """Last layers that stay in bf16, likewise."""
    compile: str = key("none", choices=COMPILE)
    """`none` or `layers`: what is in front of core attention and what is behind it in each of torch's transformer
    layers, compiled by `torch.compile`. `modules.NAME.compile` sets it for one module. See docs/compile.md."""
    recompute: str = key("none", choices=RECOMPUTE)
    """`none`, `selective` (core attention) or `full` (every layer): activations computed again in backward.
    `modules.NAME.recompute` sets it for one module."""
    logits: str = key("learned", choices=("learned", "all"))
    """Positions of the text that get logits: `learned`, those with a loss; or `all`, where something reads the losses
    of every token that the default forward step returns, which are 0 elsewhere otherwise."""
    eval_interval: int = key(0, at_least=0)
    """Steps between evaluations; 0: at the end only."""
    eval_samples: int = key(0, at_least=0)
    """Held-out samples of an evaluation; 0: all of them."""
    report_samples: int = key(24, at_least=0)
    """Held-out samples with question, answer and truth in the report; 0 decodes none."""
    log_interval: int = key(1, at_least=1)
    """Steps between lines of the log."""
    rampup_batch_size: list[int] = key(factory=list, at_least=0, at_most=2**53)
    """`[first size, increment, samples]`: the global batch grows from the first size to `global_batch_size` in equal
    steps over that many samples; empty: no ramp-up. Every size is a multiple of `micro_batch_size * dp`."""
    skip_iters: list[int] = key(factory=list, at_least=1)
    """Steps, counted from 1, whose samples are skipped: no forward pass, no update, no step of the learning
    rate."""
    loss_weights: dict[str, float] = field(default_factory=dict)
    """Weights of the losses that a loss function returns as `{name: loss}`; 1 where a name is missing. A name that is
    no loss is an error."""
    on_nan: str = key("raise", choices=("raise", "skip", "bisect"))
    """What a loss or gradient that is not finite does: `raise` (an error that names module, rank, microbatch and
    samples, and a replay file), `skip` (the update) or `bisect` (raise, after finding the microbatch and layer where it
    begins). See docs/reliability.md."""
    rerun: str = key("disabled", choices=("disabled", "validate_results", "report_determinism_stats"))
    """Megatron-Core's rerun state machine: `disabled`, `validate_results` (repeat a step with a suspect loss, to tell
    transient faults of the hardware from wrong data) or `report_determinism_stats`. See
    docs/reliability.md#suspect-losses."""
    exit_interval: int = key(0, at_least=0)
    """The run saves and ends at a step that is a multiple of this; 0: never."""
    exit_duration_minutes: float = key(0.0, at_least=0, at_most=MOST_MINUTES)
    """The run saves and ends after this many minutes; 0: never."""
    manual_gc_interval: int = key(0, at_least=0)
    """Steps between garbage collections, on all ranks at once, with Python's own collector off; 0: Python decides."""
    max_empty_steps: int = key(0, at_least=0)
    """Steps without any token with loss, in all, before the run stops: answers that are empty or cut, or bad samples
    only. See docs/data.md#steps-without-loss."""
    callbacks: list[str] = field(default_factory=list)
    """Classes `package.module:Class` whose methods are called at events of the loop. See docs/callbacks.md."""
    forward_step: str = ""
    """Forward step of your own, `package.module:name`: a function, or a class that is instantiated without arguments.
    Evaluation uses it too. Empty: the one that comes with mimo-train. See docs/training-api.md."""

    def faults(self) -> Iterator[Fault]:
        """Values that cannot be."""
        yield from value_faults(self, "train")
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


@dataclass
class OptimConfig(Section):
    """The optimizer and its schedule, the same for every module."""

    name: str = key("adamw", choices=("adamw",))
    """`adamw`."""
    lr: float = key(1e-3, at_least=0, at_most=MOST_RATE)
    """Peak learning rate."""
    min_lr: float = key(1e-5, at_least=0, at_most=MOST_RATE)
    """Learning rate at the last step. At most `lr`."""
    warmup_iters: int = key(0, at_least=0)
    """Steps of linear warm-up from 0."""
    decay: str = key("cosine", choices=DECAYS)
    """`cosine`, `linear` or `constant`, from the end of warm-up to `train.iters`."""
    weight_decay: float = key(0.01, at_least=0, at_most=MOST_DECAY)
    """Decoupled weight decay, on matrices only."""
    beta1: float = key(0.9, at_least=0, below=1)
    """Decay rate of the first moment."""
    beta2: float = key(0.95, at_least=0, below=1)
    """Decay rate of the second moment."""
    eps: float = key(1e-8, above=0, at_most=1000)
    """Added to the denominator of the update."""
    clip_grad: float = key(1.0, at_least=0)
    """Largest gradient norm over all modules that have no `clip_grad` of their own; 0 does not clip."""
    loss_scale: float = key(0.0, at_least=0, at_most=MOST_SCALE, zero_means="dynamic")
    """Fixed loss scale of fp16, a power of 2; 0: dynamic. See docs/configuration.md#fp16."""
    initial_loss_scale: float = key(65536.0, at_least=1, at_most=MOST_SCALE)
    """First dynamic loss scale; it does not fall below 1."""
    loss_scale_window: int = key(1000, at_least=1)
    """Steps without overflow after which the dynamic loss scale doubles."""
    distributed_optimizer: bool = True
    """Whether data-parallel replicas divide master weights and moments among them; `false`: each keeps them whole, and
    gradients are summed everywhere. A checkpoint of one continues with the other."""
    overlap_grad_reduce: bool = False
    """Reduce the language model's gradients while its backward pass runs. See docs/configuration.md#overlap."""
    overlap_param_gather: bool = False
    """Gather the language model's updated parameters while the next forward pass runs. Needs `overlap_grad_reduce` and
    `distributed_optimizer`."""

    def faults(self, precision: str) -> Iterator[Fault]:
        """Values that cannot be, alone and together.

        Args:
            precision: `train.precision`.
        """
        yield from value_faults(self, "optim")
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

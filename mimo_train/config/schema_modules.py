"""Keys of one module: what it is made of, what of it is trained and how, its layout."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, key, value_faults
from mimo_train.config.llm_spec import MOST_LAYERS, MOST_WIDTH, LlmSpec
from mimo_train.config.parts import ADAPTED, LANGUAGE, why_no_parameter
from mimo_train.config.schema_train import COMPILE, DECAYS, FP8, MOST_DECAY, MOST_RATE, RECOMPUTE, OptimConfig

MOST_RANKS = 2**20
"""Ranks of a run, a million; more is a slip of the pen."""


@dataclass
class LayoutConfig(Section):
    """Parallel sizes of one module. Its ranks are tp * cp * dp * pp."""

    tp: int = key(1, at_least=1, at_most=MOST_RANKS)
    """Tensor parallel size. Must divide attention heads and the feed-forward width; key-value heads must be a multiple
    or a divisor of it."""
    pp: int = key(1, at_least=1, at_most=MOST_RANKS)
    """Pipeline stages, at most the layers; layers left over go to the first stage. Encoders on ranks of `language` have
    one."""
    dp: int = key(1, at_least=1, at_most=MOST_RANKS)
    """Data parallel size: replicas."""
    cp: int = key(1, at_least=1, at_most=MOST_RANKS)
    """Context parallel size: ranks that each sequence is cut over; `language` only. `data.sequence_length` must be a
    multiple of `2 cp` (with `sp`, of `2 cp tp`). See docs/context-parallel.md."""
    ep: int = key(1, at_least=1, at_most=MOST_RANKS)
    """Expert parallel size: ranks that the experts are dealt to. Must divide `num_experts`; `ep * etp` must divide `tp
    * cp * dp`."""
    etp: int = key(1, at_least=1, at_most=MOST_RANKS)
    """Expert tensor parallel size: ranks that each expert is cut over. Must divide its width."""
    vpp: int = key(1, at_least=1, at_most=MOST_LAYERS)
    """Virtual pipeline size: model chunks of each stage, for the interleaved schedule. Needs `pp` above 1; a language
    model alone only."""
    sp: bool = False
    """Sequence parallel: activations between tensor-parallel regions are split along the sequence. Needs `tp` above 1.
    The tokens of a picture inside an encoder, class token included, must be equal parts of `tp`: with `resize: native`
    for every size, so `merge^2` must be, without a class token."""

    def faults(self, prefix: str) -> Iterator[Fault]:
        """Values that cannot be."""
        yield from value_faults(self, prefix)
        if self.sp and self.tp == 1:
            yield Fault(f"{prefix}.sp", "sequence parallel needs tp > 1, tp is 1: set sp to false or raise tp")


@dataclass
class ModuleOptimConfig(Section):
    """What one module does differently from `optim`; a value that is not set is the run's."""

    lr: float | None = key(None, at_least=0, at_most=MOST_RATE)
    """Peak learning rate."""
    min_lr: float | None = key(None, at_least=0, at_most=MOST_RATE)
    """Learning rate at the last step."""
    warmup_iters: int | None = key(None, at_least=0)
    """Steps of linear warm-up from 0."""
    decay: str | None = key(None, choices=DECAYS)
    """`cosine`, `linear` or `constant`."""
    weight_decay: float | None = key(None, at_least=0, at_most=MOST_DECAY)
    """Decoupled weight decay, on matrices only."""
    clip_grad: float | None = key(None, at_least=0)
    """Largest gradient norm of this module alone: set, the module is its own clip group; 0 does not clip."""
    projector_lr: float | None = key(None, at_least=0, at_most=MOST_RATE)
    """Peak learning rate of the module's projector, where it differs from its encoder's."""

    def faults(self, name: str, optim: OptimConfig) -> Iterator[Fault]:
        """Values that cannot be, alone and together with those of the run.

        Args:
            name: of the module.
            optim: the run's values, which hold where this module sets none.
        """
        prefix = f"modules.{name}.optim"
        yield from value_faults(self, prefix)
        if self.projector_lr is not None and name == LANGUAGE:
            yield Fault(
                f"{prefix}.projector_lr",
                "applies to encoders only: the language model has no projector. Set it at the encoder's module",
            )
        if (self.decay or optim.decay) == "constant":
            return
        least_key = f"{prefix}.min_lr" if self.min_lr is not None else "optim.min_lr"
        least = optim.min_lr if self.min_lr is None else self.min_lr
        peaks = {"lr": optim.lr if self.lr is None else self.lr, "projector_lr": self.projector_lr}
        for field_name, peak in peaks.items():
            own = getattr(self, field_name) is not None
            if (own or self.min_lr is not None) and peak is not None and 0 <= peak < least:
                yield Fault(
                    f"{prefix}.{field_name if own else 'min_lr'}",
                    f"a rate of {peak:g} would rise to {least_key} {least:g} at the end: set {prefix}.min_lr to at "
                    f"most {peak:g}",
                )


@dataclass
class LoraConfig(Section):
    """Low-rank adapters beside frozen linear layers (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = key(0, at_least=0, at_most=MOST_WIDTH, zero_means="no adapters")
    """Rank of the adapters; 0: none. Above 0 the module's other weights are frozen, except an encoder's projector that
    has none. Needed wherever another key of adapters is set."""
    alpha: float = key(16.0, above=0)
    """The adapters' output is multiplied by `alpha / rank` (see `rslora`)."""
    dropout: float = key(0.0, at_least=0, below=1)
    """Dropout probability of the adapters' input."""
    targets: list[str] = field(default_factory=lambda: list(ADAPTED))
    """Linear layers that have adapters, as shell patterns. Without a dot, of the last part of a layer's name:
    `linear_qkv`, `linear_proj`, `linear_fc1`, `linear_fc2`, or projections of these with adapters of their own, as PEFT
    has them: `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`. With a dot, of the whole
    name: `"*.layers.[0-3].*linear_proj"`. Those of the projector begin with `input_projections`. A pattern that matches
    nothing is an error; experts have no adapters. See docs/frozen.md#targets."""
    rslora: bool = False
    """Multiply by `alpha / sqrt(rank)` instead (rsLoRA, arXiv 2312.03732)."""
    dora: bool = False
    """Train the length of every row of the adapted weight too, apart from its direction (DoRA, arXiv 2402.09353). Needs
    `dropout` 0."""
    adapter: str = ""
    """Folder of an adapter of PEFT that a new run starts with, for the model of `pretrained`: the other keys come from
    it. Empty: none. See docs/frozen.md#peft."""

    @property
    def scale(self) -> float:
        """What the adapters' output is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def faults(self, prefix: str) -> Iterator[Fault]:
        """Values that cannot be."""
        yield from value_faults(self, prefix)
        if self.rank <= 0:
            return
        if self.dora and self.dropout:
            yield Fault(
                f"{prefix}.dropout",
                f"is {self.dropout:g}, and DoRA scales the sum of weight and adapter, whose inputs would differ: "
                f"set it to 0, or {prefix}.dora to false",
            )
        if not self.targets:
            yield Fault(f"{prefix}.targets", f"must name some of {', '.join(ADAPTED)}, is empty")


@dataclass
class FeatureCacheConfig(Section):
    """Features of a frozen encoder, kept on disk from one epoch to the next."""

    dir: str = ""
    """Folder, which several runs may share; empty: no cache."""
    max_gigabytes: float = key(10.0, above=0)
    """Size of the folder, in 10^9 bytes, at which the features that were not used for longest go."""


@dataclass
class PlaceholderConfig(Section):
    """The tokens that a picture or a clip has in the text; its features replace the embeddings of the pads. Empty: as
    the tokenizer's chat template has them, else `<image>` or `<audio>` alone. See docs/data.md#placeholders."""

    pad: str = ""
    """Special token that is repeated for each token of a medium, such as `<|image_pad|>`; added to the vocabulary if it
    is not there."""
    start: str = ""
    """Text before the pads, such as `<|vision_start|>`."""
    end: str = ""
    """Text behind them, such as `<|vision_end|>`."""
    mark: str = ""
    """Token that the chat template writes for a medium, where it is not the pad, such as `<start_of_image>`."""


@dataclass
class ModuleConfig(Section):
    """One module: an encoder with its projector, or the language model; what of it is frozen; its layout."""

    encoder: Any = None
    """What reads the media of this module, see [its keys](#modulesnameencoder). Required, except for `language`, which
    has none."""
    projector: Any = None
    """What carries the features into the language model's embedding space, see [its keys](#modulesnameprojector).
    Required, except for `language`, which has none."""
    llm: LlmSpec | None = None
    """The language model, see [its keys](#moduleslanguagellm). Required for `language`; no other module has one."""
    pretrained: str = ""
    """Directory of a model as `transformers` saves it, instead of `llm` or `encoder` and its initial weights; empty:
    none. See docs/pretrained.md."""
    freeze: list[str] = field(default_factory=list)
    """What is not trained: `encoder`, `projector` (encoder modules), `llm` (language), or shell patterns of parameter
    names such as `"*embedding*"`. Layers are counted from 0 over all stages. A pattern that matches nothing is an
    error. See docs/frozen.md."""
    freeze_until: dict[str, int] = key(factory=dict, at_least=0)
    """What is not trained in the first steps, with their number: `{encoder: 1000}`; same names as in `freeze`. See
    docs/configuration.md#stages."""
    placeholder: PlaceholderConfig = field(default_factory=PlaceholderConfig)
    """The tokens that hold the places of this encoder's features in the text. See docs/data.md#placeholders."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters beside the frozen layers of the encoder or the language model. See docs/frozen.md#lora."""
    feature_cache: FeatureCacheConfig = field(default_factory=FeatureCacheConfig)
    """Features of a frozen encoder on disk, from one epoch to the next. See docs/frozen.md#feature-cache."""
    prefetch_microbatches: int = key(0, at_least=0, at_most=1_000_000)
    """Microbatches whose features a frozen encoder on its own ranks computes ahead, while it waits; 0: none. See
    docs/frozen.md#prefetching."""
    optim: ModuleOptimConfig = field(default_factory=ModuleOptimConfig)
    """What this module does differently from `optim`; a value that is not set is the run's. See
    docs/configuration.md#modules-of-their-own."""
    fp8: str = key("", choices=("", *FP8))
    """`none`, `tensorwise`, `blockwise` or `mxfp8`: products of this module's layers in fp8; empty: as `train.fp8`."""
    compile: str = key("", choices=("", *COMPILE))
    """`none` or `layers`: this module's layers compiled by `torch.compile`; empty: as `train.compile`."""
    recompute: str = key("", choices=("", *RECOMPUTE))
    """`none`, `selective` or `full`: activations of this module computed again in backward; empty: as
    `train.recompute`."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """Parallel sizes of this module, on `tp * cp * dp * pp` ranks. See docs/layouts.md."""
    balance: str = key("samples", choices=("samples", "patches"))
    """How an encoder's work is divided over its data-parallel ranks: `samples` (equal numbers of them) or `patches`
    (equal numbers of tokens inside the encoder, as nearly as whole samples in order allow). Order and numbers do not
    change."""

    def faults(self, name: str, optim: OptimConfig) -> Iterator[Fault]:
        """What is wrong with what is trained and how; sizes and layout are looked at by `mimo_train.layout`.

        Args:
            name: of this module.
            optim: the run's optimizer.
        """
        prefix = f"modules.{name}"
        yield from value_faults(self, prefix)
        if name == LANGUAGE and self.balance != "samples":
            yield Fault(f"{prefix}.balance", f"is {self.balance!r}, but only encoders have work to balance. Remove it")
        if name == LANGUAGE and self.placeholder != PlaceholderConfig():
            yield Fault(f"{prefix}.placeholder", "applies to encoders only. Set it at the encoder's module")
        yield from value_faults(self.placeholder, f"{prefix}.placeholder")
        yield from self.optim.faults(name, optim)
        yield from self._freeze_faults(name)
        yield from self.lora.faults(f"{prefix}.lora")
        if self.lora.adapter and not self.pretrained:
            yield Fault(
                f"{prefix}.lora.adapter",
                f"is for a model of transformers, and {prefix}.pretrained is empty: give that model's directory",
            )
        yield from value_faults(self.feature_cache, f"{prefix}.feature_cache")
        unfixed = self._why_features_change(name)
        if self.feature_cache.dir and unfixed:
            yield Fault(f"{prefix}.feature_cache.dir", f"{unfixed}, or leave it empty")
        if self.prefetch_microbatches > 0 and unfixed:
            yield Fault(f"{prefix}.prefetch_microbatches", f"{unfixed}, or set it to 0")

    def _freeze_faults(self, name: str) -> Iterator[Fault]:
        prefix = f"modules.{name}"
        for field_name, entries in (("freeze", self.freeze), ("freeze_until", self.freeze_until)):
            for entry in entries if isinstance(entries, list | dict) else ():
                if why := why_no_parameter(name, entry):
                    yield Fault(f"{prefix}.{field_name}", why)
        for entry in self.freeze_until:
            if entry in self.freeze:
                yield Fault(
                    f"{prefix}.freeze_until",
                    f"{entry!r} is in {prefix}.freeze too, which holds for the whole run: remove it from one of them",
                )

    def _why_features_change(self, name: str) -> str:
        """Why features of a sample are not the same throughout the run, and what to change; empty if they are."""
        if name == LANGUAGE:
            return "only encoders have features. Remove it"
        if "encoder" not in self.freeze:
            return f"features change while the encoder is trained: set modules.{name}.freeze=[encoder]"
        if self.encoder.dropout > 0:
            return f"dropout changes features: set modules.{name}.encoder.dropout=0 (is {self.encoder.dropout:g})"
        if self.layout.pp > 1:
            return f"an encoder in one stage is needed: set modules.{name}.layout.pp=1 (is {self.layout.pp})"
        return ""

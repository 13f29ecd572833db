"""Keys of one module: its parts, what it trains and how, and its layout."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from encoders.transformers_media.spec import ProcessorSpec
from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, key, value_faults
from mimo_train.config.llm_spec import MOST_LAYERS, MOST_WIDTH
from mimo_train.config.parts import ADAPTED, LANGUAGE, SAVED, why_no_parameter
from mimo_train.config.schema_optim import ModuleOptimConfig, OptimConfig
from mimo_train.config.schema_train import COMPILE, FP8, OFFLOAD, recompute_faults
from mimo_train.config.transformers_llm import TransformersLlm

BLOCK = 64
"""Numbers of a quantized weight with a common scale, as in `transformers`."""
MOST_RANKS = 2**20
"""Maximum number of ranks of a run; more is a typo."""


@dataclass
class LayoutConfig(Section):
    """Parallel sizes of one module. It has tp * cp * dp * pp ranks."""

    tp: int = key(1, at_least=1, at_most=MOST_RANKS)
    """Tensor parallel size."""
    pp: int = key(1, at_least=1, at_most=MOST_RANKS)
    """Pipeline stages. The first one gets the remainder of the layers. 1 for encoders on ranks of `language`."""
    dp: int = key(1, at_least=1, at_most=MOST_RANKS)
    """Data parallel size (replicas)."""
    cp: int = key(1, at_least=1, at_most=MOST_RANKS)
    """Context parallel size, of `language` only. See docs/layouts.md#long-sequences."""
    ep: int = key(1, at_least=1, at_most=MOST_RANKS)
    """Expert parallel size."""
    etp: int = key(1, at_least=1, at_most=MOST_RANKS)
    """Expert tensor parallel size."""
    vpp: int = key(1, at_least=1, at_most=MOST_LAYERS)
    """Model chunks per stage of `language` (interleaved schedule). See docs/layouts.md#interleaving."""
    sp: bool = False
    """Sequence parallel. Needs `tp` above 1, which must divide the tokens of an image inside the encoder."""
    fsdp: bool = False
    """Shard parameters over the `dp` ranks too (FSDP), for classes of transformers as they are. See
    docs/layouts.md#fsdp."""

    def faults(self, prefix: str) -> Iterator[Fault]:
        """Yield invalid values."""
        yield from value_faults(self, prefix)
        if self.sp and self.tp == 1:
            yield Fault(f"{prefix}.sp", "sequence parallel needs tp > 1, tp is 1: set sp to false or raise tp")


@dataclass
class LoraConfig(Section):
    """Low-rank adapters next to frozen linear layers (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = key(0, at_least=0, at_most=MOST_WIDTH, zero_means="no adapters")
    """Rank of the adapters. Above 0 the module's other weights are frozen."""
    alpha: float = key(16.0, above=0)
    """Adapters are scaled by `alpha / rank`."""
    dropout: float = key(0.0, at_least=0, below=1)
    """Dropout probability of the adapters' input."""
    targets: list[str] = field(default_factory=lambda: list(ADAPTED))
    """Shell patterns of linear layers: our names, PEFT's such as `q_proj`, or full names. See
    docs/frozen.md#targets."""
    rslora: bool = False
    """Scale by `alpha / sqrt(rank)` instead (arXiv 2312.03732)."""
    dora: bool = False
    """Also train the length of every row of the weight (arXiv 2402.09353). Needs `dropout` 0."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole next to the adapters: `embed_tokens`, `lm_head` (with tied embeddings
    `embed_tokens` alone). Of `language` only. See docs/frozen.md#embeddings."""
    quantization: str = key("", choices=("", "nf4"), zero_means="as trained")
    """`nf4`: keep the weights of linear layers that can have adapters in 4 bits (QLoRA). See docs/frozen.md#qlora."""
    adapter: str = ""
    """PEFT adapter that a new run starts from: a folder, or a name on the hub. See docs/frozen.md#peft."""

    @property
    def scale(self) -> float:
        """Factor of the adapters' output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def faults(self, prefix: str) -> Iterator[Fault]:
        """Yield invalid values."""
        yield from value_faults(self, prefix)
        if self.rank <= 0:
            for name in ("quantization", "modules_to_save"):
                if getattr(self, name) and self.rank == 0:
                    yield Fault(f"{prefix}.{name}", f"requires adapters. Set {prefix}.rank, or remove it")
            return
        for name in self.modules_to_save:
            if name not in SAVED:
                yield Fault(f"{prefix}.modules_to_save", f"must name some of {', '.join(SAVED)}, has {name!r}")
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
    """Features of a frozen encoder, cached on disk between epochs."""

    dir: str = ""
    """Folder, which several runs may share."""
    max_gigabytes: float = key(10.0, above=0)
    """Above this size (10^9 bytes) the least recently used features are deleted."""


@dataclass
class PlaceholderConfig(Section):
    """Tokens of an image or audio item in the text; its features replace the embeddings of the pads. Empty: as in the
    tokenizer's chat template, else `<image>` or `<audio>` alone. See docs/data.md#placeholders."""

    pad: str = ""
    """Special token for each token of an item, such as `<|image_pad|>`. Added to the vocabulary if missing."""
    start: str = ""
    """Text before the pads, such as `<|vision_start|>`."""
    end: str = ""
    """Text after the pads, such as `<|vision_end|>`."""
    mark: str = ""
    """Token that the chat template writes for an item, if it is not the pad."""


@dataclass
class ModuleConfig(Section):
    """One module: an encoder with its projector, or the language model; its frozen parts; its layout."""

    encoder: Any = None
    """The encoder, see [its keys](#modulesnameencoder). Not for `language`."""
    projector: Any = None
    """The projector, see [its keys](#modulesnameprojector). Not for `language`."""
    llm: Any = None
    """The language model, see [its keys](#moduleslanguagellm). For `language` only."""
    pretrained: str = ""
    """Directory as `transformers` saves it, or ORG/NAME of the hub, instead of `llm` or `encoder`. See
    docs/pretrained.md."""
    implementation: str = key("", choices=("", "native", "transformers"), zero_means="native if possible")
    """`native` (Megatron-Core's layers) or `transformers` (its class, data parallel only). Empty: `native` for
    supported families, else `transformers`. See docs/pretrained.md#as-it-is."""
    freeze: list[str] = field(default_factory=list)
    """Frozen parts: `encoder`, `projector`, `llm`, or shell patterns of parameter names such as `"*embedding*"`. See
    docs/frozen.md."""
    freeze_until: dict[str, int] = key(factory=dict, at_least=0)
    """Number of first steps in which a part is frozen: `{encoder: 1000}`. See docs/configuration.md#stages."""
    placeholder: PlaceholderConfig = field(default_factory=PlaceholderConfig)
    """Tokens in the text that this encoder's features replace. See docs/data.md#placeholders."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters of the encoder or the language model. See docs/frozen.md#lora."""
    feature_cache: FeatureCacheConfig = field(default_factory=FeatureCacheConfig)
    """Disk cache for the features of a frozen encoder. See docs/frozen.md#feature-cache."""
    prefetch_microbatches: int = key(0, at_least=0, at_most=1_000_000)
    """Microbatches that a frozen encoder on ranks of its own computes ahead in one pass. See
    docs/frozen.md#prefetching."""
    optim: ModuleOptimConfig = field(default_factory=ModuleOptimConfig)
    """Values that differ from `optim`. See docs/configuration.md#per-module-optimizer."""
    fp8: str = key("", choices=("", *FP8))
    """`none`, `tensorwise`, `blockwise` or `mxfp8`; empty: as `train.fp8`."""
    compile: str = key("", choices=("", *COMPILE))
    """`none` or `layers`; empty: as `train.compile`."""
    recompute: str = ""
    """As `train.recompute`, for this module; empty: the same."""
    offload_activations: str = key("", choices=("", *OFFLOAD))
    """`none` or `layers`; empty: as `train.offload_activations`."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """Parallel sizes of this module, on `tp * cp * dp * pp` ranks. See docs/layouts.md."""
    balance: str = key("samples", choices=("samples", "images"))
    """Divide the `samples` of a microbatch over an encoder's data-parallel ranks, or its single `images` (also audio
    items, and videos or their frames) by their work. Results do not change. See docs/layouts.md#encoders."""

    def faults(self, name: str, optim: OptimConfig) -> Iterator[Fault]:
        """Yield faults of training settings of module `name`; `mimo_train.layout` checks sizes and layout."""
        prefix = f"modules.{name}"
        yield from value_faults(self, prefix)
        if self.recompute != "":
            yield from recompute_faults(self.recompute, f"{prefix}.recompute")
        yield from self._implementation_faults(name)
        if name == LANGUAGE and self.balance != "samples":
            yield Fault(f"{prefix}.balance", f"is {self.balance!r}, but only encoders have work to balance. Remove it")
        if name == LANGUAGE and self.placeholder != PlaceholderConfig():
            yield Fault(f"{prefix}.placeholder", "applies to encoders only. Set it at the encoder's module")
        yield from value_faults(self.placeholder, f"{prefix}.placeholder")
        yield from self.optim.faults(name, optim)
        yield from self._freeze_faults(name)
        if self.projector is not None and self.projector.kind == "none":
            for key_name, is_set in (
                ("optim.projector_lr", self.optim.projector_lr is not None),
                ("freeze", "projector" in list(self.freeze or ())),
                ("freeze_until", "projector" in (self.freeze_until or {})),
            ):
                if is_set:
                    text = f"names the projector, which is a part of the encoder here ({prefix}.projector.kind is none)"
                    yield Fault(f"{prefix}.{key_name}", f"{text}. Name parameters of the encoder, or remove it")
        yield from self.lora.faults(f"{prefix}.lora")
        saved = self.lora.modules_to_save
        if saved and (name != LANGUAGE or isinstance(self.llm, TransformersLlm)):
            yield Fault(f"{prefix}.lora.modules_to_save", "applies to native language models only. Remove it")
        elif "lm_head" in saved and self.llm is not None and self.llm.tie_embeddings:
            text = f"names lm_head, which is tied to the embeddings. Set {prefix}.lora.modules_to_save=[embed_tokens]"
            yield Fault(f"{prefix}.lora.modules_to_save", text)
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

    def _implementation_faults(self, name: str) -> Iterator[Fault]:
        place, as_is = f"modules.{name}.implementation", isinstance(self.llm, TransformersLlm)
        if name != LANGUAGE:
            if self.implementation and (self.implementation == "transformers") != isinstance(
                self.encoder, ProcessorSpec
            ):
                text = f"set modules.{name}.pretrained to a directory of transformers, or remove the key"
                yield Fault(place, f"is {self.implementation!r}, and the encoder is of another kind: {text}")
        elif self.implementation == "transformers" and self.llm is not None and not as_is:
            yield Fault(
                place,
                f"is 'transformers', but modules.{name}.llm has sizes of a native model. Set modules.{name}.pretrained "
                f"to a directory of transformers, or modules.{name}.llm.model_config to its config.json",
            )
        elif self.implementation == "native" and as_is:
            yield Fault(
                place,
                f"is 'native', but modules.{name}.llm.model_config is a class of transformers. Remove one of them",
            )

    def _freeze_faults(self, name: str) -> Iterator[Fault]:
        prefix = f"modules.{name}"
        for field_name, entries in (("freeze", self.freeze), ("freeze_until", self.freeze_until)):
            for entry in entries if isinstance(entries, list | dict) else ():
                if reason := why_no_parameter(name, entry):
                    yield Fault(f"{prefix}.{field_name}", reason)
        for entry in self.freeze_until:
            if entry in self.freeze:
                yield Fault(
                    f"{prefix}.freeze_until",
                    f"{entry!r} is in {prefix}.freeze too, which holds for the whole run: remove it from one of them",
                )

    def _why_features_change(self, name: str) -> str:
        """Return why features of a sample change during the run, and the remedy; empty if they do not."""
        if name == LANGUAGE:
            return "only encoders have features. Remove it"
        if "encoder" not in self.freeze:
            return f"features change while the encoder is trained: set modules.{name}.freeze=[encoder]"
        if self.encoder.dropout > 0:
            return f"dropout changes features: set modules.{name}.encoder.dropout=0 (is {self.encoder.dropout:g})"
        if self.layout.pp > 1:
            return f"an encoder in one stage is needed: set modules.{name}.layout.pp=1 (is {self.layout.pp})"
        return ""

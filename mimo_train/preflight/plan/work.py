"""Floating point operations of the layers of each module, forward and backward, for one sample. Imports no torch."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from encoders.base import most_tokens
from encoders.plain.spec import PlainSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.estimate.flops import Passes, StepFlops
from mimo_train.estimate.matmuls import Media, encoder_matmuls, language_matmuls
from mimo_train.layout.kernels import layers_in_fp8
from mimo_train.layout.ranks import stage_layers

_LAYER = re.compile(r"(?:decoder\.|layers\.)layers\.(\d+)\.")
_LINEAR = re.compile(r"(.*?)(?:layers\.)?layers\.(\d+)\..*linear_(?:qkv|proj|fc1|fc2)\.weight")
"""What of a layer can be in fp8: neither attention nor routers are."""
AT_THE_END = 2**62
"""A step after all of `freeze_until`."""


@dataclass(frozen=True)
class Work:
    """FLOPs: of products with weights, and of core attention."""

    products: float = 0.0
    attention: float = 0.0
    products_back: float = 0.0
    """In backward, with what is computed again."""
    attention_back: float = 0.0
    in_fp8: float = 0.0
    """Of products, those in fp8."""
    in_fp8_back: float = 0.0
    """Of products_back."""

    @property
    def total(self) -> float:
        """Of forward and backward."""
        return self.products + self.attention + self.products_back + self.attention_back

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.products_back + other.products_back,
            self.attention_back + other.attention_back,
            self.in_fp8 + other.in_fp8,
            self.in_fp8_back + other.in_fp8_back,
        )


@dataclass(frozen=True)
class ModuleWork:
    """Of one sample through a module."""

    start: Work
    """In front of the layers, on the first stage."""
    layers: tuple[Work, ...]
    end: Work
    """Behind them, on the last one: projector, output layer."""

    @property
    def whole(self) -> Work:
        """Of all stages."""
        return sum(self.layers, self.start + self.end)

    def of_stage(self, stage: int, stages: int, chunks: int = 1) -> Work:
        """Of one pipeline stage, whose layers may be several model chunks."""
        numbers = stage_layers(len(self.layers), stage, stages, chunks) if self.layers else ()
        own = sum((self.layers[layer] for layer in numbers), Work())
        return own + (self.start if stage == 0 else Work()) + (self.end if stage == stages - 1 else Work())


def module_work(cfg: ConfigContainer, name: str, vocab: int, media_per_sample: float) -> ModuleWork:
    """Work of one sample, every part trained that is at the end of the run.

    Args:
        vocab: rows of the embedding.
        media_per_sample: pictures or clips of this module in a sample, each as large as any.
    """
    if name == LANGUAGE:
        length = cfg.data.sequence_length
        products = language_matmuls(cfg.llm, length, vocab)
    else:
        module = cfg.modules[name]
        media = _largest(module, media_per_sample)
        products = encoder_matmuls(name, module.encoder, module.projector, cfg.llm.hidden_size, media)
    return _by_layer(StepFlops(cfg, vocab).passes(name, products, AT_THE_END), _in_fp8(cfg, name))


def _in_fp8(cfg: ConfigContainer, name: str) -> dict[str, list[int]]:
    """Layers of a module in fp8, by what the names of their products begin with."""
    if cfg.fp8_of(name) == "none":
        return {}
    module = cfg.modules[name]
    if name == LANGUAGE:
        stacks = {"decoder.": cfg.llm.num_layers}
    elif isinstance(module.encoder, PlainSpec):
        stacks = {}
    else:
        parts = module.encoder.parts.items()
        stacks = {f"encoders.{name}.{part}{'.' if part else ''}": spec.built_layers for part, spec in parts}
    return {start: layers_in_fp8(cfg, range(layers), layers) for start, layers in stacks.items()}


def _largest(module: ModuleConfig, number: float) -> Media:
    encoder, projector = module.encoder, module.projector
    merge = projector.merge
    tokens, kept = encoder.most_inner_tokens(merge), encoder.kept_tokens
    pairs = tokens**2
    area = encoder.largest_area
    if area and encoder.sizes_vary:  # windows, where layers have them, of a square
        side = math.isqrt(area)
        pairs = encoder.attention_pairs(side, side, merge=projector.merge)
    patches = encoder.joined(merge) * (encoder.most_tokens(merge) - kept)
    latents = most_tokens(encoder, projector) if projector.latents else 0
    return Media(*(number * each for each in (patches, tokens, pairs, kept, latents)))


def _by_layer(passes: Sequence[Passes], in_fp8: Mapping[str, list[int]]) -> ModuleWork:
    start, end, layers = Work(), Work(), dict[int, Work]()
    for one in passes:
        product = one.product
        work = Work(
            product.forward,
            product.attention,
            product.forward * (one.matrix - 1 + one.matrix_again),
            product.attention * (one.attention - 1 + one.attention_again),
        )
        found, linear = _LAYER.search(product.name), _LINEAR.fullmatch(product.name)
        if linear and int(linear[2]) in in_fp8.get(linear[1], ()):
            work = replace(work, in_fp8=work.products, in_fp8_back=work.products_back)
        if found and not product.name.startswith("input_projections"):
            number = int(found[1])
            layers[number] = layers.get(number, Work()) + work
        elif layers or product.name.startswith("input_projections"):
            end += work
        else:
            start += work
    return ModuleWork(start, tuple(layers[number] for number in sorted(layers)), end)

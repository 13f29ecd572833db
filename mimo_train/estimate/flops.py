"""FLOPs of every module in one optimizer step, from the tokens and images that are actually computed.

Only matmuls count, a multiplication and an addition as two. Norms, activations, softmax and look-ups are left out, as
usual (Kaplan et al. 2020, arXiv:2001.08361, section 2.1; Narayanan et al. 2021, arXiv:2104.04473, section 5.1). A row
times a (k x n) weight is 2kn forward. Backward adds as much for the gradient of a trained weight, and as much for the
gradient of the input if backward reaches it. Core attention has no weights and takes twice its forward pass. So a
trained model takes three times its forward pass, and a frozen one that passes gradients two times, apart from
attention.

Model FLOPs are those of forward and backward; hardware FLOPs add recomputation. A matmul counts once, however many
tensor-parallel ranks share or repeat it.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from operator import add
from typing import NamedTuple

from encoders.base import most_tokens
from encoders.plain.spec import PlainSpec
from mimo_train.config.parts import LANGUAGE, PARTS, SAVED
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.config.schema_train import recompute_parts
from mimo_train.estimate.matmuls import Matmul, Media, encoder_matmuls, language_matmuls
from mimo_train.estimate.parameters import output_rows
from mimo_train.layout.adapters import adapted_linears, adapts_projector
from mimo_train.layout.kernels import layers_in_fp8
from mimo_train.layout.placement import connections
from mimo_train.layout.ranks import stage_layers


@dataclass(frozen=True)
class Flops:
    """FLOPs of one module, forward and backward."""

    model: float = 0.0
    """FLOPs without recomputation."""
    hardware: float = 0.0
    """FLOPs with recomputation."""

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.model + other.model, self.hardware + other.hardware)

    def __mul__(self, times: float) -> "Flops":
        return Flops(self.model * times, self.hardware * times)


def count(
    matmuls: Sequence[Matmul],
    frozen: Sequence[str] = (),
    *,
    upstream: bool,
    recompute: str = "none",
    adapted: Collection[str] = (),
) -> Flops:
    """Return the FLOPs of forward and backward over `matmuls`.

    Backward reaches a matmul if its weight, or that of any earlier one, is trained. Only matrices count: if a pattern
    freezes a matrix but not its bias or norm, these count as frozen too.

    Args:
        frozen: shell patterns of parameter names that are not trained.
        upstream: True if something before the first matmul is trained.
        recompute: as `train.recompute`: backward recomputes core attention (selective), whole layers or parts of them.
        adapted: names of matmuls with trained adapters, which are too small to count; gradients reach the first one.
    """
    model = again = 0.0
    for matmul, matrix, attention, matrix_again, attention_again in passes_of(
        matmuls, frozen, upstream=upstream, recompute=recompute, adapted=adapted
    ):
        model += matmul.forward * matrix + matmul.attention * attention
        again += matmul.forward * matrix_again + matmul.attention * attention_again
    return Flops(model, model + again)


class Passes(NamedTuple):
    """Number of times that forward and backward compute the FLOPs of a matmul, forward included."""

    matmul: Matmul
    matrix: int
    """Passes of the matmul with its weight."""
    attention: int
    """Passes of the core attention after it."""
    matrix_again: int
    """Passes of the matmul by recomputation."""
    attention_again: int


def passes_of(
    matmuls: Sequence[Matmul],
    frozen: Sequence[str] = (),
    *,
    upstream: bool,
    recompute: str = "none",
    adapted: Collection[str] = (),
) -> Iterator[Passes]:
    """Yield the passes of each matmul. Arguments as in `count`."""
    reached, parts = upstream, recompute_parts(recompute)
    for matmul in matmuls:
        trained = not any(fnmatchcase(matmul.name, pattern) for pattern in frozen)
        input_gradient = reached or (trained and matmul.input_gradient)
        reached = reached or trained or matmul.name in adapted
        again = reached and matmul.in_layer
        block = again and (recompute == "full" or _part_of(matmul.name) in parts)
        attention = block or (again and recompute == "selective")
        yield Passes(matmul, 1 + trained + input_gradient, 3 if reached else 1, int(block), int(attention))


def _part_of(matmul: str) -> str:
    """Return the part of a layer that computes a matmul, of `RECOMPUTE_PARTS`."""
    return "mlp" if ".mlp.linear_" in matmul else "experts" if ".mlp." in matmul else "attention"


def frozen_patterns(module: ModuleConfig, step: int) -> tuple[str, ...]:
    """Return shell patterns of the parameters that a module does not train in optimizer step `step`, from 1. These are
    the patterns of `freeze`, those of `freeze_until` for its first steps, and everything with adapters."""
    entries = [*module.freeze, *(entry for entry, steps in module.freeze_until.items() if step <= steps)]
    saved = module.lora.modules_to_save
    if saved:
        entries += ["decoder.*", *(parameter for name, parameter in SAVED.items() if name not in saved)]
    elif module.lora.rank:
        entries.append("encoder" if module.llm is None else "llm")
    return tuple(PARTS.get(entry, entry) for entry in entries)


Numbers = Mapping[str, Sequence[Sequence[int]]]
"""Media counts of a step: encoder module -> microbatch -> sample -> number."""

_Frozen = tuple[tuple[str, tuple[str, ...]], ...]
"""(module, shell patterns of its parameters that are not trained)."""


class StepFlops:
    """FLOPs of every module in a step of a run."""

    def __init__(self, cfg: ConfigContainer, vocab: int):
        """`vocab`: rows of the embedding, padding included (`padded_vocab_size`)."""
        self._recompute = {name: cfg.recompute_of(name) for name in cfg.modules}
        self._modules, self._connections = cfg.modules, connections(cfg)
        width = cfg.llm.hidden_size
        adapters = {name: adapted_linears(name, module, width) for name, module in cfg.modules.items()}
        self._adapted = {
            name: {f"{each.linear.of_expert(0)}.weight" for each in adapters[name].values()} for name in adapters
        }
        self._adapted_projectors = {name for name in adapters if adapts_projector(adapters[name])}
        one_of_each = [Media(**{field.name: 1}) for field in fields(Media)]
        self._matmuls = {
            name: [encoder_matmuls(name, module.encoder, module.projector, width, media) for media in one_of_each]
            for name, module in cfg.encoders.items()
        }
        self._of_text = partial(language_matmuls, cfg.llm, vocab=output_rows(cfg, vocab))
        self._row_logits = None if cfg.train.logits == "all" else 0
        self._language, self._units = cache(self._of_language), cache(self._of_units)

    def __call__(
        self, *, texts: Mapping[int, int], counts: Numbers, loads: Numbers, pairs: Numbers, step: int
    ) -> dict[str, Flops]:
        """Return the FLOPs of each module, except those of `of_logit`.

        Args:
            texts: number of spans that attend within themselves, by their positions (`StepPlan.texts_of_length`): rows,
                or samples of packed rows; padding is computed like text.
            counts: rows of features.
            loads: tokens inside the encoder.
            pairs: pairs of these tokens that attend to each other.
            step: number of the step, from 1; `freeze_until` depends on it.
        """
        frozen = self._frozen(step)
        _, units = self._units(frozen)
        flops = {}
        for name in self._modules:
            if name == LANGUAGE:
                flops[name] = self.of_texts(texts, step)
                continue
            rows, tokens, squares = (sum(map(sum, numbers[name])) for numbers in (counts, loads, pairs))
            encoder, projector = self._modules[name].encoder, self._modules[name].projector
            if projector.latents:
                images = rows / projector.latents
                kept = images * encoder.kept_tokens
                patches = tokens - images * encoder.leading_tokens
            elif encoder.is_tiled:
                patches, kept = tokens * encoder.most_patches() / encoder.token_unit(), 0.0
            else:
                patches = encoder.patches_of(rows, projector.merge)
                kept = rows - patches / encoder.joined(projector.merge)
            amounts = [patches, tokens, squares, kept, rows if projector.latents else 0]
            flops[name] = sum((unit * amount for unit, amount in zip(units[name], amounts, strict=True)), Flops())
        return flops

    def of_texts(self, texts: Mapping[int, int], step: int) -> Flops:
        """Return the FLOPs of the language model over some of the texts of a step. Arguments as above."""
        frozen = self._frozen(step)
        return sum(
            (self._language(length, self._row_logits, frozen) * number for length, number in texts.items()), Flops()
        )

    def of_logit(self, step: int) -> Flops:
        """Return the FLOPs of the logits of one position, for `train.logits=learned`. `of_texts` leaves them out then,
        since the plan of a step does not know the positions with a loss."""
        return self._language(0, 1, self._frozen(step))

    def passes(self, name: str, matmuls: Sequence[Matmul], step: int) -> list[Passes]:
        """Return the passes of matmuls of module `name` in a step."""
        frozen = self._frozen(step)
        reached, _ = self._units(frozen)
        return [
            *passes_of(
                matmuls,
                dict(frozen)[name],
                upstream=name in reached,
                recompute=self._recompute[name],
                adapted=self._adapted[name],
            )
        ]

    def _frozen(self, step: int) -> _Frozen:
        return tuple(
            (
                name,
                (*frozen_patterns(module, step), *([PARTS["projector"]] if name in self._adapted_projectors else [])),
            )
            for name, module in self._modules.items()
        )

    def _of_units(self, key: _Frozen) -> tuple[set[str], dict[str, list[Flops]]]:
        """Return the modules that gradients pass because something before them is trained, and the FLOPs of one of
        every `Media` field for each encoder."""
        frozen, reached = dict(key), set[str]()
        for source, destination in self._connections:  # in the order of the forward pass
            names = [matmul.name for matmul in self._matmuls[source][0]]
            trained = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in frozen[source])]
            if source in reached or self._adapted[source] or trained:
                reached.add(destination)
        units = {
            name: [self._count(name, matmuls, frozen[name], name in reached) for matmuls in of_each]
            for name, of_each in self._matmuls.items()
        }
        return reached, units

    def _of_language(self, length: int, logits: int | None, frozen: _Frozen) -> Flops:
        reached, _ = self._units(frozen)
        matmuls = self._of_text(length, logits=logits)
        return self._count(LANGUAGE, matmuls, dict(frozen)[LANGUAGE], LANGUAGE in reached)

    def _count(self, name: str, matmuls: Sequence[Matmul], frozen: tuple[str, ...], reached: bool) -> Flops:
        return count(matmuls, frozen, upstream=reached, recompute=self._recompute[name], adapted=self._adapted[name])


_LAYER = re.compile(r"(?:decoder\.|layers\.)layers\.(\d+)\.")
_LINEAR = re.compile(r"(.*?)(?:layers\.)?layers\.(\d+)\..*(?:linear_(?:qkv|proj|fc1|fc2)|in_proj|out_proj)\.weight")
"""Matches matmuls of a layer that can be in fp8: neither attention nor routers."""
AT_THE_END = 2**62
"""A step after all steps of `freeze_until`."""


@dataclass(frozen=True)
class Work:
    """FLOPs of matmuls with weights and of core attention, forward and backward."""

    matmuls: float = 0.0
    attention: float = 0.0
    matmuls_back: float = 0.0
    """FLOPs of matmuls in backward, with recomputation."""
    attention_back: float = 0.0
    in_fp8: float = 0.0
    """The part of `matmuls` in fp8."""
    in_fp8_back: float = 0.0
    """The part of `matmuls_back` in fp8."""

    @property
    def total(self) -> float:
        """FLOPs of forward and backward."""
        return self.matmuls + self.attention + self.matmuls_back + self.attention_back

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class ModuleWork:
    """Work of one sample in a module."""

    start: Work
    """Work before the layers, on the first stage."""
    layers: tuple[Work, ...]
    end: Work
    """Work after the layers, on the last stage: projector, output layer."""

    @property
    def whole(self) -> Work:
        """Work of all stages."""
        return sum(self.layers, self.start + self.end)

    def of_stage(self, stage: int, stages: int, chunks: int = 1) -> Work:
        """Return the work of one pipeline stage, over all its model chunks."""
        numbers = stage_layers(len(self.layers), stage, stages, chunks) if self.layers else ()
        work = sum((self.layers[layer] for layer in numbers), Work())
        return work + (self.start if stage == 0 else Work()) + (self.end if stage == stages - 1 else Work())


def module_work(cfg: ConfigContainer, name: str, vocab: int, media_per_sample: float) -> ModuleWork:
    """Return the work of one sample at the end of the run, when `freeze_until` no longer applies. `vocab`: rows of the
    embedding; `media_per_sample`: media items of this module in a sample, each of the largest size."""
    if name == LANGUAGE:
        answers = cfg.traits.answers
        matmuls = [
            replace(matmul, forward=answers * matmul.forward, attention=answers * matmul.attention)
            for matmul in language_matmuls(cfg.llm, cfg.data.sequence_length, output_rows(cfg, vocab))
        ]
    else:
        module = cfg.modules[name]
        media = _largest(module, media_per_sample)
        matmuls = encoder_matmuls(name, module.encoder, module.projector, cfg.llm.hidden_size, media)
    return _by_layer(StepFlops(cfg, vocab).passes(name, matmuls, AT_THE_END), _in_fp8(cfg, name))


def _in_fp8(cfg: ConfigContainer, name: str) -> dict[str, list[int]]:
    """Return the fp8 layers of a module, by the prefix of the names of their matmuls."""
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
    if area and encoder.sizes_vary:  # windows of a square, if layers have them
        side = math.isqrt(area)
        pairs = encoder.attention_pairs(side, side, merge=projector.merge)
    patches = encoder.joined(merge) * (encoder.most_tokens(merge) - kept)
    latents = most_tokens(encoder, projector) if projector.latents else 0
    return Media(*(number * each for each in (patches, tokens, pairs, kept, latents)))


def _by_layer(passes: Sequence[Passes], in_fp8: Mapping[str, list[int]]) -> ModuleWork:
    start, end, layers = Work(), Work(), dict[int, Work]()
    for matmul, matrix, attention, matrix_again, attention_again in passes:
        work = Work(
            matmul.forward,
            matmul.attention,
            matmul.forward * (matrix - 1 + matrix_again),
            matmul.attention * (attention - 1 + attention_again),
        )
        layer, linear = _LAYER.search(matmul.name), _LINEAR.fullmatch(matmul.name)
        if linear and int(linear[2]) in in_fp8.get(linear[1], ()):
            work = replace(work, in_fp8=work.matmuls, in_fp8_back=work.matmuls_back)
        if layer and not matmul.name.startswith("input_projections"):
            number = int(layer[1])
            layers[number] = layers.get(number, Work()) + work
        elif layers or matmul.name.startswith("input_projections"):
            end += work
        else:
            start += work
    return ModuleWork(start, tuple(layers[number] for number in sorted(layers)), end)

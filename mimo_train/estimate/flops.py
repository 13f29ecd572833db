"""FLOPs of every module in one optimizer step, from the tokens and pictures that are really computed.

Counted are the matrix products, a multiplication and an addition as two; norms, activations, softmax and look-ups are
left out, as the field does (Kaplan et al. 2020, arXiv:2001.08361, section 2.1; Narayanan et al. 2021, arXiv:2104.04473,
section 5.1). A row times a (k x n) weight is 2kn forward. Backward is as much again for the gradient of the weight, if
the weight is trained, and as much again for the gradient of the input, if backward gets there at all; the core of
attention has no weights and takes twice its forward pass. So a model that is trained as a whole takes three times its
forward pass, and a frozen one through which gradients pass two times, apart from attention.

Model FLOPs are what forward and backward need; hardware FLOPs add what recomputation runs again. A product counts once,
however many tensor-parallel ranks share or repeat it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cache, partial

from mimo_train.config.parts import LANGUAGE, PARTS
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.estimate.matmuls import Matmul, Media, encoder_matmuls, language_matmuls
from mimo_train.layout.adapters import adapted_linears, adapts_projector
from mimo_train.layout.placement import connections


@dataclass(frozen=True)
class Flops:
    """FLOPs of one module, forward and backward."""

    model: float = 0.0
    """Without recomputation."""
    hardware: float = 0.0
    """With recomputation."""

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.model + other.model, self.hardware + other.hardware)

    def __mul__(self, times: float) -> "Flops":
        return Flops(self.model * times, self.hardware * times)


def count(
    products: Sequence[Matmul],
    frozen: Sequence[str] = (),
    *,
    upstream: bool,
    recompute: str = "none",
    adapted: Collection[str] = (),
) -> Flops:
    """FLOPs of forward and backward over `products`.

    Backward reaches a product if its weight is trained, or any before it is. Only matrices are looked at: where a
    pattern freezes a matrix and leaves its bias or a norm, these are taken as frozen too.

    Args:
        frozen: shell patterns of parameter names that are not trained.
        upstream: whether something is trained in front of the first product.
        recompute: none, selective (core attention is computed again in backward) or full (whole layers).
        adapted: names of products with trained adapters, which are too small to count; gradients go back to the first.
    """
    model = again = 0.0
    for passes in passes_of(products, frozen, upstream=upstream, recompute=recompute, adapted=adapted):
        product = passes.product
        model += product.forward * passes.matrix + product.attention * passes.attention
        again += product.forward * passes.matrix_again + product.attention * passes.attention_again
    return Flops(model, model + again)


@dataclass(frozen=True)
class Passes:
    """How often the FLOPs of a product are computed in forward and backward; the forward pass is one of them."""

    product: Matmul
    matrix: int
    """With its weight."""
    attention: int
    """Of the core attention behind it."""
    matrix_again: int
    """By recomputation."""
    attention_again: int


def passes_of(
    products: Sequence[Matmul],
    frozen: Sequence[str] = (),
    *,
    upstream: bool,
    recompute: str = "none",
    adapted: Collection[str] = (),
) -> Iterator[Passes]:
    """The passes of each product; arguments as those of `count`."""
    reached = upstream
    for product in products:
        trained = not any(fnmatchcase(product.name, pattern) for pattern in frozen)
        input_gradient = reached or (trained and product.input_gradient)
        reached = reached or trained or product.name in adapted
        again = reached and product.in_layer and recompute != "none"
        full = again and recompute == "full"
        yield Passes(product, 1 + trained + input_gradient, 3 if reached else 1, int(full), int(again))


def frozen_patterns(module: ModuleConfig, step: int) -> tuple[str, ...]:
    """Shell patterns of the parameters that a module does not train in optimizer step `step`, counted from 1: those of
    `freeze`, those of `freeze_until` during that many first steps, and all that have adapters beside them."""
    entries = [*module.freeze, *(entry for entry, steps in module.freeze_until.items() if step <= steps)]
    if module.lora.rank:
        entries.append("encoder" if module.llm is None else "llm")
    return tuple(PARTS.get(entry, entry) for entry in entries)


Numbers = Mapping[str, Sequence[Sequence[int]]]
"""Of the media of a step: encoder module -> microbatch -> sample -> number."""

_Frozen = tuple[tuple[str, tuple[str, ...]], ...]
"""(module, shell patterns of its parameters that are not trained)."""


class StepFlops:
    """FLOPs of every module in a step of a run."""

    def __init__(self, cfg: ConfigContainer, vocab: int):
        """`vocab`: rows of the embedding, padding included (`memory.padded_vocab_size`)."""
        self._recompute = {name: cfg.recompute_of(name) for name in cfg.modules}
        self._modules, self._connections = cfg.modules, connections(cfg)
        width = cfg.llm.hidden_size
        adapters = {name: adapted_linears(name, module, width) for name, module in cfg.modules.items()}
        self._adapted = {name: {f"{linear}.weight" for linear in adapters[name]} for name in adapters}
        self._adapted_projectors = {name for name in adapters if adapts_projector(adapters[name])}
        one_of_each = [Media(**{field.name: 1}) for field in fields(Media)]
        self._products = {
            name: [encoder_matmuls(name, module.encoder, module.projector, width, one) for one in one_of_each]
            for name, module in cfg.encoders.items()
        }
        self._of_text = partial(language_matmuls, cfg.llm, vocab=vocab)
        self._row_logits = None if cfg.train.logits == "all" else 0
        self._row, self._logit = cache(self._of_row), cache(self._of_one_logit)
        self._unit: dict[_Frozen, tuple[set[str], dict[str, list[Flops]]]] = {}

    def __call__(
        self, *, texts: Mapping[int, int], counts: Numbers, loads: Numbers, pairs: Numbers, step: int
    ) -> dict[str, Flops]:
        """FLOPs of each module, but for `of_logit`.

        Args:
            texts: what of the text attends within itself, by its positions (`StepPlan.texts_of_length`): rows, or the
                samples of packed ones; padding is computed like text.
            counts: rows of features; loads: tokens inside the encoder; pairs: of these that attend to each other.
            step: number of the step, from 1; `freeze_until` depends on it.
        """
        frozen = self._frozen(step)
        reached, units = self._units(frozen)
        flops = {}
        for name in self._modules:
            if name == LANGUAGE:
                flops[name] = self.of_texts(texts, step)
                continue
            rows, tokens, squares = (sum(map(sum, numbers[name])) for numbers in (counts, loads, pairs))
            encoder, projector = self._modules[name].encoder, self._modules[name].projector
            if projector.latents:
                pictures = rows / projector.latents
                kept = pictures * encoder.kept_tokens
                patches = tokens - pictures * encoder.leading_tokens
            elif encoder.is_tiled:
                patches, kept = tokens * encoder.most_patches() / encoder.token_unit(), 0.0
            else:
                patches = encoder.patches_of(rows, projector.merge)
                kept = rows - patches / encoder.joined(projector.merge)
            amounts = [patches, tokens, squares, kept, rows if projector.latents else 0]
            flops[name] = sum((unit * amount for unit, amount in zip(units[name], amounts, strict=True)), Flops())
        return flops

    def of_texts(self, texts: Mapping[int, int], step: int) -> Flops:
        """FLOPs of the language model over some of the texts of a step; arguments as above."""
        frozen = self._frozen(step)
        reached, _ = self._units(frozen)
        return sum(
            (self._row(length, frozen, LANGUAGE in reached) * number for length, number in texts.items()), Flops()
        )

    def of_logit(self, step: int) -> Flops:
        """FLOPs of the logits of one position, with `train.logits=learned`: `of_texts` has none then, since the plan of
        a step does not know where losses are."""
        frozen = self._frozen(step)
        reached, _ = self._units(frozen)
        return self._logit(frozen, LANGUAGE in reached)

    def passes(self, name: str, products: Sequence[Matmul], step: int) -> list[Passes]:
        """Passes of products of module `name` in a step."""
        frozen = self._frozen(step)
        reached, _ = self._units(frozen)
        return [
            *passes_of(
                products,
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

    def _units(self, key: _Frozen) -> tuple[set[str], dict[str, list[Flops]]]:
        """The modules that gradients have to go through because something in front of them is trained, and FLOPs of
        one of everything in `Media`, of each encoder."""
        if key not in self._unit:
            frozen, reached = dict(key), set[str]()
            for source, destination in self._connections:  # in the order of the forward pass
                if source in reached or self._adapted[source] or is_trained(self._products[source][0], frozen[source]):
                    reached.add(destination)
            self._unit[key] = (
                reached,
                {
                    name: [self._count(name, products, frozen[name], name in reached) for products in of_each]
                    for name, of_each in self._products.items()
                },
            )
        return self._unit[key]

    def _of_row(self, length: int, frozen: _Frozen, reached: bool) -> Flops:
        """FLOPs of the language model over one row of `length` positions."""
        return self._count(LANGUAGE, self._of_text(length, logits=self._row_logits), dict(frozen)[LANGUAGE], reached)

    def _of_one_logit(self, frozen: _Frozen, reached: bool) -> Flops:
        return self._count(LANGUAGE, self._of_text(0, logits=1), dict(frozen)[LANGUAGE], reached)

    def _count(self, name: str, products: Sequence[Matmul], frozen: tuple[str, ...], reached: bool) -> Flops:
        return count(products, frozen, upstream=reached, recompute=self._recompute[name], adapted=self._adapted[name])


def is_trained(products: Sequence[Matmul], frozen: Sequence[str]) -> bool:
    """Whether any matrix of a module is trained."""
    return any(not any(fnmatchcase(product.name, pattern) for pattern in frozen) for product in products)

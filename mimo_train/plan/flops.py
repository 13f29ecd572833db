"""FLOPs of every module in one optimizer step, from the tokens and pictures that are really computed. Imports no torch.

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
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache, partial

from encoders.plain.spec import PlainSpec
from encoders.projectors.spec import ProjectorSpec
from encoders.spec import GATED, EncoderSpec, built_layers, encoders_in, is_tiled, joined_width, patches_of
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE, PARTS
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.plan.adapters import adapted_linears, adapts_projector
from mimo_train.plan.graph import connections


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


@dataclass(frozen=True)
class Product:
    """What is computed with one weight matrix, in the order of the forward pass."""

    name: str
    """Name of the parameter inside its module, by which patterns of `freeze` find it."""
    forward: float = 0.0
    """FLOPs with this weight, forward; 0 for a look-up."""
    attention: float = 0.0
    """FLOPs of the core attention that follows, forward."""
    in_layer: bool = False
    """Whether it is part of a transformer layer, which full recomputation runs again."""
    input_gradient: bool = True
    """Whether backward gives the gradient of its input also where nothing asks for it, as the linear layers of
    Megatron-Core do and torch's own do not."""


def language_products(llm: LlmSpec, sequence_length: int, vocab: int, logits: int | None = None) -> list[Product]:
    """The products of one row of `sequence_length` tokens, padding included since it is computed.

    Forward, with h hidden size, q and k widths of all query and key heads, f feed-forward width, u the width of the
    first feed-forward product (2f with a gate), S sequence length, P pairs of tokens that attend, L layers, V rows of
    the output layer, N positions with logits:

        L * (2S * (h*(q + 2k) + q*h + h*u + f*h) + 4q * P) + 2N * h * V

    The attention term is q.k and weights.v, 2q each for a position attended to; under the causal mask P is
    S(S + 1) / 2, and with a window of w < S tokens w(w + 1) / 2 + (S - w) w. Form: Chowdhery et al. 2022 (PaLM,
    arXiv:2204.02311), appendix B, which does not halve for the mask. With experts the feed-forward term is that of the
    experts a token passes: the router 2S * hE for E experts, `experts_per_token` experts of their own width, and the
    shared expert with its gate.

    Args:
        vocab: rows of the embedding, padding included.
        logits: N; None: all positions.
    """
    logits = sequence_length if logits is None else logits
    tokens, hidden, products = sequence_length, llm.hidden_size, []
    query, key = llm.query_width, llm.head_width * llm.key_heads
    products.append(Product("embedding.word_embeddings.weight"))
    if llm.position == "learned":
        products.append(Product("embedding.position_embeddings.weight"))
    for index in range(llm.num_layers):
        layer, seen = f"decoder.layers.{index}", min(llm.window_of(index) or tokens, tokens)
        core = 4 * query * (seen * (seen + 1) / 2 + (tokens - seen) * seen)
        products += _attention(layer, tokens, hidden, query, key, core)
        experts = llm.has_experts(index)
        products += _experts(layer, tokens, llm) if experts else _feed_forward(f"{layer}.mlp", tokens, llm)
    output = "embedding.word_embeddings.weight" if llm.tie_embeddings else "output_layer.weight"
    products.append(Product(output, 2 * logits * hidden * vocab))
    return products


@dataclass(frozen=True)
class Media:
    """Numbers of pictures or clips through an encoder, on which the FLOPs depend linearly."""

    patches: float = 0
    """Patches of pictures, frames of clips."""
    tokens: float = 0
    """Inside the encoder: patches and class tokens."""
    pairs: float = 0
    """Pairs of tokens of the same picture or clip that attend to each other, in a layer on average."""
    kept: float = 0
    """Features in front of the projector that are not made of patches or frames: class tokens."""
    latents: float = 0
    """Rows of a resampler."""


def encoder_products(
    name: str, spec: EncoderSpec | PlainSpec, projector: ProjectorSpec, language_width: int, media: Media
) -> list[Product]:
    """The products of pictures or clips through encoder module `name` and its projector.

    Forward, with P patches and e multiplications to embed one, T = P tokens (one more with a class token), A = T^2
    pairs of tokens (fewer where layers have windows), h hidden size, f feed-forward width, u the width of the first
    feed-forward product (2f when gated), L layers, N = P / j projected tokens (and class tokens that are kept) of width
    w = h * j, d language width, m mlp width:

        2P * e  +  L * (2T * (4h^2 + hu + fh) + 4A * h)  +  2N * (w*m + m*d)   (linear: 2N * w*d)

    For pictures with p x p pixels a patch in 3 channels, e = 3p^2 * h and j = merge^2; for clips P are frames, each of
    two windows of b mel bands that pass convolutions over 3 neighbours, e = 6b * h + 3h^2 and j = merge (without the
    Fourier transform). Attention is over all tokens, so its term is not halved. Same sources as `language_products`;
    the shape of the layers is that of Dosovitskiy et al. 2020 (ViT, arXiv:2010.11929).

    Of an encoder of plain torch only its number of weights is known: 2T for each, as if every weight met every token
    once (Kaplan et al. 2020), and 4A times the width of its attention, if its spec says that.

    A resampler of n latents for each of R / n media reads the N features: each of its layers takes 2R * (2dq + du + fd)
    + 2(N + R) * 2dk + 4n(N + R) * q, with q and k the widths of its query and key heads.
    """
    if isinstance(spec, PlainSpec):
        products = _plain_products(name, spec, media)
    else:
        products = [one for part in _media_of_parts(name, spec, media) for one in _layered_products(*part)]
    width, projection = joined_width(spec, projector), "input_projections.0"
    projected = media.patches / spec.joined(projector.merge) + media.kept
    for name, weights in projector.matrices(width, language_width).items():
        products.append(Product(f"{projection}.{name}.weight", 2 * projected * weights))
    return products + _resampler_products(
        f"{projection}.resampler", projector, language_width, projected, media.latents
    )


def _resampler_products(
    place: str, projector: ProjectorSpec, width: int, projected: float, latents: float
) -> list[Product]:
    resampler, products = projector.resampler, [Product(f"{place}.latents")] if projector.latents else []
    query = resampler.num_attention_heads * resampler.head_width(width) if resampler.latents else 0
    core = 4 * resampler.latents * (projected + latents) * query
    for layer in range(resampler.num_layers if resampler.latents else 0):
        for name, weights in resampler.matrices(width).items():
            rows = projected + latents if name in ("linear_k", "linear_v") else latents
            attention = core if name == "linear_v" else 0.0
            products.append(Product(f"{place}.layers.{layer}.{name}.weight", 2 * rows * weights, attention))
    return products


def count(
    products: Sequence[Product],
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

    product: Product
    matrix: int
    """With its weight."""
    attention: int
    """Of the core attention behind it."""
    matrix_again: int
    """By recomputation."""
    attention_again: int


def passes_of(
    products: Sequence[Product],
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
            name: [encoder_products(name, module.encoder, module.projector, width, one) for one in one_of_each]
            for name, module in cfg.encoders.items()
        }
        self._of_text = partial(language_products, cfg.llm, vocab=vocab)
        self._row_logits = None if cfg.train.logits == "all" else 0
        self._row = cache(self._of_row)
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
                kept = pictures * getattr(encoder, "kept_tokens", 0)
                patches = tokens - pictures * getattr(encoder, "leading_tokens", 0)
            elif is_tiled(encoder):
                patches, kept = tokens * encoder.most_patches() / encoder.token_unit(), 0.0
            else:
                patches = patches_of(encoder, projector, rows)
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
        return self._count(LANGUAGE, self._of_text(0, logits=1), dict(frozen)[LANGUAGE], LANGUAGE in reached)

    def passes(self, name: str, products: Sequence[Product], step: int) -> list[Passes]:
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
            for giver, taker in self._connections:  # in the order of the forward pass
                if giver in reached or self._adapted[giver] or is_trained(self._products[giver][0], frozen[giver]):
                    reached.add(taker)
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

    def _count(self, name: str, products: Sequence[Product], frozen: tuple[str, ...], reached: bool) -> Flops:
        return count(products, frozen, upstream=reached, recompute=self._recompute[name], adapted=self._adapted[name])


def is_trained(products: Sequence[Product], frozen: Sequence[str]) -> bool:
    """Whether any matrix of a module is trained."""
    return any(not any(fnmatchcase(product.name, pattern) for pattern in frozen) for product in products)


def _plain_products(name: str, spec: PlainSpec, media: Media) -> list[Product]:
    core = 4 * media.pairs * spec.attention_width()
    return [Product(f"encoders.{name}.model", 2 * media.tokens * spec.num_parameters(), core, in_layer=True)]


def _media_of_parts(name: str, spec: EncoderSpec, media: Media) -> Iterator[tuple[str, EncoderSpec, Media]]:
    """(name, encoder, its media) of each encoder that an encoder consists of: all have the same pictures, and one size
    of these."""
    parts = encoders_in(spec)
    for part, own in parts.items():
        if len(parts) == 1:
            yield name, own, media
            continue
        share = own.most_inner_tokens() / spec.most_inner_tokens()
        yield f"{name}.{part}", own, replace(media, tokens=media.tokens * share, pairs=media.pairs * share**2)


def _layered_products(name: str, spec: EncoderSpec, media: Media) -> list[Product]:
    hidden, encoder, tokens = spec.hidden_size, f"encoders.{name}", media.tokens
    products = [
        # Mergers of states are behind layers.
        Product(f"{encoder}.{parameter}", 2 * media.patches * each, input_gradient=parameter.startswith("deepstack."))
        for parameter, each in spec.embedding_products().items()
    ]
    up = 2 * spec.ffn_hidden_size if spec.activation == GATED else spec.ffn_hidden_size
    for index in range(built_layers(spec)):
        layer = f"{encoder}.layers.layers.{index}"
        products += _attention(layer, tokens, hidden, hidden, hidden, 4 * media.pairs * hidden)
        products += _two_linears(f"{layer}.mlp", tokens, hidden, up, spec.ffn_hidden_size)
    return products


def _attention(layer: str, tokens: float, hidden: int, query: int, key: int, core: float) -> Iterator[Product]:
    yield Product(f"{layer}.self_attention.linear_qkv.weight", 2 * tokens * hidden * (query + 2 * key), core, True)
    yield Product(f"{layer}.self_attention.linear_proj.weight", 2 * tokens * query * hidden, in_layer=True)


def _two_linears(prefix: str, rows: float, hidden: int, up: int, down: int) -> Iterator[Product]:
    yield Product(f"{prefix}.linear_fc1.weight", 2 * rows * hidden * up, in_layer=True)
    yield Product(f"{prefix}.linear_fc2.weight", 2 * rows * down * hidden, in_layer=True)


def _feed_forward(prefix: str, rows: float, llm: LlmSpec, ffn: int = 0) -> Iterator[Product]:
    ffn = ffn or llm.ffn_hidden_size
    yield from _two_linears(prefix, rows, llm.hidden_size, 2 * ffn if llm.is_gated else ffn, ffn)


def _experts(layer: str, tokens: int, llm: LlmSpec) -> Iterator[Product]:
    """Router, experts (each token passes `experts_per_token` of them; named as the first one), shared."""
    yield Product(f"{layer}.mlp.router.weight", 2 * tokens * llm.hidden_size * llm.num_experts, in_layer=True)
    rows = tokens * llm.experts_per_token
    yield from _feed_forward(f"{layer}.mlp.experts.local_experts.0", rows, llm, llm.expert_width)
    if llm.shared_expert_ffn_hidden_size:
        shared = f"{layer}.mlp.shared_experts"
        yield from _feed_forward(shared, tokens, llm, llm.shared_expert_ffn_hidden_size)
        if llm.shared_expert_gate:
            yield Product(f"{shared}.gate_weight", 2 * tokens * llm.hidden_size, in_layer=True)

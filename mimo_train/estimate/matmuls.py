"""The matmuls of language models and encoders, with the FLOPs of each (see `mimo_train.estimate.flops`)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from encoders.base import LayeredSpec
from encoders.plain.spec import PlainSpec
from encoders.projectors.spec import ProjectorSpec
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.transformers_llm import TransformersSizes, parameters_of
from mimo_train.models.blocks.base import Matmul
from mimo_train.models.blocks.encoder_layer import encoder_layer


def language_matmuls(llm: LlmSpec, sequence_length: int, vocab: int, logits: int | None = None) -> list[Matmul]:
    """Return the matmuls of one row of `sequence_length` tokens, padding included since it is computed.

    Forward, with h hidden size, q and k widths of all query and key heads, f feed-forward width, u the width of the
    first feed-forward matmul (2f with a gate), S sequence length, P pairs of tokens that attend, L layers, V rows of
    the output layer, N positions with logits:

        L * (2S * (h*(q + 2k) + q*h + h*u + f*h) + 4q * P) + 2N * h * V

    The attention term is q.k and weights.v, 2q for each pair. P is S(S + 1) / 2 under the causal mask, and w(w + 1) / 2
    + (S - w) w with a window of w < S tokens. The form is that of Chowdhery et al. 2022 (PaLM, arXiv:2204.02311),
    appendix B, which does not halve for the mask. With experts the feed-forward term is that of the experts of a token:
    the router 2S * hE for E experts, `experts_per_token` experts of their own width, and the shared expert with its
    gate.

    A class of transformers takes 2S for each element of its matrices, with the share of its experts that a token uses,
    without attention: 6 S for forward and backward.

    Args:
        vocab: rows of the output layer, padding included.
        logits: N; None: all positions.
    """
    logits = sequence_length if logits is None else logits
    tokens, hidden, matmuls = sequence_length, llm.hidden_size, []
    if isinstance(llm, TransformersSizes):
        return _of_class(llm, tokens, vocab, logits)
    matmuls.append(Matmul("embedding.word_embeddings.weight"))
    if llm.position == "learned":
        matmuls.append(Matmul("embedding.position_embeddings.weight"))
    for index, layer in enumerate(llm.layers()):
        matmuls += layer.matmuls(f"decoder.layers.{index}", tokens)
    output = "embedding.word_embeddings.weight" if llm.tie_embeddings else "output_layer.weight"
    matmuls.append(Matmul(output, 2 * logits * hidden * vocab))
    return matmuls


def _of_class(llm: TransformersSizes, tokens: int, vocab: int, logits: int) -> list[Matmul]:
    parameters = parameters_of(llm.model_config)
    matmuls = [Matmul(f"model.{parameters.embedding}")]
    matmuls += [
        Matmul(f"model.{name}", 2 * tokens * elements, in_layer=True, input_gradient=False)
        for name, elements in parameters.multiplied()
    ]
    return [*matmuls, Matmul(f"model.{parameters.output}", 2 * logits * llm.hidden_size * vocab, input_gradient=False)]


@dataclass(frozen=True)
class Media:
    """Counts of images or audio through an encoder, on which the FLOPs depend linearly."""

    patches: float = 0
    """Patches of images, frames of audio."""
    tokens: float = 0
    """Tokens inside the encoder: patches and class tokens."""
    pairs: float = 0
    """Pairs of tokens of the same image or audio that attend to each other, averaged over layers."""
    kept: float = 0
    """Features before the projector that do not come from patches or frames: class tokens."""
    latents: float = 0
    """Rows of a resampler."""


def encoder_matmuls(
    name: str, spec: LayeredSpec | PlainSpec, projector: ProjectorSpec, language_width: int, media: Media
) -> list[Matmul]:
    """Return the matmuls of images or audio through encoder module `name` and its projector.

    Forward, with P patches and e multiplications to embed one, T = P tokens (one more with a class token), A = T^2
    pairs of tokens (fewer where layers have windows), h hidden size, f feed-forward width, u the width of the first
    feed-forward matmul (2f when gated), L layers, N = P / j projected tokens (plus class tokens that are kept) of width
    w = h * j, d language width, m mlp width:

        2P * e  +  L * (2T * (4h^2 + hu + fh) + 4A * h)  +  2N * (w*m + m*d)   (linear: 2N * w*d)

    For images with p x p pixels per patch in 3 channels, e = 3p^2 * h and j = merge^2. For audio P are frames, each of
    two windows of b mel bands that pass convolutions over 3 neighbours: e = 6b * h + 3h^2 and j = merge, without the
    Fourier transform. Attention covers all tokens, so its term is not halved. Sources as in `language_matmuls`; layers
    as in Dosovitskiy et al. 2020 (ViT, arXiv:2010.11929).

    A plain torch encoder only gives its number of weights: 2T for each, as if every weight met every token once (Kaplan
    et al. 2020), and 4A times the width of its attention if its spec sets that.

    A resampler of n latents for each of R / n media items reads the N features. Each of its layers takes 2R * (2dq + du
    + fd) + 2(N + R) * 2dk + 4n(N + R) * q, with q and k the widths of its query and key heads.
    """
    if isinstance(spec, PlainSpec):
        matmuls = _plain_matmuls(name, spec, media)
    else:
        matmuls = [matmul for part in _media_of_parts(name, spec, media) for matmul in _layered_matmuls(*part)]
    width, projection = spec.joined_width(projector.merge), "input_projections.0"
    projected = media.patches / spec.joined(projector.merge) + media.kept
    for name, weights in projector.matrices(width, language_width).items():
        matmuls.append(Matmul(f"{projection}.{name}.weight", 2 * projected * weights))
    return matmuls + _resampler_matmuls(f"{projection}.resampler", projector, language_width, projected, media.latents)


def _resampler_matmuls(
    place: str, projector: ProjectorSpec, width: int, projected: float, latents: float
) -> list[Matmul]:
    resampler, matmuls = projector.resampler, [Matmul(f"{place}.latents")] if projector.latents else []
    query = resampler.num_attention_heads * resampler.head_width(width) if resampler.latents else 0
    core = 4 * resampler.latents * (projected + latents) * query
    for layer in range(resampler.num_layers if resampler.latents else 0):
        for name, weights in resampler.matrices(width).items():
            rows = projected + latents if name in ("linear_k", "linear_v") else latents
            attention = core if name == "linear_v" else 0.0
            matmuls.append(Matmul(f"{place}.layers.{layer}.{name}.weight", 2 * rows * weights, attention))
    return matmuls


def pair_cost(name: str, spec: LayeredSpec | PlainSpec, projector: ProjectorSpec, language_width: int) -> float:
    """Return (forward FLOPs of a pair of tokens that attend to each other) / (other forward FLOPs of a token) in an
    encoder module and its projector."""
    matmuls = encoder_matmuls(name, spec, projector, language_width, Media(patches=1, tokens=1, pairs=1))
    return sum(matmul.attention for matmul in matmuls) / sum(matmul.forward for matmul in matmuls)


def _plain_matmuls(name: str, spec: PlainSpec, media: Media) -> list[Matmul]:
    core = 4 * media.pairs * spec.attention_width()
    return [Matmul(f"encoders.{name}.model", 2 * media.tokens * spec.num_parameters(), core, in_layer=True)]


def _media_of_parts(name: str, spec: LayeredSpec, media: Media) -> Iterator[tuple[str, LayeredSpec, Media]]:
    """Yield (name, encoder, media) of each part of an encoder: all parts get the same images, in one size."""
    parts = spec.parts
    for part, spec_of_part in parts.items():
        if len(parts) == 1:
            yield name, spec_of_part, media
            continue
        share = spec_of_part.most_inner_tokens() / spec.most_inner_tokens()
        yield f"{name}.{part}", spec_of_part, replace(media, tokens=media.tokens * share, pairs=media.pairs * share**2)


def _layered_matmuls(name: str, spec: LayeredSpec, media: Media) -> list[Matmul]:
    encoder, tokens = f"encoders.{name}", media.tokens
    matmuls = [
        # State mergers are behind layers.
        Matmul(f"{encoder}.{parameter}", 2 * media.patches * each, input_gradient=parameter.startswith("deepstack."))
        for parameter, each in spec.embedding_products().items()
    ]
    layer = encoder_layer(spec)
    for index in range(spec.built_layers):
        matmuls += layer.matmuls(f"{encoder}.layers.layers.{index}", tokens, media.pairs)
    return matmuls

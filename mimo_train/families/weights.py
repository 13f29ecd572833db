"""Weight maps of language models: our names to those of a directory."""

from collections.abc import Iterator

from encoders.weight_map import Rows, Rule, WeightMap, same
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import Family
from mimo_train.families.registry import family_of

TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
"""Tensors with a row per token."""
SCORE = "score.weight"
"""The value head of a class for sequence classification."""


def language_map(
    spec: LlmSpec, padded_vocab: int, model_type: str, stored: int = 0, *, head: str | None = HEAD
) -> WeightMap:
    """Return the weight map of a language model.

    Args:
        spec: as in the family's config.json (`mimo_train.families.config_json`).
        padded_vocab: rows of our embedding; rows beyond the directory's are zeros.
        model_type: family, as in config.json.
        stored: rows in the directory if fewer than in `spec`: the others are drawn. 0: equal.
        head: the directory's output layer: HEAD, or of a model with a value head SCORE, or None if the value head is
            drawn.
    """
    family = family_of(model_type)
    rules = [_vocabulary("embedding.word_embeddings.weight", TABLE, spec, padded_vocab, stored)]
    for number in range(spec.num_layers):
        rules += _layer(spec, number, family)
    rules.append(same("decoder.final_layernorm.weight", "model.norm.weight", spec.hidden_size))
    copies: tuple[tuple[str, str], ...] = ()
    if head != HEAD:
        rules.append(Rule("output_layer.weight", (Rows(head or "", 1, std=spec.init_std),)))
    elif spec.tie_embeddings:
        copies = ((HEAD, TABLE),)  # published files may still have an output layer
    else:
        rules.append(_vocabulary("output_layer.weight", HEAD, spec, padded_vocab, stored))
    dropped = () if head == HEAD else (HEAD,)
    carried = tuple(pattern.format(layers=spec.num_layers) for pattern in family.carried)
    transposed = "interleaved_up" in family.names.get("experts", {})
    return WeightMap(tuple(rules), carried=carried, copies=copies, dropped=dropped, transposed=transposed)


def _vocabulary(ours: str, theirs: str, spec: LlmSpec, padded_vocab: int, stored: int) -> Rule:
    stored = stored or spec.vocab_size
    rows = [
        Rows(theirs, stored),
        Rows("", spec.vocab_size - stored, std=spec.init_std),
        Rows("", padded_vocab - spec.vocab_size),
    ]
    return Rule(ours, tuple(part for part in rows if part.count))


def _layer(spec: LlmSpec, number: int, family: Family) -> Iterator[Rule]:
    ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
    for norm, their in family.names["norms"].items():
        yield same(f"{ours}{norm}.weight", f"{theirs}{their}.weight", spec.hidden_size)
    for block in spec.layer(number).blocks:
        yield from block.rules(ours, theirs, family.names[block.kind])

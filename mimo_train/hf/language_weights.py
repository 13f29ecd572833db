"""Weight maps of language models: our names to hub names."""

from collections.abc import Iterator

from encoders.weight_map import Rows, Rule, WeightMap, heads, same, stacked, with_biases
from mimo_train.config.llm_spec import LlmSpec

_EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3"), "w2"),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj"), "down_proj"),
}
"""Names by family: parent of router and experts, an expert's two first weights, its second weight."""

TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
"""Tensors with a row per token."""


def language_map(spec: LlmSpec, padded_vocab: int, model_type: str, stored: int = 0) -> WeightMap:
    """Return the weight map of a language model.

    Args:
        spec: as in the family's config.json (`mimo_train.config.pretrained.language`).
        padded_vocab: rows of our embedding; rows beyond the directory's are zeros.
        model_type: family, as in config.json.
        stored: rows in the directory if fewer than in `spec`: the others are drawn. 0: equal.
    """
    rules = [_vocabulary("embedding.word_embeddings.weight", TABLE, spec, padded_vocab, stored)]
    for number in range(spec.num_layers):
        rules += _layer(spec, number, model_type)
    rules.append(same("decoder.final_layernorm.weight", "model.norm.weight", spec.hidden_size))
    if not spec.tie_embeddings:
        rules.append(_vocabulary("output_layer.weight", HEAD, spec, padded_vocab, stored))
    # Published files of tied models may still have an output layer.
    copies = ((HEAD, TABLE),) if spec.tie_embeddings else ()
    # Buffers of old versions, which follow from the config.
    return WeightMap(tuple(rules), carried=("model.layers.*.self_attn.rotary_emb.inv_freq",), copies=copies)


def _vocabulary(ours: str, theirs: str, spec: LlmSpec, padded_vocab: int, stored: int) -> Rule:
    stored = stored or spec.vocab_size
    rows = [
        Rows(theirs, stored),
        Rows("", spec.vocab_size - stored, std=spec.init_std),
        Rows("", padded_vocab - spec.vocab_size),
    ]
    return Rule(ours, tuple(part for part in rows if part.count))


def _layer(spec: LlmSpec, number: int, model_type: str) -> Iterator[Rule]:
    ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
    hidden, attention = spec.hidden_size, f"{theirs}self_attn."
    for ours_of_norm, their in _NORMS[spec.post_norms].items():
        yield same(f"{ours}{ours_of_norm}.weight", f"{theirs}{their}.weight", hidden)
    qkv = heads(
        f"{ours}self_attention.linear_qkv.weight",
        *(f"{attention}{part}_proj.weight" for part in "qkv"),
        groups=spec.key_heads,
        per_group=spec.num_attention_heads // spec.key_heads,
        size=spec.head_width,
    )
    proj = same(f"{ours}self_attention.linear_proj.weight", f"{attention}o_proj.weight", hidden)
    yield from with_biases([qkv]) if spec.bias or spec.qkv_bias else [qkv]
    yield from with_biases([proj]) if spec.bias or spec.proj_bias else [proj]
    if spec.qk_norm:
        for part in "qk":
            ours_of_norm = f"{ours}self_attention.{part}_layernorm.weight"
            yield same(ours_of_norm, f"{attention}{part}_norm.weight", spec.head_width)
    if spec.has_experts(number):
        yield from _experts(spec, f"{ours}mlp.", theirs, model_type)
    else:
        names = f"{theirs}mlp.", ("gate_proj", "up_proj"), "down_proj"
        block = list(_feed_forward(f"{ours}mlp.", *names, spec.ffn_hidden_size, hidden))
        yield from with_biases(block) if spec.bias else block


_NORMS = {
    False: {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"},
    True: {
        "input_layernorm": "input_layernorm",
        "self_attn_bda.norm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "mlp_bda.norm": "post_feedforward_layernorm",
    },
}
"""Norms of a layer by our names, without and with norms after its parts."""


def _experts(spec: LlmSpec, ours: str, theirs: str, model_type: str) -> Iterator[Rule]:
    place, up, down = _EXPERTS[model_type]
    yield same(f"{ours}router.weight", f"{theirs}{place}.gate.weight", spec.num_experts)
    for expert in range(spec.num_experts):
        own, their = f"{ours}experts.local_experts.{expert}.", f"{theirs}{place}.experts.{expert}."
        yield from _feed_forward(own, their, up, down, spec.expert_width, spec.hidden_size)


def _feed_forward(ours: str, theirs: str, up: tuple[str, str], down: str, width: int, hidden: int) -> Iterator[Rule]:
    yield stacked(f"{ours}linear_fc1.weight", [(f"{theirs}{half}.weight", width) for half in up])
    yield same(f"{ours}linear_fc2.weight", f"{theirs}{down}.weight", hidden)

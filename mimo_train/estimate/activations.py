"""Bytes of activations of one layer, of the end of the language model, and of the work between.

What is *kept* waits for the backward pass. *Work* is what is there besides at the fullest moment: gradients of
activations, logits, what is gathered from other ranks, and the gradient of one weight.

Symbols: s tokens of one sample, b samples of one microbatch on one rank, h hidden size, f feed-forward width, k width
of all key heads, t tensor parallel size, v vocabulary, e bytes of one activation (4 in fp32, 2 in half precision).
Formulas follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198), for attention that does not store the s x s scores; `mimo-train check --dry-run` counts the tensors
themselves (`tests/dist/preflight/dry_run/test_estimates.py` holds both against each other).
"""

import math

from mimo_train.config.llm_spec import LlmSpec

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one weight or activation, by `train.precision`."""
KEPT_SCORES, BLOCK = range(64, 257), 32
"""Positions of a row at which `mimo_train.cpu.attention` computes attention, and queries of one of its blocks."""
WIDEST_HEAD = 256
"""Channels of a head that torch's kernel for packed documents takes."""


def layer_activations(
    tokens: int,
    hidden: int,
    ffn: int,
    precision: str,
    *,
    key_width: int = 0,
    gated: bool = False,
    rope: bool = False,
    scaled: bool = False,
    dropout: bool = False,
    query_width: int = 0,
    post_norms: bool = False,
    head_norms: bool = False,
    fused_norms: bool = True,
    frozen: bool = False,
    plain: bool = False,
    whole_rows: bool = False,
    tp: int = 1,
    sp: bool = False,
    cp: int = 1,
) -> int:
    """Bytes that one transformer layer keeps for its backward pass, for `tokens` = s * b tokens on one rank.

    Kept in full on each tensor-parallel rank: the inputs of the two norms and of the two linear layers behind them
    (4 h), what the learned scales of the two branches multiply (2 h where there are some), and the dropout masks of the
    two branches (1 byte each per h). Divided by t: queries, keys, values, the
    output of attention (2 h + 2 k), queries and keys once more when rotated (h + k, since the values keep the unrotated
    ones alive), and the feed-forward activations before and after its function (2 f; 5 f when gated without a fused
    kernel). Sequence parallel divides the first part too. With f = 4 h, k = h, dropout, bf16, no gate and no rotation
    this is the paper's s b h (10 + 24 / t), without its 5 a s / (h t) of stored attention scores, and 34 s b h / t with
    sequence parallel. Where queries have another width q than the hidden states, it takes the place of h in the second
    part. Norms behind attention and the feed-forward block keep their inputs: 2 h more in full. Norms of grouped heads
    keep a copy of the queries.

    Args:
        fused_norms: whether norms keep their inputs alone; else what is normalised is there once more, in fp32, and
            half precision is copied to fp32 before.
        frozen: whether the linear layers are not trained, and need no inputs.
        plain: whether the layer is `mimo_train.models.dense_layer`'s, which takes the two halves of a gated block from
            one product without a copy (4 f in the place of 5 f).
        whole_rows: whether one kernel takes the documents of packed rows. It wants values of their own, so that what
            they were cut from goes, and as many heads of keys as of queries (4 h in all).
        cp: ranks whose keys and values are gathered, and kept in the place of this rank's own (2 k each); attention of
            its two chunks of queries is joined by a copy (h).
    """
    size, keys, query = BYTES[precision], key_width or hidden, query_width or hidden
    norms = 4 if post_norms else 2
    per_norm = 1 if frozen else 2
    whole = ((norms - 2) + 2 * per_norm + (2 if scaled else 0)) * hidden * size + (2 * hidden if dropout else 0)
    if not fused_norms:
        whole += norms * hidden * (4 if precision == "fp32" else 8)
    split = 2 * query + 2 * keys + (query + keys if rope else 0)
    if cp > 1:
        split = (3 if rope else 2) * query + 2 * keys * cp
    elif whole_rows:
        split = 4 * query
    if head_norms and query != keys:
        split += query
    split += ((4 if plain else 5) if gated else 2) * ffn - (ffn if frozen else 0)
    split *= size
    return tokens * (whole + split) // tp if sp else tokens * whole + tokens * split // tp


def layer_work(
    tokens: int, hidden: int, ffn: int, precision: str, *, gated: bool, frozen: bool, tp: int = 1, sp: bool = False
) -> int:
    """Bytes of work in the backward pass of a layer, at its feed-forward block: the gradients of its output and of the
    residual (2 h), and either those of what the function gets (f; 2 f with a gate), or, when the activations of the
    block are gone, the gradient of its first weight (h f / t; twice with a gate). With sequence parallel one input is
    gathered (h)."""
    size, up = BYTES[precision], (2 if gated else 1) * ffn // tp
    ends = 2 * tokens * hidden * size // (tp if sp else 1)
    gathered = tokens * hidden * size if sp else 0
    function = tokens * up * size
    weight = 0 if frozen else up * hidden * size - tokens * ffn // tp * (3 if gated else 1) * size
    return ends + gathered + max(function, weight)


def stack_activations(layers: int, layer: int, boundary: int, in_flight: int, recompute: str) -> int:
    """Bytes that `layers` layers keep of `in_flight` microbatches between their forward and their backward pass.

    `layer`: `layer_activations`. `boundary`: the input of one layer (e s b h; 2 s b h in the paper's half precision),
    which is all that full recompute keeps per layer; the layer that is being computed again is work. Selective
    recompute saves the attention scores, which our attention does not store: it counts as none.
    """
    return layers * (boundary if recompute == "full" else layer) * in_flight


def expert_activations(
    tokens: int, llm: LlmSpec, precision: str, *, tp: int = 1, etp: int = 1, sp: bool = False
) -> int:
    """Bytes that the experts of one layer keep for the backward pass, in the place of its feed-forward activations.

    With k experts a token of width f, E experts and balanced routing, a rank's experts see k rows for each token of
    each of the etp ranks that share an expert. A row keeps its input h and 6 f / etp (3 f without a gate): one f more
    than in a dense layer, the product with the router's probability. Where ranks share an expert, the rows of this rank
    are there once more before they are gathered. The router keeps 3 E numbers in fp32, the shared expert what a dense
    block does.
    """
    size, gated, width = BYTES[precision], llm.is_gated, llm.expert_width
    own = tokens // (tp if sp else 1)
    rows = own * llm.experts_per_token * etp
    routed = rows * (llm.hidden_size + (6 if gated else 3) * width // etp) * size
    routed += rows // etp * llm.hidden_size * size if etp > 1 else 0
    shared = tokens * (5 if gated else 2) * llm.shared_expert_ffn_hidden_size * size // tp
    return routed + shared + own * 3 * llm.num_experts * 4


def expert_work(tokens: int, llm: LlmSpec, precision: str, *, tp: int = 1, etp: int = 1, sp: bool = False) -> int:
    """Bytes of work in the backward pass of a layer with experts: as in `layer_work`, of the rows of the experts, whose
    gradients are there before and behind they are dealt, and of what the function gives (3 h + 2 f / etp)."""
    size, width = BYTES[precision], llm.expert_width // etp
    own = tokens // (tp if sp else 1)
    rows = own * llm.experts_per_token * etp
    gathered = tokens * llm.hidden_size * size if sp else 0
    return (2 * own * llm.hidden_size + rows * (3 * llm.hidden_size + 2 * width)) * size + gathered


def output_work(
    tokens: int,
    hidden: int,
    vocab: int,
    precision: str,
    *,
    tp: int = 1,
    sp: bool = False,
    chosen: bool = False,
    frozen: bool = False,
) -> int:
    """Bytes of work at the end of the language model, for one microbatch: the inputs of the final norm and of the
    output layer (2 h), with sequence parallel this input gathered twice (2 h), the positions that get logits (h, where
    they are chosen: all, at most), and logits (v / t) with their softmax in fp32 (4 v / t), or with the gradient of the
    weight (v h / t)."""
    size, share = BYTES[precision], math.ceil(vocab / tp)
    rows = 2 * tokens * hidden * size // (tp if sp else 1)
    rows += ((2 if sp else 0) + (1 if chosen else 0)) * tokens * hidden * size
    return rows + tokens * share * size + max(tokens * share * 4, 0 if frozen else share * hidden * size)


def score_activations(sequence: int, samples: int, heads: int, tp: int = 1, cp: int = 1) -> int:
    """Bytes that soft-capped scores of one layer keep for the backward pass: their tanh and their softmax, 4 + 4 bytes
    in fp32, 2 + 4 + 2 in half precision with the rounded weights."""
    return samples * heads // tp * sequence * sequence // cp * 8


def probability_activations(sequence: int, samples: int, heads: int) -> int:
    """Return the bytes of probabilities that one layer of `mimo_train.cpu.attention` keeps: of each block of queries
    over the keys up to its last."""
    ends = [min(first + BLOCK, sequence) for first in range(0, sequence, BLOCK)]
    each = sum((end - first) * end for first, end in zip([0, *ends], ends, strict=False))
    return samples * heads * each * 4

"""Bytes of activations of one layer and of the end of the language model.

*Kept* bytes wait for the backward pass. *Work* is the rest at the peak: gradients of activations, logits, gathered
inputs, and the gradient of one weight.

Symbols: s tokens of one sample, b samples of one microbatch on one rank, h hidden size, f feed-forward width, k width
of all key heads, t tensor parallel size, v vocabulary, e bytes of one activation (4 in fp32, 2 in half precision).
Formulas follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198), for attention that does not store the s x s scores. `mimo-train check --dry-run` counts the tensors
themselves (`tests/dist/preflight/dry_run/test_estimates.py` compares both).
"""

import math

from mimo_train.config.llm_spec import LlmSpec

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one weight or activation, by `train.precision`."""
WIDEST_HEAD = 256
"""Maximum head width of torch's kernel for packed documents."""


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
    frozen: bool = False,
    plain: bool = False,
    whole_rows: bool = False,
    tp: int = 1,
    sp: bool = False,
    cp: int = 1,
) -> int:
    """Return the bytes that one transformer layer keeps for backward, for `tokens` = s * b tokens on one rank.

    In full on each tensor-parallel rank: the inputs of the two norms and of the linear layers behind them (4 h), the
    inputs of the learned scales of the two branches (2 h, if any), and their dropout masks (1 byte each per h). Divided
    by t: queries, keys, values and the output of attention (2 h + 2 k), rotated queries and keys (h + k, since the
    values keep the unrotated ones alive), and the input and output of the activation function (2 f; 5 f if gated
    without a fused kernel). Sequence parallel divides the first part too.

    With f = 4 h, k = h, dropout, bf16, no gate and no rotation this is the paper's s b h (10 + 24 / t), without its 5 a
    s / (h t) of stored attention scores; with sequence parallel 34 s b h / t. A query width other than h replaces h in
    the second part. Norms after the two blocks keep their inputs (2 h in full). Norms of grouped heads copy the
    queries.

    Args:
        frozen: True if the linear layers are not trained, and need no inputs.
        plain: True for a layer of `mimo_train.models.dense_layer`, which splits a gated matmul without a copy (4 f).
        whole_rows: True if one kernel takes the documents of packed rows. It copies the values, which frees the fused
            tensor, and needs as many key heads as query heads (4 h in total).
        cp: ranks whose keys and values are gathered, and kept instead of this rank's own (2 k each). A copy joins the
            attention of its two chunks of queries (h).
    """
    size, keys, query = BYTES[precision], key_width or hidden, query_width or hidden
    inputs = (2 if post_norms else 0) + (2 if frozen else 4) + (2 if scaled else 0)
    replicated = inputs * hidden * size + (2 * hidden if dropout else 0)
    split = 2 * query + 2 * keys + (query + keys if rope else 0)
    if cp > 1:
        split = (3 if rope else 2) * query + 2 * keys * cp
    elif whole_rows:
        split = 4 * query
    if head_norms and query != keys:
        split += query
    split += ((4 if plain else 5) if gated else 2) * ffn - (ffn if frozen else 0)
    split *= size
    return tokens * (replicated + split) // tp if sp else tokens * replicated + tokens * split // tp


def layer_work(
    tokens: int, hidden: int, ffn: int, precision: str, *, gated: bool, frozen: bool, tp: int = 1, sp: bool = False
) -> int:
    """Return the work in bytes of a layer's backward pass, at its feed-forward block: the gradients of output and
    residual (2 h), and the larger of two: the gradient before the activation function (f; 2 f if gated), or, once the
    activations are freed, of its first weight (h f / t; twice if gated). Sequence parallel gathers one input (h)."""
    size, up = BYTES[precision], (2 if gated else 1) * ffn // tp
    ends = 2 * tokens * hidden * size // (tp if sp else 1)
    gathered = tokens * hidden * size if sp else 0
    function = tokens * up * size
    weight = 0 if frozen else up * hidden * size - tokens * ffn // tp * (3 if gated else 1) * size
    return ends + gathered + max(function, weight)


def expert_activations(
    tokens: int, llm: LlmSpec, precision: str, *, tp: int = 1, etp: int = 1, sp: bool = False
) -> int:
    """Return the bytes that the experts of one layer keep for backward, instead of its feed-forward activations.

    With k experts per token of width f, E experts and balanced routing, a rank's experts see k rows for each token of
    the etp ranks that share an expert. A row keeps its input h and 6 f / etp (3 f without a gate): one f more than a
    dense layer, the product with the router's probability. If ranks share an expert, this rank's rows are also there
    before they are gathered. The router keeps 3 E numbers in fp32, the shared expert as much as a dense block.
    """
    size, gated, width = BYTES[precision], llm.is_gated, llm.expert_width
    local = tokens // (tp if sp else 1)
    rows = local * llm.experts_per_token * etp
    routed = rows * (llm.hidden_size + (6 if gated else 3) * width // etp) * size
    routed += rows // etp * llm.hidden_size * size if etp > 1 else 0
    shared = tokens * (5 if gated else 2) * llm.shared_expert_ffn_hidden_size * size // tp
    return routed + shared + local * 3 * llm.num_experts * 4


def expert_work(tokens: int, llm: LlmSpec, precision: str, *, tp: int = 1, etp: int = 1, sp: bool = False) -> int:
    """Return the work in bytes of the backward pass of a layer with experts. As `layer_work`, for expert rows: their
    gradients exist before and after the dispatch, plus those of the activation function's output (3 h + 2 f / etp)."""
    size, width = BYTES[precision], llm.expert_width // etp
    local = tokens // (tp if sp else 1)
    rows = local * llm.experts_per_token * etp
    gathered = tokens * llm.hidden_size * size if sp else 0
    return (2 * local * llm.hidden_size + rows * (3 * llm.hidden_size + 2 * width)) * size + gathered


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
    """Return the work in bytes at the end of the language model, for one microbatch: the inputs of the final norm and
    of the output layer (2 h), with sequence parallel gathered twice (2 h), positions selected for logits (h at most),
    and logits (v / t) with the larger of their fp32 softmax (4 v / t) and the gradient of the weight (v h / t)."""
    size, share = BYTES[precision], math.ceil(vocab / tp)
    rows = 2 * tokens * hidden * size // (tp if sp else 1)
    rows += ((2 if sp else 0) + (1 if chosen else 0)) * tokens * hidden * size
    return rows + tokens * share * size + max(tokens * share * 4, 0 if frozen else share * hidden * size)


def score_activations(sequence: int, samples: int, heads: int, tp: int = 1, cp: int = 1) -> int:
    """Return the bytes of soft-capped scores that one layer keeps: tanh and softmax, 4 + 4 bytes in fp32, 2 + 4 + 2 in
    half precision with the rounded weights."""
    return samples * heads // tp * sequence * sequence // cp * 8

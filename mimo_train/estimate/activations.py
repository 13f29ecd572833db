"""Bytes of the end of the language model, and of one number. Those of layers are of their blocks
(`mimo_train.models.blocks`). `mimo-train check --dry-run` counts the tensors themselves
(`tests/dist/preflight/dry_run/test_estimates.py` compares both)."""

import math

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one weight or activation, by `train.precision`."""
WIDEST_HEAD = 256
"""Maximum head width of torch's kernel for packed documents."""
BLOCK_BYTES = 12 * 2**20
"""Logits that a loss without logits has at a time, in fp32 (`mimo_train.models.output`)."""


def block_rows(tokens: int) -> int:
    """Return the rows of the output layer in a block, for `tokens` tokens."""
    return max(256, BLOCK_BYTES // (4 * max(tokens, 1)) // 64 * 64)


def block_tokens(rows: int) -> int:
    """Return the tokens in a block of a frozen output layer with `rows` rows on a rank. Fewer than 128 would read the
    weight too often."""
    return max(128, BLOCK_BYTES // (4 * rows))


def logits_bytes(tokens: int, vocab: int, tp: int = 1) -> int:
    """Return the bytes of fp32 logits of `tokens` tokens on a tensor-parallel rank, which `train.max_logits_mib`
    limits."""
    return 4 * tokens * math.ceil(vocab / tp)


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
    capped: bool = False,
    has_teacher: bool = False,
    most_logits: int | None = None,
) -> int:
    """Return the work in bytes at the end of the language model, for one microbatch: the inputs of the final norm and
    of the output layer (2 h), with sequence parallel gathered twice (2 h), positions selected for logits (h at most),
    and the larger part of

    - logits (v / t, twice if they are capped) with the larger of their fp32 softmax (4 v / t) and the gradient of the
      weight (v h / t), of as many positions as `most_logits` bytes allow;
    - above these bytes a block of logits, fp32 and rounded, with the gradients of the inputs and of the weight. With a
      teacher (`models.output.divergence`) also its logits, both divided by the temperature, and their difference.

    Args:
        chosen: positions are selected, so that any number of them may get logits.
        most_logits: see `train.max_logits_mib`; None: any number.
    """
    size, share = BYTES[precision], math.ceil(vocab / tp)
    rows = 2 * tokens * hidden * size // (tp if sp else 1)
    rows += ((2 if sp else 0) + (1 if chosen else 0)) * tokens * hidden * size
    weight, blocks, stored = 0 if frozen else share * hidden * size, 0, tokens
    if most_logits is not None and logits_bytes(tokens, vocab, tp) > most_logits:
        rounded = size if size < 4 else 0
        block = min(block_tokens(share) * share if frozen else tokens * block_rows(tokens), tokens * share)
        blocks = block * (4 + rounded + (4 if capped else 0) + (3 * 4 if has_teacher else 0)) + weight
        blocks += tokens * hidden * (size if frozen else 4 + rounded)
        stored = most_logits // (4 * share) if chosen else 0
    logits = stored * share * size * (2 if capped else 1) + max(stored * share * 4, weight if stored else 0)
    return rows + max(blocks, logits)

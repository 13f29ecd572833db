"""Bytes of the end of the language model, and of one number. Those of layers are of their blocks
(`mimo_train.models.blocks`). `mimo-train check --dry-run` counts the tensors themselves
(`tests/dist/preflight/dry_run/test_estimates.py` compares both)."""

import math

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one weight or activation, by `train.precision`."""
WIDEST_HEAD = 256
"""Maximum head width of torch's kernel for packed documents."""


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

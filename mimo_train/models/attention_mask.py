"""Masks of language models in which some tokens see later ones: those of an image (Gemma 3), or all of a prefix
(PaliGemma); and of decoding a batch with padding.

Shape suffixes: B batch, S sequence, Q queries, K keys, W kinds of layers: without a window, and with one if any layer
has it.
"""

from collections.abc import Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.parallel.device import to_device

ALIGNMENT = 16
"""Elements between the rows of a mask are a multiple of this, as torch's kernels require: others are copied."""


def mask_of_blocks(blocks_BS: torch.Tensor, documents: Sequence[int] | None, config: TransformerConfig) -> torch.Tensor:
    """Return what attention adds to scores, [W, B, 1, S, S]: 0 where a query sees a key, else -inf. All layers share
    it, so that it is kept once for the backward pass.

    Under a window, tokens of an item see only those inside it, and a prefix is seen whole: as in transformers 5.23,
    gemma3/modeling_gemma3.py:697 and paligemma/modeling_paligemma.py:266.

    Args:
        blocks_BS: tokens with one number see each other; -1: only earlier ones.
        documents: ends of the documents of a packed row, which see nothing of each other.
        config: the language model's, with `bidirectional` and its window.
    """
    device, positions = blocks_BS.device, blocks_BS.size(1)
    places = torch.arange(positions, dtype=torch.int32, device=device)
    behind_QK = places[:, None] - places
    causal_QK = behind_QK >= 0
    same_BQK = (blocks_BS[:, :, None] == blocks_BS[:, None]) & (blocks_BS >= 0)[:, None]
    kinds = [causal_QK | same_BQK]
    if config.window_size is not None:
        inside_QK = behind_QK <= config.window_size[0]
        is_prefix = config.bidirectional == "prefix"
        kinds.append((causal_QK & inside_QK) | same_BQK if is_prefix else kinds[0] & inside_QK)
    seen_WBQK = torch.stack(kinds)
    if documents is not None:
        lengths = torch.tensor(documents).diff(prepend=torch.zeros(1, dtype=torch.int64))
        number_S = to_device(torch.repeat_interleave(lengths), device)
        seen_WBQK &= number_S[:, None] == number_S
    return _added(seen_WBQK, config)


def mask_of_columns(seen_BK: torch.Tensor, places_BK: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Return what attention adds to the scores of the last keys' queries, [W, B, 1, 1, K], as `mask_of_blocks`.

    Args:
        seen_BK: False for padding among the keys.
        places_BK: the place of each key in its sequence.
        config: the language model's, with its window.
    """
    kinds = [seen_BK]
    if config.window_size is not None:
        kinds.append(seen_BK & (places_BK[:, -1:] - places_BK <= config.window_size[0]))
    return _added(torch.stack(kinds).unsqueeze(2), config)


def _added(seen_WBQK: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    keys = seen_WBQK.size(-1)
    width = -(-keys // ALIGNMENT) * ALIGNMENT
    mask = torch.zeros(*seen_WBQK.shape[:-1], width, dtype=config.params_dtype, device=seen_WBQK.device)[..., :keys]
    return mask.masked_fill_(~seen_WBQK, float("-inf")).unsqueeze(2)

"""The mask of tokens that see later ones is that of transformers, in layers with and without a window."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

from mimo_train.models.attention_mask import ALIGNMENT, mask_of_blocks

BLOCKS = torch.tensor([[-1, 0, 0, 0, 0, -1, -1, 1, 1, -1], [-1, -1, 0, 0, -1, 1, 1, 1, 1, 1]])
PREFIX = torch.tensor([[0, 0, 0, 0, 0, 0, -1, -1, -1, -1], [0, 0, -1, -1, -1, -1, -1, -1, -1, -1]])
WINDOW = 3


def _config(kind: str, window: int = WINDOW) -> SimpleNamespace:
    inside = (window - 1, 0) if window else None
    return SimpleNamespace(bidirectional=kind, window_size=inside, params_dtype=torch.float32)


@pytest.mark.parametrize("kind", ["items", "prefix"])
def test_masks_are_those_of_transformers(kind):
    blocks = BLOCKS if kind == "items" else PREFIX
    options = {"attention_mask": None, "past_key_values": None, "position_ids": None, "block_sequence_ids": blocks}
    options |= {"inputs_embeds": torch.zeros(*blocks.shape, 8)}
    if kind == "items":
        config = Gemma3TextConfig(sliding_window=WINDOW, attn_implementation="sdpa")
        masks = create_masks_for_vision_model(config, **options)
        expected = [masks["full_attention"], masks["sliding_attention"]]
    else:
        config = Gemma2Config(sliding_window=WINDOW, attn_implementation="sdpa")
        expected = [make(config, **options) for make in (create_causal_mask, create_sliding_window_causal_mask)]
    mask = mask_of_blocks(blocks, None, _config(kind))
    assert torch.equal(mask == 0, torch.stack(expected)) and mask[mask != 0].isneginf().all()
    assert torch.equal(mask_of_blocks(blocks, None, _config(kind, 0)), mask[:1])
    assert mask.stride(-2) % ALIGNMENT == 0


def test_documents_of_a_row_see_nothing_of_each_other():
    alone = [mask_of_blocks(BLOCKS[:1, :4], None, _config("items")), mask_of_blocks(BLOCKS[1:], None, _config("items"))]
    row = mask_of_blocks(torch.cat([BLOCKS[:1, :4], BLOCKS[1:]], dim=1), (4, 14), _config("items"))
    assert torch.equal(row[..., :4, :4], alone[0]) and torch.equal(row[..., 4:, 4:], alone[1])
    assert row[..., 4:, :4].isneginf().all() and row[..., :4, 4:].isneginf().all()

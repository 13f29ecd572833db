"""Rows that a fused kernel does not take, and tensors that are worth a copy to the host."""

import torch
from megatron.core.models.common.embeddings import rope_utils

from mimo_train.models import offload
from mimo_train.models.fusions import install_rotary


def test_rows_with_positions_of_their_own_are_not_rotated_by_the_kernel(monkeypatch):
    calls = []

    def kernel(heads, angles, interleaved=False):
        calls.append(angles.shape)
        return heads

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", kernel)
    install_rotary()
    install_rotary()
    rotate, single = rope_utils.fused_apply_rotary_pos_emb, rope_utils._apply_rotary_pos_emb_bshd
    heads, angles = torch.randn(5, 2, 3, 8), torch.randn(5, 2, 1, 8)
    assert rotate(heads, angles[:, :1], interleaved=False) is heads and len(calls) == 1
    rows = [single(heads[:, [row]], angles[:, [row]], rotary_interleaved=False) for row in range(2)]
    torch.testing.assert_close(rotate(heads, angles), torch.cat(rows, dim=1))
    assert len(calls) == 1


def test_expanded_tensors_and_weights_stay_on_the_device():
    large = torch.ones(1, offload.LEAST_BYTES // 4)
    assert offload._is_activation(large) and not offload._is_activation(large[:, :-1])
    assert not offload._is_activation(large.expand(4, -1)), "as a mask of all heads"
    assert not offload._is_activation(torch.nn.Parameter(large).t())

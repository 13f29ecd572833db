"""Packed rows: who attends to whom, and every kind of attention inside documents against each document alone."""

from itertools import pairwise

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.config.errors import UserError
from mimo_train.models import attention
from mimo_train.models.attention import SdpaAttention
from mimo_train.models.documents import Documents, attention_inside_documents, documents_of, documents_of_media
from mimo_train.parallel.context import chunks_of

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
ENDS = (5, 6, 19, 32)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("ends", [(16,), (1, 16), (5, 6, 9, 24), (8, 16), tuple(range(1, 17))])
def test_every_query_meets_its_document_up_to_itself(ends, ranks):
    documents, tokens = Documents(ends, ranks), ends[-1]
    seen = {}
    for rank in range(ranks):
        chunk = tokens // (2 * ranks)
        held = [at for number in chunks_of(rank, ranks) for at in range(number * chunk, (number + 1) * chunk)]
        held = held if ranks > 1 else list(range(tokens))
        behind = 0
        for first, last, first_key, last_key in documents.segments(rank):
            assert first == behind < last
            behind = last
            for query in range(first, last):
                # As a causal mask that is aligned at the last query and the last key.
                seen[held[query]] = (first_key, last_key - last + query + 1)
        assert behind == len(held)
    starts = {at: start for start, end in pairwise((0, *ends)) for at in range(start, end)}
    assert seen == {at: (start, at + 1) for at, start in starts.items()}


def test_documents_of_a_microbatch():
    assert documents_of({"input_ids": None}, 2) is None
    found = documents_of({"documents": ENDS}, 2)
    assert (found.ends, found.ranks, found.tokens, found.longest) == (ENDS, 2, 32, 13)


def test_neighbours_of_one_length_are_a_run():
    assert Documents(ENDS).runs == [(1, 5), (1, 1), (2, 13)]
    media = documents_of_media([4, 2, 2, 3], windows=[2, 2, 2, 2, 3])
    assert media.ends == (4, 6, 8, 11) and media.windows is not None and media.windows.runs == [(4, 2), (1, 3)]


def layer(window: int = 0, softcap: float = 0.0, mask: AttnMaskType = AttnMaskType.causal) -> SdpaAttention:
    sizes = {"num_layers": 1, "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS}
    config = TransformerConfig(**sizes, attention_dropout=0.0, window_size=(window - 1, 0) if window else None)
    config.attention_softcap = softcap
    return SdpaAttention(config, 1, mask, "self", pg_collection=ProcessGroupCollection())


def parts(values: int = WIDTH) -> list[torch.Tensor]:
    """Queries, keys, and values of another width."""
    torch.manual_seed(1)
    shapes = (HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, values)
    return [torch.randn(ENDS[-1], 1, *shape, requires_grad=True) for shape in shapes]


def one_by_one(core: SdpaAttention, whole: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([core(*(part[start:end] for part in whole)) for start, end in pairwise((0, *ENDS))])


def kernel(query, key, value, query_ends, key_ends, most_queries, most_keys, *, scale, window_size):
    """What torch documents of `varlen_attn`, with masks."""
    assert most_queries >= query_ends.diff().max() and most_keys >= key_ends.diff().max()
    assert query_ends.dtype == key_ends.dtype == torch.int32 and query.shape[1:] == key.shape[1:] == value.shape[1:]
    before, behind = window_size
    assert behind == 0 or window_size == (-1, -1)
    out = []
    for (a, b), (s, e) in zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True):
        at, other = torch.arange(e - s - (b - a), e - s)[:, None], torch.arange(e - s)
        mask = ((other <= at) | (behind < 0)) & ((at - other <= before) if before >= 0 else True)
        heads_first = (part.transpose(0, 1) for part in (query[a:b], key[s:e], value[s:e]))
        attended = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scale)
        out.append(attended.transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize(
    ("options", "by_kernel"),
    [
        ({}, False),
        ({}, True),
        ({"window": 4}, False),
        ({"window": 4}, True),
        ({"softcap": 2.0}, False),
        ({"window": 4, "softcap": 2.0}, False),
        ({"mask": AttnMaskType.no_mask}, False),
        ({"mask": AttnMaskType.no_mask}, True),
        ({"values": WIDTH - 2}, False),
        ({"values": WIDTH - 2}, True),
    ],
)
def test_attention_of_a_row_is_that_of_its_documents(options, by_kernel, monkeypatch):
    options = dict(options)
    whole = parts(options.pop("values", WIDTH))
    core = layer(**options)
    if by_kernel:
        monkeypatch.setattr(SdpaAttention, "_has_kernel", lambda self, query: True)
        monkeypatch.setattr(attention, "varlen_attn", kernel)
    expected = one_by_one(core, whole)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weight).sum(), whole)
    packed = core(*whole, packed_seq_params=Documents(ENDS))
    assert torch.allclose(packed, expected, rtol=0, atol=1e-6)
    for one, other in zip(torch.autograd.grad((packed * weight).sum(), whole), gradients, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=5e-6)
    assert not torch.allclose(core(*whole), expected, atol=1e-2), "documents would not matter"


def test_the_kernel_is_taken_where_it_does_what_the_layer_does():
    plain, capped = layer(), layer(softcap=2.0)
    assert not plain._has_kernel(torch.empty(1, 1, 1, 8, dtype=torch.bfloat16)), "on a CPU"

    class OnGpu:
        is_cuda, dtype, width = True, torch.bfloat16, 128

        def size(self, _dim):
            return self.width

    query = OnGpu()
    assert plain._has_kernel(query) and not capped._has_kernel(query)
    plain.dropout = 0.1
    assert not plain._has_kernel(query) and plain.eval()._has_kernel(query)
    query.width = 512
    assert not plain._has_kernel(query)
    query.width, query.dtype = 128, torch.float32
    assert not plain._has_kernel(query)


class FakeEngine(torch.nn.Module):
    """In the place of Megatron-Core's class around Transformer Engine: [T, N, D] with `thd`, else [S, B, N, D]."""

    def forward(self, query, key, value, mask=None, attn_mask_type=None, packed_seq_params=None):
        if packed_seq_params is None:
            assert query.dim() == 4
            return layer()(query, key, value)
        assert packed_seq_params.qkv_format == "thd" and query.dim() == key.dim() == 3
        assert packed_seq_params.max_seqlen_q == packed_seq_params.max_seqlen_kv == 13
        ends = packed_seq_params.cu_seqlens_q
        assert ends.dtype == torch.int32 and ends is packed_seq_params.cu_seqlens_kv
        assert tuple(ends.tolist()) == (0, *ENDS) and attn_mask_type is AttnMaskType.causal
        return one_by_one(layer(), [part.unsqueeze(1) for part in (query, key, value)]).squeeze(1)


def test_transformer_engine_gets_its_own_format():
    core, whole = attention_inside_documents(FakeEngine)(), parts()
    with torch.no_grad():
        packed = core(*whole, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=Documents(ENDS))
        assert packed.shape == (ENDS[-1], 1, HEADS * WIDTH)
        assert torch.equal(packed, one_by_one(layer(), whole))
        assert torch.equal(core(*whole), layer()(*whole))
    with pytest.raises(UserError, match=r"2 context-parallel ranks.*data\.pack"):
        core(*whole, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=Documents(ENDS, ranks=2))

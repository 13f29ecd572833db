"""Core attention on `torch.nn.functional.scaled_dot_product_attention`.

A drop-in for Megatron-Core's `DotProductAttention`, which materializes the score matrix. Torch picks the kernel. Only
soft-capped scores are a matrix, because torch has no kernel for them. In a packed row attention stays inside its
documents: one kernel on a GPU; elsewhere one call per run of equal lengths, which on a CPU is faster than any mask.

Shape suffixes: S sequence, B batch, N heads, D head dimension, C positions of one context-parallel rank, Q queries, K
keys.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn.attention.varlen import varlen_attn

from mimo_train.estimate.activations import WIDEST_HEAD
from mimo_train.models.documents import Documents
from mimo_train.models.parameters import CutOverHeads
from mimo_train.parallel.context import chunks_of, gather_sequence

_LEAST_BLOCK = 512
"""Minimum number of queries in a block of a windowed layer."""


class SdpaAttention(MegatronModule):
    """softmax(Q K^T * scale) V, causal or unmasked, with grouped queries.

    With context parallelism each rank gathers keys and values of the whole sequence. Its two chunks of queries attend
    to all positions up to their own (see `context`).

    Config options: `window_size` is (tokens before a token that it attends to, 0), `window_attn_skip_freq` gives the
    layers with a window, `attention_softcap` is the cap of scores (see `mimo_train.models.transformer_config`).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        *,
        pg_collection: ProcessGroupCollection,
    ):
        super().__init__(config=config)
        assert attention_type == "self" and cp_comm_type in (None, "all_gather"), (attention_type, cp_comm_type)
        assert config.softmax_type == "vanilla" and not config.qk_clip, "no kernel has these options"
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.no_mask), attn_mask_type
        self.is_causal = attn_mask_type is AttnMaskType.causal
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        # 0: all tokens. Megatron-Core counts the tokens before; we include the token itself.
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else 0
        assert self.is_causal or not (self.cp_group or self.window), "only causal sequences are cut or have windows"
        assert not self.window or config.window_size[1] == 0, "a token sees nothing behind itself"
        self.softcap: float = getattr(config, "attention_softcap", 0.0)
        assert not (getattr(config, "bidirectional", "") and self.cp_group), "a mask is not cut"
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBND: torch.Tensor,
        value_SBND: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Return attended values [S, B, heads * D]; keys and values may have fewer heads than queries.

        A causal layer ignores `attention_mask`: padding is at the end, where the causal mask hides it. If there are
        fewer queries than keys, they are those of the last positions.

        Args:
            attention_mask: `mask_of_blocks` or `mask_of_columns`; None: causal.
            packed_seq_params: `Documents` of a packed row; B is 1.
        """
        assert attention_mask is None or self.is_causal, "a layer without a causal mask has no mask"
        assert attn_mask_type in (None, AttnMaskType.causal, AttnMaskType.no_mask), attn_mask_type
        # Forward steps may pass a mask [B, 1, S, S], as to Megatron-Core's attention.
        if attention_mask is not None and attention_mask.dim() == 5:
            return self._attend_under_mask(query_SBND, key_SBND, value_SBND, attention_mask[1 if self.window else 0])
        if packed_seq_params is not None:
            assert isinstance(packed_seq_params, Documents), packed_seq_params
            return self._attend_inside_documents(query_SBND, key_SBND, value_SBND, packed_seq_params)
        if self.cp_group:
            return self._attend_to_all_parts(query_SBND, key_SBND, value_SBND, self.cp_group)
        # Fewer queries than keys means that earlier keys come from a cache. Megatron-Core 0.19.2 then requests no mask
        # (transformer/attention.py:630), which is right only for one query without a window.
        continues = self.is_causal and len(query_SBND) < len(key_SBND)
        if self.window or self.softcap or continues:
            assert attention_bias is None, "a bias with a window, capped scores or a cache"
            return self._attend_in_blocks(query_SBND, key_SBND, value_SBND)
        return self._attend(query_SBND, key_SBND, value_SBND, attention_bias, self.is_causal)

    @property
    def is_plain(self) -> bool:
        """True if a layer is causal and has no window, no soft cap, no dropout and no other context-parallel ranks."""
        return self.is_causal and not (self.window or self.softcap or self.dropout or self.cp_group)

    def _attend_to_all_parts(
        self,
        query_CBND: torch.Tensor,
        key_CBND: torch.Tensor,
        value_CBND: torch.Tensor,
        cp_group: dist.ProcessGroup,
    ) -> torch.Tensor:
        key_SBND, value_SBND = _gathered(key_CBND, value_CBND, cp_group)
        chunks = chunks_of(cp_group.rank(), cp_group.size())
        attended = []
        for chunk, query in zip(chunks, query_CBND.chunk(2), strict=True):
            seen = (chunk + 1) * len(query)
            attended.append(self._attend_in_blocks(query, key_SBND[:seen], value_SBND[:seen]))
        return torch.cat(attended)

    def _attend_inside_documents(
        self, query_CBND: torch.Tensor, key_CBND: torch.Tensor, value_CBND: torch.Tensor, documents: Documents
    ) -> torch.Tensor:
        rank, key_SBND, value_SBND = 0, key_CBND, value_CBND
        if self.cp_group:
            rank = self.cp_group.rank()
            key_SBND, value_SBND = _gathered(key_CBND, value_CBND, self.cp_group)
        assert documents.tokens == len(key_SBND), (documents.tokens, key_SBND.shape)
        if self._has_kernel(query_CBND):
            return self._attend_at_once(query_CBND, key_SBND, value_SBND, documents, rank)
        if not self.cp_group:
            return self._attend_run_by_run(query_CBND, key_SBND, value_SBND, documents)
        segments = documents.segments(rank)
        assert segments[-1].last_query == len(query_CBND), (segments[-1], query_CBND.shape)
        attended = []
        for first_query, last_query, first_key, last_key in segments:
            parts = (query_CBND[first_query:last_query], key_SBND[first_key:last_key], value_SBND[first_key:last_key])
            is_square = last_query - first_query == last_key - first_key and not self.window and not self.softcap
            attended.append(self._attend(*parts, None, True) if is_square else self._attend_in_blocks(*parts))
        return torch.cat(attended)

    def _attend_run_by_run(
        self, query_SBND: torch.Tensor, key_SBND: torch.Tensor, value_SBND: torch.Tensor, documents: Documents
    ) -> torch.Tensor:
        """Attend inside documents of a whole row, with neighbors of one length as a batch."""
        # `split` makes one gradient of all parts; each slice would have one as long as the row.
        rows = [count * length for count, length in documents.runs]
        parts = [part.split(rows) for part in (query_SBND, key_SBND, value_SBND)]
        attended = []
        for (count, length), *run in zip(documents.runs, *parts, strict=True):
            query, key, value = (part.view(count, length, *part.shape[2:]).transpose(0, 1) for part in run)
            if self.window or self.softcap:
                context = self._attend_in_blocks(query, key, value)
            else:
                context = self._attend(query, key, value, None, self.is_causal)
            attended.append(context.transpose(0, 1).flatten(0, 1))
        return torch.cat(attended).unsqueeze(1)

    def _has_kernel(self, query: torch.Tensor) -> bool:
        """True if torch has a kernel for documents of any lengths that supports this layer."""
        fits = query.dtype in (torch.bfloat16, torch.float16) and query.size(-1) <= WIDEST_HEAD
        return query.is_cuda and fits and not self.softcap and not (self.training and self.dropout)

    def _attend_at_once(
        self,
        query_CBND: torch.Tensor,
        key_SBND: torch.Tensor,
        value_SBND: torch.Tensor,
        documents: Documents,
        rank: int,
    ) -> torch.Tensor:
        """Attend inside documents by one kernel, which aligns a causal mask at the last query and the last key."""
        query_ends, key_ends, seen = documents.cumulative(rank, query_CBND.device)
        query, key, value = (part.squeeze(1) for part in (query_CBND, key_SBND, value_SBND))
        if documents.ranks > 1:
            key, value = key[seen], value[seen]  # several chunks of queries may see the same keys
        # Torch does not document that the kernel groups queries.
        group, width = query.size(1) // key.size(1), value.size(-1)
        # Nor that values may be narrower than keys.
        value = torch.nn.functional.pad(value, (0, key.size(-1) - width))
        key, value = (part.repeat_interleave(group, 1) if group > 1 else part.contiguous() for part in (key, value))
        longest = documents.longest
        window = (self.window - 1 if self.window else -1, 0 if self.is_causal else -1)
        ends = (query_ends, key_ends, longest, longest)
        attended_CND = varlen_attn(query.contiguous(), key, value, *ends, scale=self.softmax_scale, window_size=window)
        assert isinstance(attended_CND, torch.Tensor), "nothing else was asked for"
        return attended_CND[..., :width].flatten(1).unsqueeze(1)

    def _attend_in_blocks(
        self, query_SBND: torch.Tensor, key_SBND: torch.Tensor, value_SBND: torch.Tensor
    ) -> torch.Tensor:
        """Attend from the last queries of a sequence to all its keys, causally if the layer is. Under a window each
        block of queries takes only the keys that it sees."""
        queries, keys = len(query_SBND), len(key_SBND)
        block = max(self.window, _LEAST_BLOCK) if self.window else queries
        attended = []
        for start in range(0, queries, block):
            query = query_SBND[start : start + block]
            end = keys - queries + start + len(query)
            begin = max(0, end - len(query) - self.window + 1) if self.window else 0
            key, value = key_SBND[begin:end], value_SBND[begin:end]
            if self.softcap:
                attended.append(self._attend_capped(query, key, value))
            elif self.window and end > self.window and len(query) > 1:
                attended.append(self._attend_under_mask(query, key, value, self._seen(query, key)))
            else:
                mask = causal_lower_right(len(query), len(key)) if len(query) > 1 else None
                attended.append(self._attend(query, key, value, mask, False))
        return torch.cat(attended) if len(attended) > 1 else attended[0]

    def _attend_under_mask(
        self, query_QBND: torch.Tensor, key_KBND: torch.Tensor, value_KBND: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attend under a mask of torch's forms, [Q, K] or [B, 1, Q, K]."""
        if self.softcap:
            return self._attend_capped(query_QBND, key_KBND, value_KBND, mask)
        # With a mask only torch's slowest kernel groups queries.
        group = query_QBND.size(2) // key_KBND.size(2)
        key_KBND, value_KBND = key_KBND.repeat_interleave(group, 2), value_KBND.repeat_interleave(group, 2)
        return self._attend(query_QBND, key_KBND, value_KBND, mask, False)

    def _seen(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return a mask [Q, K]: True if a query sees a key, up to its own position and within the window."""
        queries, keys = len(query), len(key)
        behind = torch.arange(keys - queries, keys, device=key.device)[:, None] - torch.arange(keys, device=key.device)
        return (behind >= 0) & (behind < self.window) if self.window else behind >= 0

    def _attend_capped(
        self,
        query_QBND: torch.Tensor,
        key_KBND: torch.Tensor,
        value_KBND: torch.Tensor,
        mask_BNQK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with scores of cap * tanh(score / cap), softmax in fp32; `mask_BNQK` is added to them."""
        group = query_QBND.size(2) // key_KBND.size(2)
        query_BNQD, key_BNKD, value_BNKD = (part.permute(1, 2, 0, 3) for part in (query_QBND, key_KBND, value_KBND))
        key_BNKD, value_BNKD = (part.repeat_interleave(group, 1) for part in (key_BNKD, value_BNKD))
        scale = query_QBND.size(-1) ** -0.5 if self.softmax_scale is None else self.softmax_scale
        scores_BNQK = self.softcap * torch.tanh(query_BNQD @ key_BNKD.mT * scale / self.softcap)
        if mask_BNQK is not None:
            scores_BNQK = scores_BNQK + mask_BNQK
        elif self.is_causal:
            scores_BNQK = scores_BNQK.masked_fill(~self._seen(query_QBND, key_KBND), float("-inf"))
        weights_BNQK = scores_BNQK.softmax(-1, dtype=torch.float32).to(query_QBND.dtype)
        if self.training and self.dropout:
            weights_BNQK = torch.nn.functional.dropout(weights_BNQK, self.dropout)
        return (weights_BNQK @ value_BNKD).permute(2, 0, 1, 3).flatten(2)

    def _attend(
        self,
        query_SBND: torch.Tensor,
        key_SBND: torch.Tensor,
        value_SBND: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        context_BNSD = torch.nn.functional.scaled_dot_product_attention(
            query_SBND.permute(1, 2, 0, 3),
            key_SBND.permute(1, 2, 0, 3),
            value_SBND.permute(1, 2, 0, 3),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            scale=self.softmax_scale,
            enable_gqa=key_SBND.size(2) != query_SBND.size(2),
        )
        return context_BNSD.permute(2, 0, 1, 3).flatten(2)


def _gathered(
    key_CBND: torch.Tensor, value_CBND: torch.Tensor, cp_group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of all positions, [S, B, N, D], gathered in one message."""
    head = key_CBND.size(-1)
    keys_values = gather_sequence(torch.cat([key_CBND, value_CBND], dim=-1), cp_group)
    return keys_values[..., :head], keys_values[..., head:]


def causal_lower_right(queries: int, keys: int) -> torch.Tensor:
    """Return the causal mask of a sequence's last queries, in the form for which torch's kernels need no matrix."""
    from torch.nn.attention import bias  # torch 2.11 imports its compiler with it

    return bias.causal_lower_right(queries, keys)


class SinkAttention(CutOverHeads, SdpaAttention):
    """`SdpaAttention` with one more score in the softmax of each head, which is learned and adds nothing to the output
    (attention sinks; Xiao et al. 2023, arXiv 2309.17453, section 3). It is a first key with value 0 that all queries
    see: in one more channel queries have their head's score, this key has 1, and all others have 0. So any kernel
    computes it."""

    def __init__(
        self, config: TransformerConfig, *arguments: Any, pg_collection: ProcessGroupCollection, **options: Any
    ):
        super().__init__(config, *arguments, pg_collection=pg_collection, **options)
        if self.softmax_scale is None:
            self.softmax_scale = config.kv_channels**-0.5
        self.tp_group = pg_collection.tp
        heads, rank = config.num_attention_heads, self.tp_group.rank()
        part = heads // self.tp_group.size()
        scores = torch.zeros(heads, dtype=config.params_dtype)
        if config.perform_initialization:
            config.init_method(scores)
        self.softmax_offset = torch.nn.Parameter(scores[rank * part : (rank + 1) * part].clone())
        """The scores of this rank's heads, by Megatron-Core's name."""
        set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    @property
    def is_plain(self) -> bool:
        """Never true."""
        return False

    def _has_kernel(self, query: torch.Tensor) -> bool:
        """Return False: documents would each need the first key."""
        return False

    def _attend(
        self,
        query_SBND: torch.Tensor,
        key_SBND: torch.Tensor,
        value_SBND: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        heads, scale = query_SBND.size(2), self.softmax_scale
        assert scale is not None
        scores = (self.softmax_offset / scale).to(query_SBND.dtype)[:, None].expand(*query_SBND.shape[:3], 1)
        query = torch.cat([query_SBND, scores], dim=-1)
        key, value = (F.pad(part, (0, 1, 0, 0, 0, 0, 1, 0)) for part in (key_SBND, value_SBND))
        key[0, ..., -1] = 1
        if type(mask) is torch.Tensor:
            mask = F.pad(mask, (1, 0), value=mask.dtype is torch.bool)  # or 0, which is added
        elif is_causal or mask is not None:
            mask = causal_lower_right(len(query), len(key))
        return super()._attend(query, key, value, mask, False).unflatten(-1, (heads, -1))[..., :-1].flatten(2)


class WindowAttention(SdpaAttention):
    """`SdpaAttention` inside the windows of a packed row's `Documents`. Layers of `config.full_attention` (numbers from
    0) attend inside the documents."""

    def __init__(self, config: TransformerConfig, layer_number: int, *arguments: object, **options: object):
        super().__init__(config, layer_number, *arguments, **options)  # type: ignore[arg-type]
        assert not self.is_causal, "windows of an encoder see both ways"
        self.everywhere = layer_number - 1 in config.full_attention

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBND: torch.Tensor,
        value_SBND: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend inside windows or documents, as `SdpaAttention.forward`; B is 1."""
        assert isinstance(packed_seq_params, Documents) and packed_seq_params.windows, packed_seq_params
        inside = packed_seq_params if self.everywhere else packed_seq_params.windows
        return super().forward(query_SBND, key_SBND, value_SBND, packed_seq_params=inside)

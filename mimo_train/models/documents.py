"""Documents of a packed row: samples of a language model, or media of an encoder, that share one row of tokens without
attending to each other.

Shape suffixes: B batch, S sequence, N heads, D head dimension, T tokens of a row.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mimo_train.config.errors import UserError
from mimo_train.parallel.context import chunks_of
from mimo_train.parallel.device import to_device


class Segment(NamedTuple):
    """Adjacent queries of one document on a rank, and the keys that the last of them sees."""

    first_query: int
    last_query: int
    """End (exclusive) of the queries: offsets in this rank's part."""
    first_key: int
    last_key: int
    """End (exclusive) of the keys: offsets in the whole row."""


class Documents(PackedSeqParams):
    """The ends of the documents of one packed row [1, T], in the form in which Megatron-Core passes them to every
    layer.

    Ends are integers on the host: to read them from a tensor, each layer would wait for the device. For Megatron-Core
    0.19.2 the row is a batch of one sample (`sbhd`), whose rotary angles the model replaces (`SeededGPTModel`). Its own
    format for packed rows (`thd`) waits in each layer. It starts documents at position 0 only if no table is as long as
    the row (rope_utils.py:222-250), and cuts rows for context parallelism only with Transformer Engine.

    Args:
        ends: end (exclusive) of each document, ascending; the last is T.
        ranks: context-parallel ranks that hold the row, each two chunks of it (`mimo_train.parallel.context`).
        windows: smaller documents of the same row, inside of which some layers of an encoder attend.
    """

    def __init__(self, ends: Sequence[int], ranks: int = 1, windows: "Documents | None" = None):
        assert ends and ends[0] > 0 and all(end < following for end, following in pairwise(ends)), ends
        self.ends, self.ranks, self.windows = tuple(ends), ranks, windows
        assert ranks == 1 or not self.tokens % (2 * ranks), (self.tokens, ranks)
        # Megatron-Core makes a table of angles of this length for each microbatch, which nothing reads.
        unused = 2 * ranks
        super().__init__(qkv_format="sbhd", max_seqlen_q=unused, max_seqlen_kv=unused)
        self._segments: dict[int, list[Segment]] = {}
        self._tensors: dict[tuple[int, torch.device], tuple[torch.Tensor, ...]] = {}

    @property
    def tokens(self) -> int:
        """T."""
        return self.ends[-1]

    @cached_property
    def undivided(self) -> "Documents":
        """The documents of the row on one rank."""
        return self if self.ranks == 1 else Documents(self.ends)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(end - start for start, end in pairwise((0, *self.ends)))

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(documents, tokens of each) of neighbors of one length, in order; together they are the row."""
        lengths = (end - start for start, end in pairwise((0, *self.ends)))
        return [(len(list(alike)), length) for length, alike in groupby(lengths)]

    def segments(self, rank: int) -> list[Segment]:
        """Return the queries of a context-parallel rank and their keys, in the rank's order. Queries [a, b) of a chunk
        that are inside document [s, e) see keys from s on, each up to its own position."""
        if rank not in self._segments:
            self._segments[rank] = list(self._find_segments(rank))
        return self._segments[rank]

    def _find_segments(self, rank: int) -> Any:
        chunk = self.tokens // (2 * self.ranks if self.ranks > 1 else 1)
        offset = 0
        for number in chunks_of(rank, self.ranks) if self.ranks > 1 else (0,):
            first, last = number * chunk, (number + 1) * chunk
            document = bisect_right(self.ends, first)
            while first < last:
                start, end = self.ends[document - 1] if document else 0, min(self.ends[document], last)
                yield Segment(offset, offset + end - first, start, end)
                offset += end - first
                first, document = end, document + 1

    def cumulative(self, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (ends of queries, ends of keys: int32, from 0 on; offsets of these keys in the row), for kernels that
        take all segments at once. Copied to the device once for all layers."""
        if (rank, device) not in self._tensors:
            segments = self.segments(rank)
            queries = [0, *accumulate(part.last_query - part.first_query for part in segments)]
            keys = [0, *accumulate(part.last_key - part.first_key for part in segments)]
            places = torch.cat([torch.arange(part.first_key, part.last_key) for part in segments])
            self._tensors[rank, device] = tuple(
                to_device(tensor, device)
                for tensor in (
                    torch.tensor(queries, dtype=torch.int32),
                    torch.tensor(keys, dtype=torch.int32),
                    places,
                )
            )
        queries_at, keys_at, places_at = self._tensors[rank, device]
        return queries_at, keys_at, places_at


def documents_of(batch: dict[str, Any], ranks: int) -> Documents | None:
    """Return the documents of a microbatch that is one packed row; None if each row is a sample. `batch["documents"]`
    are the ends of documents, in tokens of the whole row, and `ranks` the context-parallel ranks."""
    ends = batch.get("documents")
    return None if ends is None else Documents(ends, ranks)


def documents_of_media(tokens: Sequence[int], windows: Sequence[int] = ()) -> Documents:
    """Return the documents of an encoder's packed row from the tokens of each media item. `windows` are the tokens of
    each window in which some layers attend, over all media."""
    return Documents(tuple(accumulate(tokens)), windows=documents_of_media(windows) if windows else None)


def attention_inside_documents(attention: type) -> type:
    """Return a subclass of Transformer Engine's core attention for rows of `Documents`. It converts them to `thd`, in
    which Transformer Engine computes all documents at once."""

    class InsideDocuments(attention):
        def forward(
            self,
            query_SBND: torch.Tensor,
            key_SBND: torch.Tensor,
            value_SBND: torch.Tensor,
            *arguments: Any,
            packed_seq_params: PackedSeqParams | None = None,
            **options: Any,
        ) -> torch.Tensor:
            """Attend inside documents, as Megatron-Core's method; [S, B, heads * D]. Raise UserError for context
            parallelism, since Transformer Engine requires a row cut by document."""
            run: Callable[..., torch.Tensor] = super().forward
            if not isinstance(packed_seq_params, Documents):
                return run(query_SBND, key_SBND, value_SBND, *arguments, packed_seq_params=packed_seq_params, **options)
            if packed_seq_params.ranks > 1:
                raise UserError(
                    f"a packed row is on {packed_seq_params.ranks} context-parallel ranks, and the attention of these "
                    "layers is Transformer Engine's: set data.pack in the config, which chooses another"
                )
            ends, _, _ = packed_seq_params.cumulative(0, query_SBND.device)
            longest = packed_seq_params.longest
            thd = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
            parts = (part.squeeze(1) for part in (query_SBND, key_SBND, value_SBND))
            attended_TX = run(*parts, *arguments, packed_seq_params=thd, **options)
            return attended_TX.reshape(len(query_SBND), 1, -1)

    InsideDocuments.__name__ = InsideDocuments.__qualname__ = attention.__name__
    return InsideDocuments

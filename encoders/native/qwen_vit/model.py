"""The vision transformer of Qwen2.5-VL, of Megatron-Core layers.

Inside the layers the patches of an image are ordered by window, then by token of the sequence (a square of `merge` x
`merge` patches). Windows are contiguous, and those of one length are adjacent. Images are always documents of a packed
row, with windows inside of them.

Shape suffixes as in `encoders.native.vit.model`.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from encoders.native.qwen_vit.spec import QwenVitSpec
from encoders.native.vit.model import VisionTransformer
from encoders.native.vit.patches import Grid, token_by_token
from encoders.native.vit.positions import axial_angles
from encoders.staged import Size


class QwenVisionTransformer(VisionTransformer):
    """One pipeline stage: images -> features per token of `merge` x `merge` patches."""

    spec: QwenVitSpec

    def _kept(self, size: Size) -> torch.Tensor:
        # Position of each token in window order, by its position in the image.
        rows, columns = self._grid(size)
        tokens = torch.argsort(_by_window(rows // self.merge, columns // self.merge, self._window))
        return (tokens[:, None] * self.merge**2 + torch.arange(self.merge**2)).flatten()

    def _is_batch(self, sizes: Sequence[Size]) -> bool:
        return False

    def _documents(self, sizes: Sequence[Size]) -> PackedSeqParams:
        windows = [
            self.merge**2 * tokens
            for rows, columns in map(self._grid, sizes)
            for tokens in _window_lengths(rows // self.merge, columns // self.merge, self._window)
        ]
        return self.config.documents([self._tokens(size) for size in sizes], windows=windows)

    def _angles(self, size: Size) -> torch.Tensor:
        grid = self._grid(size)
        head = self.spec.hidden_size // self.spec.num_attention_heads
        return axial_angles(head, self.spec.rotary_base, *grid)[self._order(grid)]

    @property
    def _window(self) -> int:
        """Side of a window, in tokens of the sequence."""
        return self.spec.window_size // self.spec.patch_size // self.merge

    def _order(self, grid: Grid) -> torch.Tensor:
        return _patch_order(*grid, self.merge, self._window)


def _windows(rows: int, columns: int, window: int) -> list[torch.Tensor]:
    """Return the positions (in row order) of the tokens of each window; windows of one length are adjacent."""
    places = torch.arange(rows * columns).view(rows, columns)
    windows = [part.flatten() for band in places.split(window, 0) for part in band.split(window, 1)]
    return sorted(windows, key=len, reverse=True)


@lru_cache(maxsize=1024)
def _window_lengths(rows: int, columns: int, window: int) -> tuple[int, ...]:
    return tuple(len(indices) for indices in _windows(rows, columns, window))


@lru_cache(maxsize=1024)
def _by_window(rows: int, columns: int, window: int) -> torch.Tensor:
    return torch.cat(_windows(rows, columns, window))


@lru_cache(maxsize=1024)
def _patch_order(rows: int, columns: int, merge: int, window: int) -> torch.Tensor:
    squares = token_by_token(rows, columns, merge).view(-1, merge**2)  # tokens, patches of each
    return squares[_by_window(rows // merge, columns // merge, window)].flatten()

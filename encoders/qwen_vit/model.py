"""The vision transformer of Qwen2.5-VL of Megatron-Core layers.

Inside the layers the patches of a picture are ordered by window, within a window by token of the sequence (a square of
`merge` x `merge` patches), so that windows are neighbours and a token's patches too. Layers get the lengths of the
windows as `attention_mask`.

Shape suffixes as in `encoders.vit.model`.
"""

from functools import lru_cache

import torch

from encoders.qwen_vit.spec import QwenVitSpec
from encoders.staged import Size
from encoders.vit.model import VisionTransformer
from encoders.vit.rotary import axial_angles


class QwenVisionTransformer(VisionTransformer):
    """Pictures -> features per token of `merge` x `merge` patches: what one pipeline stage has of it."""

    spec: QwenVitSpec

    def _embed(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pictures of one size, [N, 3, height, width] -> the input of the first layer, [N, T, H]."""
        return super()._embed(pixels)[
            :, self._order((pixels.shape[-2], pixels.shape[-1])).to(pixels.device, non_blocking=True)
        ]

    def _features(self, hidden_NTH: torch.Tensor, size: Size) -> torch.Tensor:
        """The patches of each token side by side, tokens row by row."""
        squares = self.merge**2
        # The place of a token among windows, by its place in the picture.
        rows, columns = self._grid(size)
        tokens = torch.argsort(_token_order(rows // self.merge, columns // self.merge, self._window))
        return hidden_NTH.unflatten(1, (-1, squares)).flatten(2)[:, tokens.to(hidden_NTH.device, non_blocking=True)]

    def _layer_inputs(self, size: Size) -> dict[str, torch.Tensor | None]:
        rows, columns = self._grid(size)
        head = self.spec.hidden_size // self.spec.num_attention_heads
        angles = axial_angles(head, self.spec.rotary_base, rows, columns)[self._order(size)]
        return {
            "attention_mask": torch.tensor(self.spec.window_tokens(rows, columns, self.merge)),
            "rotary_pos_emb": angles[:, None, None].to(next(self.parameters()).device, non_blocking=True),
        }

    @property
    def _window(self) -> int:
        """Side of a window, in tokens of the sequence."""
        return self.spec.window_size // self.spec.patch_size // self.merge

    def _order(self, size: Size) -> torch.Tensor:
        """Places in the picture, row by row, of the patches as the layers have them."""
        return _patch_order(*self._grid(size), self.merge, self._window)


@lru_cache(maxsize=1024)
def _token_order(rows: int, columns: int, window: int) -> torch.Tensor:
    """Places, row by row, of tokens that are ordered by window."""
    places = torch.arange(rows * columns).view(rows, columns)
    return torch.cat([part.flatten() for band in places.split(window, 0) for part in band.split(window, 1)])


@lru_cache(maxsize=1024)
def _patch_order(rows: int, columns: int, merge: int, window: int) -> torch.Tensor:
    places = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    squares = places.transpose(1, 2).flatten(2).flatten(0, 1)  # tokens, patches of each
    return squares[_token_order(rows // merge, columns // merge, window)].flatten()

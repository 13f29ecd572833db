"""An encoder of `transformers` alone as the encoder of a run.

Shape suffixes: N items of one shape, T features of one of them, R rows (features of all items one after the other), H
width of the features.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from encoders.native.vit.patches import merge_patches
from encoders.plain.model import PlainEncoder
from encoders.transformers_media.model import Item, MediaEncoder, MediaHalf
from encoders.transformers_media.tower_reader import rates_of, states, tower, tower_config
from encoders.transformers_media.tower_spec import AutoTowerSpec


class Tower(MediaHalf):
    """Images or audio as the processor gives them -> the encoder's features, [R, H]."""

    EXAMPLES = {"image": ((64, 96),), "audio": ((8000, 16000),)}

    def _built(self, spec: AutoTowerSpec) -> PreTrainedModel:  # type: ignore[override]
        config = tower_config(spec.path)
        if not spec.dropout:
            config = type(config).from_dict(config.to_dict() | dict.fromkeys(rates_of(config), 0.0))
        self.hidden_state, self.dropped = spec.hidden_state, spec.dropped_tokens
        return tower(config)

    def _argument_names(self, medium: str) -> set[str]:
        return {self.model.main_input_name}

    def _output(self, inputs: Mapping[str, Any], medium: str) -> torch.Tensor:
        state = states(self.model, inputs[self.model.main_input_name], self.hidden_state)
        features_NTH = state.flatten(2).transpose(1, 2) if state.dim() == 4 else state
        return features_NTH[:, self.dropped :].flatten(0, 1)


class TowerEncoder(MediaEncoder):
    """An encoder of transformers, whole on every rank: data parallel only."""

    MODULE = Tower
    _refuse_batch_norms = PlainEncoder._refuse_batch_norms

    def forward(self, items: Sequence[Item]) -> torch.Tensor:  # type: ignore[override]
        """Return features in the order of the items, adjacent ones joined, [R, H * joined]."""
        features_RH = super().forward(items)
        if self.merge == 1:
            return features_RH
        parts = features_RH.split([item["rows"] for item in items])
        return torch.cat([self._joined(part, item) for part, item in zip(parts, items, strict=True)])

    def _joined(self, features_TH: torch.Tensor, item: Item) -> torch.Tensor:
        if self.spec.kind == "image":
            rows, columns = item["grid"]
            return merge_patches(features_TH[None], rows, columns, self.merge)[0]
        missing = -len(features_TH) % self.merge
        return torch.nn.functional.pad(features_TH, (0, 0, 0, missing)).unflatten(0, (-1, self.merge)).flatten(1)

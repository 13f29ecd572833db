"""Items of a model of transformers go through it as a batch if each then has the features that it has alone."""

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from encoders.transformers_media.model import MediaHalf


class Class(torch.nn.Module):
    """Stands for a class of transformers: features of an item are its values doubled, with noise by default."""

    def __init__(self, mixes: bool):
        super().__init__()
        self.mixes, self.scale = mixes, torch.nn.Parameter(torch.tensor(2.0))

    def get_audio_features(self, values, lengths, sample=True, return_dict=True):
        features = values * self.scale
        if sample:
            features = features + torch.randn_like(features)
        if self.mixes:  # takes the length of the first item for all
            features = features * lengths[0] / lengths.repeat_interleave(values.shape[0] // len(lengths))[:, None]
        return BaseModelOutputWithPooling(pooler_output=features)

    @property
    def base_model(self):
        return self


def half(mixes: bool) -> MediaHalf:
    made = MediaHalf.__new__(MediaHalf)
    torch.nn.Module.__init__(made)
    made.kind, made.deepstack, made.model, made.batches, made.verified = "audio", (), Class(mixes), True, set()
    made.arguments = {"audio": {"values", "lengths", "sample"}}
    return made


def item(rows: int, length: float) -> dict:
    return {"values": torch.rand(rows, 4) + 1, "lengths": torch.tensor([length]), "rows": rows}


def test_noise_is_no_difference():
    made = half(mixes=False)
    made([item(2, 1), item(2, 1)])
    assert made.batches and made.verified == {True}


def test_unequal_items_are_tried_after_equal_ones():
    made = half(mixes=True)
    made([item(2, 1), item(2, 1)])
    assert made.batches
    unequal = [item(2, 1), {**item(2, 3), "tokens": torch.zeros(3)}]
    with pytest.warns(
        UserWarning,
        match="Class cannot compute several items as a batch .features differ by .*: it computes them one by one",
    ):
        made(unequal)
    assert not made.batches

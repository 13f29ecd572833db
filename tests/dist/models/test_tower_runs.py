"""Runs that begin with the weights of transformers' encoders have the numbers of one process at other layouts."""

import pytest

from mimo_train.config.compose import load
from tests.dist.runs import TINY, TOLERANCE, curve, largest_difference, train_on_ranks
from tests.towers import TOWERS, publish

WINDOWS = ("modules.images.projector.merge=2", "train.recompute=full")


@pytest.mark.parametrize(
    ("name", "keys", "layout"),
    [
        ("dinov3", ("modules.images.encoder.keep_class_token=true",), ("layout=images_pp2_language_one",)),
        ("qwen2.5-vl", WINDOWS, ("layout=images_tp2_language_pp2", "modules.images.layout.sp=true")),
    ],
)
def test_a_layout_changes_no_number(name, keys, layout, digits, tmp_path):
    publish(TOWERS[name], tmp_path / "tower")

    def train(folder: str, *overrides: str) -> list[tuple]:
        data = (f"data.shards={digits}/train", "data.validation_shards=", "data.demo=", "data.sequence_length=160")
        own = (f"run.dir={tmp_path / folder}", f"modules.images.pretrained={tmp_path / 'tower'}", "train.iters=3")
        return curve(train_on_ranks(load("vlm_digits", (*TINY, *data, *own, *keys, *overrides))))

    one, other = train("one", "layout=one_process"), train("other", *layout)
    assert max(largest_difference(one, other)) < TOLERANCE
    assert one[-1][1] != one[0][1]

"""The work of the data relative to full samples."""

import numpy as np
import pytest

from data.order.step import StepSamples
from mimo_train.estimate.devices import DEVICES
from mimo_train.preflight.plan.data_shares import data_shares, shares_of
from mimo_train.preflight.plan.search import Request, plan
from tests.tars import write_tar
from tests.unit.configs import load
from tests.unit.data.helpers import chat, encode_image

ROWS, MEDIA = 384, {"images": 1.0}
BATCH = ("train.global_batch_size=16", "train.micro_batch_size=2", "data.sequence_length=128")


def step_of(cfg, lengths: list[int], drawn_images: list[int]) -> StepSamples:
    """Return a step whose samples have these numbers of tokens, and of images of the largest size."""
    module, number = cfg.modules["images"], np.array(drawn_images, dtype=np.int64)
    tokens = module.encoder.most_inner_tokens(module.projector.merge)
    rows = module.encoder.most_tokens(module.projector.merge)
    of_image = {"tokens": rows, "loads": tokens, "pairs": tokens**2}
    numbers = {key: {"images": each * number} for key, each in of_image.items()}
    return StepSamples(**numbers, lengths=np.array(lengths, dtype=np.int64))


@pytest.mark.parametrize("rows", ["data.pad=sequence", "data.pad=microbatch", "data.pack=true"])
def test_full_samples_are_what_costs_are_of(rows):
    cfg = load("vlm_digits", *BATCH, rows)
    shares = shares_of(cfg, ROWS, MEDIA, [step_of(cfg, [128] * 16, [1] * 16)])
    assert shares.work == pytest.approx({"images": 1.0, "language": 1.0})
    assert shares.tokens == 1 and shares.steps == 1


def test_texts_and_images_count_as_they_are():
    lengths, images = [32] * 8 + [64] * 8, [3, 0, 0, 0] * 4
    work = {}
    for rows in ("data.pad=sequence", "data.pad=microbatch", "data.pack=true"):
        cfg = load("vlm_digits", *BATCH, rows)
        shares = shares_of(cfg, ROWS, MEDIA, [step_of(cfg, lengths, images)])
        work[rows] = shares.work["language"]
        assert shares.work["images"] == pytest.approx(0.75) and shares.tokens == pytest.approx(0.375)
    # Rows of similar lengths, or packed, are computed as they are; the attention of short texts is less.
    assert work["data.pad=sequence"] == pytest.approx(1.0)
    assert 0.3 < work["data.pack=true"] < 0.375 and work["data.pad=microbatch"] == pytest.approx(work["data.pack=true"])


def shards(folder, texts: list[str]):
    members = []
    for number, text in enumerate(texts):
        members += [(f"{number:03d}.png", encode_image(8, 8)), (f"{number:03d}.json", chat("<image>?", text))]
    write_tar(folder / "s-000000.tar", members)
    return folder


def test_steps_are_predicted_by_the_shards_that_are_there(tmp_path):
    folder = shards(tmp_path / "shards", ["a" * (4 + 50 * (at % 2)) for at in range(40)])
    cfg = load("vlm_digits", *BATCH, f"data.shards={folder}", "data.demo=")
    shares = data_shares(cfg, ROWS, MEDIA)
    assert shares.steps == 2 and shares.work["language"] < 0.7 and not shares.missing

    def seconds(**options):
        request = Request(2, 8, DEVICES["l40s"], ROWS, MEDIA, top=1, **options)
        return plan(cfg, request).proposals[0].prediction.seconds

    assert seconds(shares=shares) < 0.95 * seconds()


def test_what_cannot_be_read_is_named(tmp_path):
    cfg = load("vlm_digits", *BATCH, f"data.shards={tmp_path}/none", "data.demo=")
    assert "no such file or folder" in data_shares(cfg, ROWS, MEDIA).missing
    cfg.data.shards = ""
    assert data_shares(cfg, ROWS, MEDIA).missing == "data.shards is empty"

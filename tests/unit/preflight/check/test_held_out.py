"""Held-out samples with an image of a training sample are reported, with their number."""

import pytest

from mimo_train.config.compose import load
from mimo_train.inputs.datasets import build_dataset, held_out_sets, tokenizer_of
from mimo_train.preflight.check.data import add_leakage
from mimo_train.preflight.check.report import Report
from tests.unit.preflight.check.shards import image, on, record, shard


def warned(shards, *more):
    """Return (the warnings, the training samples, the held-out samples)."""
    name, *changes = on(shards, **{"data.validation_fraction": "0.3"})
    cfg, report = load(name, [*changes, *more]), Report()
    tokenizer = tokenizer_of(cfg)
    dataset = build_dataset(cfg, tokenizer)
    (one,) = held_out_sets(cfg)
    held_out = build_dataset(cfg, tokenizer, held_out=one)
    add_leakage(report, one, dataset, held_out)
    return report.warnings, dataset, held_out


def content(dataset, number):
    (member,) = dataset.meta(number).members["image"]
    return dataset.reader.read(dataset.shards[0], member.offset, member.size, "png")


def test_held_out_samples_with_a_image_that_is_trained_on_are_counted(tmp_path):
    members = []
    for at in range(40):
        # One image for each two or three samples, all with the same size and number of bytes.
        raw = image(20 + at // 5 % 2, 20) + bytes([at // 3])
        members += [(f"{at:02d}.png", raw), (f"{at:02d}.json", record("<image>?"))]
    warnings, trained, held_out = warned(shard(tmp_path / "a.tar", *members))
    seen = {content(trained, number) for number in range(len(trained))}
    shared = sum(content(held_out, number) in seen for number in range(len(held_out)))
    assert 0 < shared < len(held_out)
    (warning,) = warnings
    assert f": {shared} of {len(held_out)} held-out samples have an image or clip that is trained on" in warning


def test_nothing_is_said_of_images_of_their_own(tmp_path):
    members = []
    for at in range(30):
        members += [(f"{at:02d}.png", image() + bytes([at])), (f"{at:02d}.json", record("<image>?"))]
    assert warned(shard(tmp_path / "a.tar", *members))[0] == []


def test_what_is_not_compared_is_said(tmp_path, monkeypatch):
    members = []
    for at in range(30):
        members += [(f"{at:02d}.png", image()), (f"{at:02d}.json", record("<image>?"))]
    path = shard(tmp_path / "a.tar", *members)
    for most, said in ((1, r"fraction: \d+ of"), (0, None)):
        monkeypatch.setattr("data.samples.verify._MOST_READ", most)
        warnings = warned(path)[0]
        assert bool(warnings) == (said is not None)
        if said:
            with pytest.raises(AssertionError, match=said):
                raise AssertionError(warnings[0])

"""Samples whose features are known are not read."""

import torch

from data.order.step import Batching
from data.samples.protocol import MEDIA
from tests.unit.data.test_loader import equal, pixels, steps

ONE_SAMPLE = Batching(global_batch_size=1, microbatch_samples=1)


class Known:
    """A lookup that has the features of the samples whose identity ends with one of these keys."""

    def __init__(self, *keys: str):
        self.keys, self.asked = keys, []

    def __call__(self, identity: str) -> torch.Tensor | None:
        self.asked.append(identity)
        sample, _ = identity.rsplit("|", 1)
        return torch.full((4, 2), 7.0) if sample.endswith(self.keys) else None


def looked_up(data, lookup) -> list:
    data.lookups = {"images": lookup}
    return steps(data, limit=1)[0].microbatches


def test_images_of_known_samples_are_neither_read_nor_in_the_batch(dataset):
    whole = steps(dataset(shuffle=False), limit=1)[0].microbatches
    data, read = dataset(shuffle=False), []
    data.read_media = lambda number, *which, read_media=data.read_media: (
        read.append(number) or read_media(number, *which)
    )
    known = Known(data.identity(1), data.identity(4))
    batches = looked_up(data, known)
    assert [len(pixels(batch)) for batch in whole] == [3, 4]
    # Sample 4 has two images.
    assert equal(pixels(batches[0]), [pixels(whole[0])[index] for index in (0, 2)])
    assert equal(pixels(batches[1]), pixels(whole[1])[2:])
    assert not {1, 4} & set(read) and {0, 3, 6, 7} <= set(read)
    first, second = (batch["modality_inputs"]["images"]["images"][MEDIA].items for batch in batches)
    assert [(item.sample, item.number, item.rows, item.features is not None) for item in first + second] == [
        (0, 0, 4, False), (1, 0, 4, True), (3, 0, 4, False),
        (4, 0, 4, True), (4, 1, 4, True), (6, 0, 4, False), (7, 0, 4, False),
    ]  # fmt: skip
    assert len(set(known.asked)) == len(known.asked) == 7, "samples without images are not looked up"


def test_a_microbatch_of_known_samples_has_no_pixels_and_one_without_images_nothing(dataset):
    data = dataset(shuffle=False)
    for batch in looked_up(data, Known("")):
        assert set(batch["modality_inputs"]["images"]["images"]) == {MEDIA}
    (text_only,) = [
        batch["modality_inputs"]["images"]
        for step in steps(data, limit=20, batching=ONE_SAMPLE)
        for batch in step.microbatches
        if step.first_sample == 2
    ]
    assert text_only is None


def test_what_was_passed_over_can_still_be_read(dataset):
    whole = steps(dataset(shuffle=False), limit=1)[0].microbatches[0]
    media = looked_up(dataset(shuffle=False), Known(""))[0]["modality_inputs"]["images"]["images"][MEDIA]
    again = media.read(media.items)
    assert equal(list(again["pixels"]), pixels(whole))


def test_a_bad_sample_is_not_good(dataset, small):
    shard = next(iter(sorted(small.glob("*.tar"))))
    raw = bytearray(shard.read_bytes())
    start = raw.index(b"IDAT")
    raw[start + 8 : start + 24] = bytes(16)
    shard.write_bytes(raw)
    data = dataset(shuffle=False, max_bad_samples=9)
    media = looked_up(data, Known("nothing"))[0]["modality_inputs"]["images"]["images"][MEDIA]
    assert [item.is_good for item in media.items] == [False, True, True]


def test_identities_tell_samples_of_all_shards_apart_and_stay_the_same(dataset):
    data = dataset()
    identities = {data.identity(number) for number in range(len(data))}
    assert len(identities) == len(data) == 13
    assert {data.identity(number) for number in range(13, 26)} == identities, "the second epoch has the same samples"

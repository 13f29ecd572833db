"""What of a sample is read: numbered and named members, records beside others, `data.fields`, and markers that nothing
takes."""

import json

import pytest

from data.errors import DataError
from data.records.members import NO_FIELDS, arrange, named_unread, read_fields, unread
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image, media_of, open_index


def read(names, fields=NO_FIELDS):
    """Extensions of the images that are read, in order."""
    found = arrange(tuple(names), fields)
    return [names[place] for place, kind in zip(found.order, found.kinds, strict=True) if kind == "image"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["1.jpg", "10.jpg", "2.jpg", "json"], ["1.jpg", "2.jpg", "10.jpg"]),
        (["img1.jpg", "img10.png", "json", "img2.jpg"], ["img1.jpg", "img2.jpg", "img10.png"]),
        (["2024.10.jpg", "2024.2.jpg"], ["2024.2.jpg", "2024.10.jpg"]),
        (["b.jpg", "a.jpg"], ["b.jpg", "a.jpg"]),
        (["right2.jpg", "left1.jpg"], ["right2.jpg", "left1.jpg"]),
        (["jpg", "mask.png"], ["jpg"]),
        (["depth.png", "0.jpg", "1.jpg"], ["0.jpg", "1.jpg"]),
        (["1.jpg", "jpg"], ["1.jpg", "jpg"]),
    ],
)
def test_numbered_images_are_in_the_order_of_their_numbers_and_named_ones_beside_others_are_not_read(names, expected):
    assert read(names) == expected


def test_members_that_are_not_read_are_named_once_for_each_kind():
    names = ["jpg", "mask.png", "mp4", "ts", "npy", "json", "txt", "meta.json", "xyz", "wav", "noise.wav"]
    assert dict(unread(names)) == {
        "mask.png": "an image with a name, next to others without",
        "ts": "video that is not decoded: convert it, video formats are m4v, mkv, mov, mp4, webm",
        "npy": "an array or a file of weights",
        "txt": "a record next to the one that is read",
        "meta.json": "a record next to the one that is read",
        "xyz": "an unknown kind of file",
        "noise.wav": "audio with a name, next to others without",
    }
    assert named_unread({("a.txt", "x"): 3, ("b.txt", "x"): 1234, ("mp4", "y"): 1}) == [
        "members .a.txt (3), .b.txt (1,234) are not read: x",
        "members .mp4 (1) are not read: y",
    ]


def shard(folder, *samples):
    return write_tar(folder / "s.tar", [member for sample in samples for member in sample])


def images(key, names, record):
    own = [(f"{key}.{name}", encode_image(8, 8, "PNG", value=10 * at)) for at, name in enumerate(names)]
    return [*own, (f"{key}.json", record if isinstance(record, bytes) else json.dumps(record).encode())]


def test_the_dataset_reads_images_in_that_order(tmp_path, dataset):
    ask = chat("<image><image><image>q", "a")
    data = dataset(shard(tmp_path, images("k", ["1.png", "10.png", "2.png"], ask)), shuffle=False)
    assert [int(image[0, 0, 0]) for image in media_of(data, 0, "images")] == [0, 20, 10]
    one = {"fields": read_fields({"image": ["10.png"]})}
    data = dataset(shard(tmp_path, images("k", ["1.png", "10.png", "2.png"], chat("<image>q", "a"))), **one)
    assert [int(image[0, 0, 0]) for image in media_of(data, 0, "images")] == [10]
    assert data.read_text(0)[1] is None


TALK = {"conversations": [{"from": "human", "value": "<image>q"}, {"from": "gpt", "value": "a"}]}


@pytest.mark.parametrize(
    ("names", "more", "said"),
    [
        (["png"], {"image": ["a.png", "b.png"]}, "'image' names 2 files, but the sample has 1 image member"),
        (["png"], {"image": "x/k.png"}, None),
        (["png", "mask.png"], {"mask": "k.mask.png"}, r"'mask' refers to the member \.mask\.png, which is not read"),
        (["png", "mask.png"], {"mask": "other.png"}, None),
        (["png", "ts"], {"video": "any.ts"}, r"'video' refers to the member \.ts, which is not read"),
        (["png", "ts"], {"video": None}, None),
        (["png"], {"video": "where it came from"}, None),
    ],
)
def test_a_record_that_refers_to_what_is_not_read_is_bad(names, more, said, tmp_path, dataset, capsys):
    from mimo_train.cli import main

    path = shard(tmp_path, images("k", names, TALK | more))
    bad = dataset(path, max_bad_samples=1).read_text(0)[1]
    if said is None:
        assert bad is None and main(["shards", "verify", str(path)]) == 0
        return
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(bad.reason)
    assert main(["shards", "verify", str(path)]) == 1 and bad.reason in capsys.readouterr().out


def test_files_of_a_record_in_another_order_than_the_members_are_bad(tmp_path, dataset):
    talk = {"conversations": [{"from": "human", "value": "<image><image>q"}, {"from": "gpt", "value": "a"}]}
    for files, said in ((["k.b.png", "k.a.png"], "in another order"), (["a.png", "b.png"], None)):
        path = shard(tmp_path, images("k", ["a.png", "b.png"], talk | {"image": files}))
        bad = dataset(path).read_text(0)[1]
        assert (bad is None) if said is None else said in bad.reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"titel": "txt"}, "titel: is not a field of a record"),
        ({"caption": "txt[a]"}, r"caption: .txt is not JSON"),
        ({"caption": 3}, "caption: must be the extension of a member"),
        ({"question": "txt"}, "question: no field says what is learned"),
        ({"caption": "txt?"}, "caption: one learned field per sample is enough"),
        ({"caption": "txt", "tools": "json[t]"}, "tools: require conversations or messages"),
        ({"image": []}, "image: must be the extension"),
    ],
)
def test_fields_that_cannot_be_are_named(given, said):
    with pytest.raises(DataError, match=said):
        read_fields(given)


def test_an_index_with_fields_has_other_records_and_the_same_members(tmp_path):
    sample = [("k.jpg", encode_image(8, 8)), ("k.json", b"{"), ("k.cls", b"3"), ("l.json", b"{}")]
    index = open_index(write_tar(tmp_path / "s.tar", sample))
    own = index.with_fields(read_fields({"label": "cls"}))
    assert [index.members(0)[index.record(0)].extension, own.members(0)[own.record(0)].extension] == ["json", "cls"]
    assert [member[:3] for member in own.members(0)] == [member[:3] for member in index.members(0)]
    assert (index.num_bad, own.num_bad) == (0, 1) and "none of the members that data.fields names" in own.bad_reason(1)
    assert {name for name, _ in own.unread()} == {"json"}


def test_a_record_of_other_names_is_bad_with_the_key_that_names_them(tmp_path, dataset):
    reason = dataset(shard(tmp_path, images("k", ["png"], {"prose": "A cat."}))).read_text(0)[1].reason
    assert "it has ['prose']; data.fields says what else is read, such as data.fields.caption=json[KEY]" in reason


@pytest.mark.parametrize("record", [{"caption": None}, {"caption": " \n"}])
def test_captions_that_are_null_have_no_loss_where_the_config_says_so(record, tmp_path, dataset):
    path = shard(tmp_path, images("k", ["png"], record))
    if record["caption"] is None:
        reason = dataset(path).read_text(0)[1].reason
        assert "caption is null" in reason and "; data.null_captions=skip takes" in reason
    sample, bad = dataset(path, skip_null=True).read_text(0)
    assert bad is None and not sample.loss_mask.any() and sample.length == 4

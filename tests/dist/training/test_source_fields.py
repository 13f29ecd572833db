"""A source of a mixture with fields of its own trains as records do that need none, at another layout."""

import json

import pytest

from tests.dist.runs import TOLERANCE, config, curve, train_on_ranks
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_picture


def test_a_mixture_with_fields_of_one_source_is_one_of_plain_records(tmp_path):
    for at in range(8):
        key, raw = f"{at:03d}", encode_picture(28, 28, "PNG", seed=at)
        talk = [(f"{key}.png", raw), (f"{key}.json", chat("<image>\nWhich?", f"answer {at}"))]
        other = [(f"{key}.png", encode_picture(20, 20, "PNG")), (f"{key}.right.png", raw)]
        other += [(f"{key}.json", json.dumps({"q": "Which?"}).encode()), (f"{key}.cls", f"answer {at}".encode())]
        write_tar(tmp_path / "talks" / f"{key}.tar", talk)
        write_tar(tmp_path / "labelled" / f"{key}.tar", other)
    fields = json.dumps({"question": "json[q]", "label": "cls", "image": "right.png"})
    runs = (("two_processes", f"{{name: b, shards: {tmp_path}/labelled, fields: {fields}}}"),)
    runs += (("one_process", f"{{name: b, shards: {tmp_path}/talks}}"),)
    changes = ("train.iters=2", "train.global_batch_size=8", "train.micro_batch_size=2", "data.shards=")
    curves = []
    for layout, second in runs:
        mix = f"data.mix=[{{name: a, shards: {tmp_path}/talks}}, {second}]"
        changed = (*changes, f"layout={layout}", mix)
        curves.append(curve(train_on_ranks(config("vlm_digits", tmp_path / layout, tmp_path, *changed))))
    assert len(curves[0]) == 2
    for one, same in zip(*curves, strict=True):
        assert one == pytest.approx(same, rel=TOLERANCE)

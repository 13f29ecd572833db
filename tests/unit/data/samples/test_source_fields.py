"""Sources of a mixture that have their records and media in different places: `data.mix[i].fields`."""

import json
import re

import numpy as np
import pytest

from data.errors import DataError
from data.order.sources import Source, found_shards
from data.records.members import read_fields
from data.samples.text_lengths import TextLengths
from mimo_train.checkpoint.resume.same_run import resume_faults
from mimo_train.cli import main
from mimo_train.config.compose import load, to_dict
from mimo_train.inputs.datasets import OneShard, build_dataset, held_out_sets, tokenizer_of
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image, media_of, prompt_and_truth

LABELS = {"label": "cls", "question": "json[q]", "image": ["right.png", "left.png"]}


@pytest.fixture
def folders(tmp_path):
    """LLaVA records, and samples with a label and two named images."""
    image = encode_image(16, 16, "PNG", value=200)
    talks = [[(f"{at}.png", image), (f"{at}.json", chat("<image>q", f"a{at}"))] for at in range(3)]
    labelled = [
        [
            (f"{at}.left.png", encode_image(16, 16, "PNG", value=at)),
            (f"{at}.right.png", encode_image(16, 16, "PNG", value=100 + at)),
            (f"{at}.json", json.dumps({"q": "which?"}).encode()),
            (f"{at}.cls", f"{at}".encode()),
        ]
        for at in range(5)
    ]
    for name, samples in (("talks", talks), ("labelled", labelled)):
        write_tar(tmp_path / name / "0.tar", [member for sample in samples for member in sample])
    return tmp_path


def test_each_source_is_read_by_its_own_fields(folders, dataset):
    own = Source("labelled", folders / "labelled", fields=read_fields(LABELS))
    data = dataset([Source("talks", folders / "talks"), own], shuffle=False)
    step = data.plan_step(0, 8)
    asked = set()
    for number, source in enumerate(data.order.sources(np.array(range(8))).tolist()):
        sample, bad = data.read_text(number)
        assert bad is None, bad
        asked.add(prompt_and_truth(data, number))
        images = [int(one[0, 0, 0]) for one in media_of(data, number, "images")]
        truth = int(prompt_and_truth(data, number)[1].removeprefix("a"))
        assert images == ([100 + truth, truth] if source else [200])
        assert step.tokens["images"][number] == 4 * len(images)
        assert data.meta(number).fields == (read_fields(LABELS) if source else read_fields({}))
    assert asked == {*(("q", f"a{at}") for at in range(3)), *(("which?", str(at)) for at in range(5))}
    (first, _), (second, _) = data.lengths_keys()
    assert first != second and dataset(folders / "talks").lengths_keys() == [(first, range(1))]
    assert [key for key, _ in data.unread_members()] == []
    plain = dataset([Source("talks", folders / "talks"), Source("labelled", folders / "labelled")], shuffle=False)
    assert {plain.identity(number) for number in range(8)} & {data.identity(number) for number in range(8)} == {
        data.identity(number) for number in range(8) if not data.order.sources(np.array([number]))[0]
    }


def test_one_shard_in_two_sources_is_counted_and_read_as_each_says(folders, dataset):
    texts = [read_fields({"answer": one, "image": "left.png"}) for one in ("cls", "json[q]")]
    data = dataset([Source(str(at), folders / "labelled", fields=one) for at, one in enumerate(texts)], shuffle=False)
    lengths = TextLengths(data)
    assert lengths.missing() == [0, 1] and sum(done.samples for done in lengths.build()) == 10
    lengths.serve()
    assert data.lengths.tolist() == [data.lengths_of(shard, row)[0] for shard in (0, 1) for row in range(5)]
    assert {*data.lengths[:5]} != {*data.lengths[5:]}
    assert {prompt_and_truth(data, number)[1] for number in range(10)} == {*"01234", "which?"}
    assert len({data.identity(number) for number in range(10)}) == 5  # the image is the same


def run(folders, *more):
    mix = f"data.mix=[{{shards: {folders}/talks}}, {{shards: {folders}/labelled, fields: {json.dumps(LABELS)}}}]"
    return ["vlm_digits", "data.demo=", "data.shards=", "data.validation_shards=", mix, *more]


def test_a_config_names_them_and_every_command_reads_by_them(folders, capsys):
    sets = f"data.validation={{more: {{shards: {folders}/labelled, fields: {json.dumps(LABELS)}}}}}"
    name, *changes = run(folders, sets)
    cfg = load(name, changes)
    data = build_dataset(cfg, tokenizer_of(cfg))
    assert all(data.read_text(number)[1] is None for number in range(8))
    (held_out,) = held_out_sets(cfg)
    assert build_dataset(cfg, tokenizer_of(cfg), held_out=held_out).read_text(0)[1] is None
    shard = data.shards[1]
    assert OneShard(cfg)(shard, data.fields_of(1)).lengths_keys()[0][0] == data.lengths_keys()[1][0]
    assert main(["shards", "verify", *run(folders, sets), "--workers", "1"]) == 0
    assert "data.mix[1].shards: 5 samples, 0 bad" in capsys.readouterr().out
    assert main(["check", *run(folders, sets)]) == 0
    assert "not read" not in capsys.readouterr().out
    without = run(folders)
    without[4] = f"data.mix=[{{shards: {folders}/talks}}, {{shards: {folders}/labelled}}]"
    assert main(["shards", "verify", *without, "--workers", "1"]) == 1
    wrong = "{x: {shards: a, fields: {labell: cls}}}"
    for key, given in (
        ("data.mix[0].fields.labell", "data.mix=[{shards: a, fields: {labell: cls}}]"),
        ("data.validation.x.fields.labell", f"data.validation={wrong}"),
    ):
        faults = load("vlm_digits", ["data.demo=", "data.shards=", given]).faults()
        assert [fault.key for fault in faults if "is not a field of a record" in fault.message] == [key]


def test_a_run_continues_with_the_same_samples_only(folders):
    def config(*more):
        name, *rest = run(folders, *more)
        return load(name, rest)

    def keys(before, now):
        record = {"config": to_dict(before)}
        found = resume_faults(folders, record, now, data_fingerprint=None, text_fingerprint=None)
        return [fault.key for fault in found]

    assert keys(config(), config()) == []
    assert keys(config(), config("data.mix[1].fields.label=json")) == ["data.mix[1].fields"]
    assert keys(config(), config("data.fields={text: json}")) == ["data.fields"]
    assert keys(config(), config("data.video.max_frames=3")) == ["data.video"]
    assert keys(config(), config("data.null_captions=skip")) == ["data.null_captions"]
    assert keys(config("data.null_captions=skip"), config("data.null_captions=skip")) == []
    assert keys(config(), config("data.background=black")) == ["data.background"]
    assert keys(config("data.background=none"), config("data.background=black")) == ["data.background"]
    older = to_dict(config())
    del older["data"]["video"], older["data"]["mix"][0]["fields"]
    del older["data"]["null_captions"], older["data"]["background"]
    found = resume_faults(folders, {"config": older}, config(), data_fingerprint=None, text_fingerprint=None)
    assert found == []
    spoilt = to_dict(config())
    spoilt["data"]["background"] = ["no colour"]
    (fault,) = resume_faults(folders, {"config": spoilt}, config(), data_fingerprint=None, text_fingerprint=None)
    assert fault.key == "data.background" and "was trained with ['no colour'], so the samples would" in fault.message


def test_shards_that_are_not_there_are_named_by_the_key_of_their_source(tmp_path):
    for key, end in (
        ("data.mix[2].shards", r"looked from [^;]*$"),
        ("data.validation_shards", "data.validation_shards=$"),
    ):
        with pytest.raises(DataError, match=rf"^{re.escape(key)}: no such file or folder: .*{end}"):
            found_shards(Source("", tmp_path / "none", key))

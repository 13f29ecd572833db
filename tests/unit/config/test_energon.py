"""Datasets of Megatron-Energon: equal tars, fields and weights; unsupported features are rejected by name."""

import json
from pathlib import Path

import pytest
import yaml

from data.errors import DataError
from data.index.energon import energon_fields, read_metadataset
from data.index.find_shards import find_shards
from mimo_train.config.compose import load
from mimo_train.config.errors import ConfigError
from mimo_train.inputs.datasets import build_dataset, tokenizer_of
from tests.tars import write_tar
from tests.unit.data.helpers import encode_image, prompt_and_truth

VQA = {"sample_type": {"__module__": "megatron.energon", "__class__": "VQASample"}}
VQA |= {"field_map": {"image": "jpg", "context": "json[question]", "answers": "json[answers][0]"}}
META = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}


def energon(folder: Path, dataset=VQA, splits=None, exclude=(), samples=2) -> Path:
    """Make a dataset of four tars, two for training."""
    for at in range(4):
        record = json.dumps({"question": f"{folder.name} {at}?", "answers": ["Yes."]}).encode()
        members = [(f"{n}.{end}", raw) for n in range(samples) for end, raw in (("jpg", IMAGE), ("json", record))]
        write_tar(folder / "shards" / f"{at}.tar", members)
    splits = splits or {"train": ["shards/{0..1}.tar"], "val": ["shards/2.tar", "shards/3.tar"]}
    files = {"dataset.yaml": dataset, "split.yaml": {"split_parts": splits, "exclude": list(exclude)}}
    files[".info.yaml"] = {"shard_counts": {f"shards/{at}.tar": samples for at in range(4)}}
    (folder / ".nv-meta").mkdir()
    for name, plain in files.items():
        (folder / ".nv-meta" / name).write_text(yaml.safe_dump(plain))
    return folder


IMAGE = encode_image(16, 16)


def metadataset(tmp_path: Path, train, name="mix.yaml") -> Path:
    file = tmp_path / name
    file.write_text(yaml.safe_dump(META | {"splits": {"train": train, "val": {"path": "one"}}}))
    return file


def config(*overrides):
    return load("vlm_digits", ["data.demo=", "data.sequence_length=64", *overrides])


def test_a_folder_is_read_as_its_own_files_say(tmp_path):
    folder = energon(tmp_path / "one", exclude=["shards/3.tar"])
    cfg = config(f"data.shards={folder}", f"data.validation_shards={folder}")
    assert (cfg.data.shards, cfg.data.validation_shards) == (f"{folder}:train", f"{folder}:val")
    assert [path.name for path in find_shards(cfg.data.shards)] == ["0.tar", "1.tar"]
    assert [path.name for path in find_shards(cfg.data.validation_shards)] == ["2.tar"]
    assert [path.name for path in find_shards(str(folder))] == ["0.tar", "1.tar", "2.tar"]
    samples = build_dataset(cfg, tokenizer_of(cfg))
    assert len(samples) == 4
    assert {prompt_and_truth(samples, number) for number in range(4)} == {("one 0?", "Yes."), ("one 1?", "Yes.")}
    with pytest.raises(DataError, match="no split 'test'; it has train, val"):
        find_shards(f"{folder}:test")


def test_a_metadataset_becomes_a_mixture(tmp_path):
    for name, samples in (("one", 1), ("two", 2), ("three", 3)):
        energon(tmp_path / name, samples=samples)
    inner = {"path": "inner.yaml", "weight": 6}
    file = metadataset(tmp_path, {"blend": [{"path": "one", "weight": 2, "subflavors": {"a": 1}}, inner]})
    parts = {"concatenate": [{"path": "two"}, {"path": "three", "split_part": "val"}]}
    metadataset(tmp_path, parts, "inner.yaml")
    cfg = config(f"data.shards={file}", f"data.validation_shards={file}")
    mix = [(one.name, one.shards, one.weight) for one in cfg.data.mix]
    assert [name for name, *_ in mix] == ["one", "two", "three"] and cfg.data.shards == ""
    # The concatenation inside has weights by its numbers of samples, 4 and 6.
    assert [weight for *_, weight in mix] == pytest.approx([2, 2.4, 3.6])
    assert mix[2][1] == f"{tmp_path / 'three'}:val" and cfg.data.validation_shards == f"{tmp_path / 'one'}:val"
    assert cfg.data.fields["answer"] == "json[answers][0]"
    assert len(build_dataset(cfg, tokenizer_of(cfg))) == 2 + 4 + 6
    again = {"blend_epochized": [{"path": "one", "repetitions": 3}, {"path": "two"}]}
    assert [one.weight for one in read_metadataset(metadataset(tmp_path, again), "train")] == [6, 4]


REFUSED = [
    ({"join": {"a": {"path": "one"}}}, "join: read are path, blend, blend_epochized and concatenate"),
    ({"path": "one", "aux": {"x": "y"}}, "aux is not read"),
    ({"path": "one", "subset": {"range": [0, 1]}}, "subset is not read"),
    ({"path": "one", "split_config": "other.yaml"}, "split_config 'other.yaml': only the usual file"),
    ({"path": "one", "shuffle_over_epochs_multiplier": 2}, "shuffle_over_epochs_multiplier is not read"),
    ({"path": "s3://bucket/one"}, "read of local folders"),
    ({"path": "none"}, "is no energon dataset"),
    ({"blend": [{"path": "one", "weight": -1}]}, "weight must be a number above 0, is -1"),
]


@pytest.mark.parametrize(("train", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_a_metadataset_has_beyond_is_refused(train, words, tmp_path):
    energon(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"data\.shards.*mix\.yaml") as error:
        config(f"data.shards={metadataset(tmp_path, train)}")
    assert words in str(error.value)


KINDS = [
    (VQA | {"sample_loader": "sample_loader.py:load"}, "sample_loader is not read"),
    (
        VQA | {"sample_type": {"__module__": "megatron.energon", "__class__": "OCRSample"}},
        "the kind megatron.energon.OCRSample is not read",
    ),
    (VQA | {"sample_type": {"__module__": "mine", "__class__": "VQASample"}}, "the kind mine.VQASample is not read"),
    (VQA | {"field_map": VQA["field_map"] | {"answer_weights": "json[w]"}}, "the field 'answer_weights' is not read"),
    (VQA | {"field_map": {"image": "jpg"} | {"caption": 3}}, "field_map: caption: must be the extension"),
]


@pytest.mark.parametrize(("dataset", "words"), KINDS, ids=[words for _, words in KINDS])
def test_a_kind_that_has_no_counterpart_is_refused(dataset, words, tmp_path):
    folder = energon(tmp_path / "one", dataset)
    with pytest.raises(ConfigError, match=r"data\.shards.*dataset\.yaml") as error:
        config(f"data.shards={folder}")
    assert words in str(error.value)


def test_sources_of_a_mixture_have_their_own_fields(tmp_path):
    energon(tmp_path / "one")
    energon(tmp_path / "two", {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"})
    cfg = config(f"data.shards={metadataset(tmp_path, {'blend': [{'path': 'one'}, {'path': 'two'}]})}")
    assert cfg.data.fields == {} and cfg.data.mix[1].fields == {}
    assert cfg.data.mix[0].fields["answer"] == "json[answers][0]"


def test_sources_of_other_fields_are_not_read_by_the_same(tmp_path):
    one = energon(tmp_path / "one")
    two = energon(tmp_path / "two", {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"})
    assert energon_fields(two) == {}
    with pytest.raises(ConfigError, match=r"data\.validation_shards.*one data.fields holds for both"):
        config(f"data.shards={one}", f"data.validation_shards={two}")
    with pytest.raises(ConfigError, match=r"data\.shards.*make each a source of data\.mix"):
        config(f"data.shards='{one},{two}'")
    (one / ".nv-meta" / "split.yaml").write_text("split_parts: {train: [a.tar]}\nexclude: [a.tar/key]")
    with pytest.raises(DataError, match="exclude names the sample a.tar/key"):
        find_shards(f"{one}:train")

"""Placeholders of encoder modules, and what several modules make of one sample."""

import pytest

from mimo_train.estimate.parameters import padded_vocab_size, vocabulary_faults
from mimo_train.inputs.datasets import OneShard, held_out_sets, media_of, placeholders_of, tokenizer_of
from mimo_train.layout.run import config_faults
from mimo_train.preflight.check import check
from tests.unit.configs import load
from tests.unit.preflight.check.shards import shard, sound

SECOND = ("encoder@modules.details.encoder=vit_small", "projector@modules.details.projector=linear")


@pytest.fixture
def two_encoders():
    """A run in which two modules read images."""
    return load("vlm_digits", *SECOND, "placement.mode=shared", "data.sequence_length=128")


def test_each_module_has_a_placeholder_of_its_own(two_encoders):
    assert placeholders_of(two_encoders) == {"images": "<image>", "details": "<image:details>"}
    assert [media.placeholder for media in media_of(two_encoders)] == ["<image>", "<image:details>"]
    one, two = tokenizer_of(load("vlm_digits")), tokenizer_of(two_encoders)
    assert one.placeholder_id("<image>") == two.placeholder_id("<image>"), "checkpoints of one module keep their ids"
    assert two.placeholder_id("<image:details>") == two.placeholder_id("<image>") + 1
    assert padded_vocab_size(one.vocab_size) == padded_vocab_size(two.vocab_size)


def test_a_module_named_as_its_kind_comes_second():
    cfg = load("vlm_digits", *(override.replace("details", "image") for override in SECOND))
    assert placeholders_of(cfg) == {"images": "<image>", "image": "<image:image>"}


def test_a_saved_tokenizer_has_the_placeholders_too(two_encoders, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<eos>": 0, "<image>": 1, "which": 2, "digit": 3}, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(tmp_path)
    two_encoders.data.tokenizer = str(tmp_path)
    tokenizer = tokenizer_of(two_encoders)
    ids = [tokenizer.placeholder_id(token) for token in placeholders_of(two_encoders).values()]
    assert ids[0] == 1 and ids[1] > 3, "the vocabulary's own <image> stays"
    assert not set(ids) & set(tokenizer.encode("<image> <image:details>"))


def test_check_takes_two_encoders_of_one_kind(two_encoders, capsys, tmp_path, monkeypatch):
    from data.demo.make import make_demo

    monkeypatch.chdir(tmp_path)
    make_demo("demo", train_samples=40, held_out_samples=4, shards=1)
    two_encoders.data.shards, two_encoders.data.validation_shards, two_encoders.data.demo = "demo/train", "", ""
    assert config_faults(two_encoders) == []
    report = check(two_encoders)
    assert report.faults == []
    tokens = next(table for table in report.tables if table.title == "One image")
    assert {row[0]: row[-1] for row in tokens.rows} == {"images": "16 of 128", "details": "36 of 128"}


def test_placeholders_need_no_row_and_text_does():
    cfg = load("vlm_digits", "modules.language.llm.vocab_size=262")
    tokenizer = tokenizer_of(cfg)
    assert (tokenizer.vocab_size, tokenizer.text_size) == (263, 262)
    assert list(vocabulary_faults(cfg.llm, tokenizer.text_size)) == []
    (fault,) = vocabulary_faults(load("vlm_digits", "modules.language.llm.vocab_size=261").llm, tokenizer.text_size)
    assert fault.key == "modules.language.llm.vocab_size"
    assert "has 261 rows and the tokenizer 262 tokens of text: set it to at least 262" in fault.message


def test_a_single_shard_has_all_of_its_samples_also_where_the_run_holds_all_of_them_out(tmp_path):
    path = shard(tmp_path / "a.tar", *sound(2))
    cfg = load(
        "vlm_digits", "data.demo=", f"data.shards={path}", "data.validation_shards=", "data.validation_fraction=0.999"
    )
    assert len(OneShard(cfg)(path)) == 2


def test_held_out_sets_have_no_weight_which_is_of_training_and_may_be_0():
    mix = "data.mix=[{shards: a, weight: 0}, {shards: b, weight: 1}]"
    sets = held_out_sets(
        load("vlm_digits", "data.demo=", "data.shards=", mix, "data.validation_shards=", "data.validation_fraction=0.1")
    )
    assert [one.source.weight for one in sets] == [None, None]

"""Samples of a run by number, for notebooks: those that training reads, decoded as people read them."""

import io
import json

import numpy as np
import pytest
import soundfile
import torch

from data.demo.make import MARKER
from data.loader import StepLoader
from data.order.step import Batching, Reader
from mimo_train.config.errors import UserError
from mimo_train.config.schema_mix import HeldOutConfig, MixChange, SourceConfig
from mimo_train.inputs.datasets import build_dataset, held_out_sets, tokenizer_of
from mimo_train.run_dataset import open_dataset
from tests.tars import write_tar
from tests.unit.configs import changed
from tests.unit.data.helpers import chat, encode_image
from tests.unit.logging.report.parsed_page import ParsedPage
from tests.unit.test_docs import DOCS, blocks


@pytest.fixture
def shards(tmp_path):
    """`shards(name, count)`: the path of a shard of `samples`."""
    return lambda name, count: str(write_tar(tmp_path / name / "a.tar", samples(name, count)))


def samples(name: str, count: int) -> list[tuple[str, bytes]]:
    """Members of samples with one image each."""
    members = []
    for n in range(count):
        members.append((f"{name}{n}.png", encode_image(20, 20, "PNG", value=20 * n)))
        members.append((f"{name}{n}.json", chat("<image>Where is <b>it</b>?", f"answer {n}")))
    return members


def config(shards: str, **data):
    """A config with steps of 8 samples over `shards`."""
    values = {"shards": shards, "demo": "", "validation_shards": "", **data}
    batch = {"train.global_batch_size": 8, "train.micro_batch_size": 4}
    return changed(batch | {f"data.{key}": value for key, value in values.items()})


def test_samples_are_those_that_each_step_trains_on(shards):
    cfg = config(shards("train", 10))
    dataset = open_dataset(cfg)
    readers = [Reader("language", 0, 1), Reader("images", 0, 1)]
    with StepLoader(build_dataset(cfg, tokenizer_of(cfg)), Batching(8, 4), readers, workers=0, limit=2) as loader:
        steps = list(loader)
    assert [list(dataset.step_samples(step)) for step in (1, 2)] == [[*range(8)], [*range(8, 16)]]
    for step, batch in enumerate(steps, 1):
        numbers = []
        for microbatch in batch.microbatches:
            images = microbatch["modality_inputs"]["images"]["images"]["pixels"]
            for row, number in enumerate(microbatch["sample_numbers"].tolist()):
                sample = dataset[number]
                numbers.append(sample.number)
                for name in ("input_ids", "labels", "loss_mask", "position_ids"):
                    assert torch.equal(getattr(sample, name), microbatch[name][row, : len(sample.input_ids)]), name
                assert not microbatch["loss_mask"][row, len(sample.input_ids) :].any()
                assert torch.equal(sample.media["images"][0], images[row])
        assert sorted(numbers) == list(dataset.step_samples(step))
    assert len(dataset) == len(list(dataset)) == 10 and dataset[0].key != dataset[10].key
    assert dataset[np.int64(3)].key == dataset[3].key
    with pytest.raises(IndexError, match="sample -1 is out of range"):
        dataset[-1]
    with pytest.raises(IndexError, match="step 0 is out of range"):
        dataset.step_samples(0)
    with pytest.raises(TypeError, match="slice"):
        dataset[:2]


def test_weights_of_a_mixture_change_at_their_step(shards):
    mix = [SourceConfig(shards("a", 3), 1.0), SourceConfig(shards("b", 3), 0.0)]
    change = MixChange(1, {"a.tar": 0.0, "b.tar": 1.0})
    mix[0].name, mix[1].name = change.weights
    dataset = open_dataset(config("", mix=mix, mix_schedule=[change]))
    sources = [{dataset[number].key[0] for number in dataset.step_samples(step)} for step in (1, 2)]
    assert sources == [{"a"}, {"b"}]


def test_held_out_sets_have_their_names(shards):
    cfg = config(shards("train", 4), validation_shards=shards("first", 3))
    cfg.data.validation = {"other": HeldOutConfig(shards("second", 2))}
    cfg.train.eval_samples = 2
    first, other = open_dataset(cfg, split="validation"), open_dataset(cfg, split="validation/other")
    assert [[sample.key for sample in dataset] for dataset in (first, other)] == [
        ["first0", "first1"],
        ["second0", "second1"],
    ]
    with pytest.raises(IndexError, match="there are 2"):
        first[2]
    with pytest.raises(UserError, match="no held-out samples"):
        first.step_samples(1)
    cfg.data.test_shards = shards("third", 1)
    assert open_dataset(cfg, split="test")[0].key == "third0"
    assert open_dataset(cfg, split="validation")[0].key == "first0"
    cfg.data.validation_shards = ""
    assert open_dataset(cfg, split="validation")[0].key == "second0"
    cfg.data.test_shards = ""
    with pytest.raises(UserError, match="'test' does not exist. Choose one of train, validation, validation/other"):
        open_dataset(cfg, split="test")


def test_parts_held_out_of_a_mixture_have_labels_of_their_own(shards):
    mix = [SourceConfig(name, 1.0, name=name) for name in ("a", "b")]
    cfg = config("", mix=mix, validation_fraction=0.1, test_shards="c")
    labels = ["data.validation_fraction of a", "data.validation_fraction of b", "data.test_shards"]
    assert [each.label for each in held_out_sets(cfg)] == labels


def test_a_config_object_takes_no_overrides(shards):
    cfg = config(shards("train", 1))
    with pytest.raises(UserError, match="overrides: a config object takes none"):
        open_dataset(cfg, ["train.iters=1"])


def test_a_decoded_sample_shows_text_image_and_what_is_learned(shards):
    dataset = open_dataset(config(shards("train", 3), shuffle=False))
    sample = dataset[2]
    decoded = dataset.decode(sample)
    tokens = dataset.samples.token_counts(2)["images"]
    assert f"<image> x {tokens} " in str(decoded) and "Where is <b>it</b>?" in str(decoded)
    assert str(decoded).endswith("[[answer 2[end]]]")
    page = ParsedPage(decoded._repr_html_())
    assert not page.outside() and "Where is <b>it</b>?" in page.words and not page.all("b")
    (image,) = page.all("img")
    assert image["src"].startswith("data:image/png;base64,iVBORw0KGgo")
    assert len(page.all("span", "learned")) == 1 and len(page.all("span", "medium")) == 1
    assert decoded.learned == len("answer 2") + 1 and f"{decoded.learned} learned, 1 for images)" in repr(sample)


def test_the_label_beyond_a_cut_sequence_is_shown(shards):
    cfg = config(shards("train", 1))
    whole = open_dataset(cfg)
    cfg.data.sequence_length = len(whole[0].input_ids) - 3
    cut = open_dataset(cfg)
    assert str(cut.decode(cut[0])).endswith("[[answer ]]") and cut.decode(cut[0]).learned == len("answer ")


def test_a_sample_with_audio_has_a_player_and_a_bad_one_its_reason(tmp_path):
    wav = io.BytesIO()
    soundfile.write(wav, np.zeros(12 * 16000, dtype=np.int16), 16000, format="WAV")
    members = [("a.wav", wav.getvalue()), ("a.json", json.dumps({"caption": "A tone."}).encode())]
    members += [("b.png", encode_image(20, 20, "PNG")[:60]), ("b.json", json.dumps({"caption": "A hill."}).encode())]
    shards = str(write_tar(tmp_path / "s" / "a.tar", members))
    overrides = [f"data.shards={shards}", "data.demo=", "data.validation_shards=", "data.shuffle=false"]
    dataset = open_dataset(
        "mixed_tiny", [*overrides, "data.sequence_length=1024", "modules.audio.encoder.max_seconds=15"]
    )
    good, bad = dataset
    (audio,) = ParsedPage(dataset.decode(good)._repr_html_()).all("audio")
    assert audio["src"].startswith("data:audio/wav;base64,UklGR") and len(audio["src"]) > 12 * 16000
    assert "member .png: " in bad.bad and not bad.loss_mask.any() and "bad: " in repr(bad)
    assert "Bad: " in ParsedPage(dataset.decode(bad)._repr_html_()).words and dataset.samples.bad_samples.count == 0


def test_a_sample_with_a_video_has_a_player(tmp_path):
    pytest.importorskip("av")
    from tests.videos import make_video

    shards = write_tar(tmp_path / "a.tar", [("a.mp4", make_video()), ("a.json", chat("<video>What?", "Grey."))])
    dataset = open_dataset(config(str(shards)))
    page = ParsedPage(dataset.decode(dataset[0])._repr_html_())
    (video,) = page.all("video")
    assert video["src"].startswith("data:video/mp4;base64,") and len(page.all("img")) == 3


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def make_demo(folder, kind):
        assert (str(folder), kind) == ("runs/demo/digits", "digits")
        for part in ("train", "held_out"):
            write_tar(folder / part / "a.tar", samples(part, 4))
        (folder / MARKER).touch()

    monkeypatch.setattr("data.demo.make.make_demo", make_demo)
    (example,) = [block for block in blocks(DOCS / "data.md", "python") if "open_dataset" in block]
    exec(example, {})
    assert "[[" in capsys.readouterr().out

"""`mimo-train check`: reports about samples, shards and tokenizers."""

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from mimo_train.cli import main
from mimo_train.config.compose import load
from mimo_train.inputs.datasets import build_dataset, held_out_sets, tokenizer_of
from mimo_train.preflight.check.data import add_leakage
from mimo_train.preflight.check.report import Report
from tests.unit.data.text.chat_templates import CHATML, LLAMA, QWEN_VL, save_tokenizer
from tests.unit.preflight.check.shards import heic, image, on, record, run, shard, sound, write_weights


def test_members_that_are_not_read_are_named(capsys):
    """An image that cannot be decoded is not dropped, which would make its caption a plain text."""
    shard(Path("a.tar"), *sound(), ("0009.ts", b"video"), ("0009.txt", b"A text."))
    code, out, _ = run(capsys, *on("a.tar"))
    assert code == 0
    said = "members .ts (1) are not read: video that is not decoded: convert it, video formats are m4v, mkv, mov"
    assert any(line.startswith(f"warning: data.shards: {said}") for line in out.splitlines())
    for command in ("inspect", "verify"):
        assert main(["shards", command, "a.tar"]) == 0
        assert said in "".join(capsys.readouterr())
    members = ("a.heic", image()), ("b.JXL", b"II*\0"), ("c.avi", b"RIFF")
    shard(Path("b.tar"), *(item for name, raw in members for item in ((name, raw), (f"{name[0]}.txt", b"A cat."))))
    _, _, faults = run(capsys, *on("b.tar"))
    *named, budget = faults
    images, videos = sorted(named, key=lambda fault: ".jxl" not in fault)
    assert "key b: member .jxl (4 bytes) cannot be decoded: convert it, image formats are avif, bmp, gif" in images
    assert "key c: member .avi (4 bytes) cannot be decoded: convert it, video formats are m4v, mkv, mov" in videos
    assert "2 of the first 3 samples" in budget


def test_images_in_a_sample_count_for_memory(capsys):
    two = [("x.0.png", image()), ("x.1.png", image()), ("x.json", record("<image><image>Sum?"))]
    shard(Path("a.tar"), *two, ("y.json", record("No image?")))
    _, out, _ = run(capsys, *on("a.tar"))
    assert "1.0 on average, 0 to 2 a sample" in out


def test_frames_of_videos_are_no_images(capsys):
    pytest.importorskip("av")
    from tests.videos import make_video

    film = [("x.0.mp4", make_video()), ("x.1.png", image()), ("x.json", record("<video><image>What?"))]
    shard(Path("a.tar"), *film, ("y.json", record("No video?")))
    _, out, _ = run(capsys, *on("a.tar"))
    rows = dict(re.findall(r"first 2 +(.*) of images +(.*) a sample", out))
    assert rows == {
        "images": "0.5 on average, 0 to 1",
        "videos": "0.5 on average, 0 to 1",
        "video frames": "1.5 on average, 0 to 3",
    }
    assert "activations of images: for 2.00 images a sample" in out


@pytest.mark.parametrize(
    ("name", "members", "said"),
    [
        ("two", [("k.png", image()), ("k.json", record("<image><image>?"))], "2 image placeholders, but"),
        ("none", [("k.json", record("<image>?"))], "1 image placeholder, but the sample has 0"),
        ("text", [("k.png", b"no image"), ("k.json", record("<image>?"))], "8 bytes"),
        ("cut", [("k.png", image()[:-30]), ("k.json", record("<image>?"))], "cannot decode"),
    ],
)
def test_bad_samples_are_faults_with_shard_and_key(name, members, said, capsys):
    path = shard(Path(f"{name}.tar"), *sound(), *members)
    code, _, faults = run(capsys, *on(path))
    assert code == 1
    (fault, budget) = faults
    assert fault.startswith(f"data.shards: {path}, key k: ")
    assert said in fault
    assert budget.startswith("data.max_bad_samples: allows 0, but 1 of the first 5 samples of data.shards are bad")


def test_a_library_that_is_not_installed_is_one_fault_whatever_is_allowed(capsys, monkeypatch):
    members = [("a.heic", heic()), ("a.json", record("<image>?")), ("b.heic", heic()), ("b.json", record("<image>?"))]
    path = shard(Path("a.tar"), *members)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    _, _, (fault,) = run(capsys, *on(path, **{"data.max_bad_samples": "10"}))
    assert fault.startswith("data.shards: ") and "a.tar" in fault and "pip install 'mimo-train[heic]'" in fault


def test_bad_samples_within_the_budget_are_warnings(capsys):
    path = shard(Path("a.tar"), *sound(), ("k.json", record("<image>?")))
    code, out, _ = run(capsys, *on(path, **{"data.max_bad_samples": "1"}))
    assert code == 0
    assert "warning: data.shards: 1 of the first 5 samples are bad, data.max_bad_samples allows 1" in out
    assert "key k" in out


def test_images_that_do_not_fit_into_a_sequence(capsys):
    seven = [(f"k.{at}.png", image()) for at in range(7)] + [("k.json", record("<image>" * 7))]
    path = shard(Path("a.tar"), *sound(), *seven)
    code, _, faults = run(capsys, *on(path))
    assert code == 1
    assert f"{path}, key k: its media alone need 112 tokens, but data.sequence_length is 96. Raise it" in faults[0]


def test_one_image_that_does_not_fit_is_a_fault_without_data(capsys):
    code, _, faults = run(capsys, "vlm_digits", "encoder@modules.images.encoder=vit_l14_336")
    assert code == 1
    (fault,) = faults
    assert fault.startswith("data.sequence_length: one image takes 576 tokens of modules.images (336 x 336 pixels")
    assert "has only 96" in fault and fault.endswith("raise modules.images.projector.merge")
    native = ("modules.images.encoder.resize=native", "modules.images.encoder.max_pixels=65536")
    _, _, (fault,) = run(capsys, "vlm_digits", *native)
    assert fault.endswith("or lower modules.images.encoder.max_pixels")


def test_texts_that_are_cut_are_warnings(capsys):
    path = shard(Path("a.tar"), *sound(), ("k.png", image()), ("k.json", record("<image>" + 200 * "long ")))
    code, out, _ = run(capsys, *on(path))
    assert code == 0
    assert "warning: data.shards: 1 of the first 5 samples fill data.sequence_length 96" in out
    assert f"1 of the first 5 samples have no token with loss, for example {path}, key k" in out


def test_every_damaged_shard_is_named_and_the_others_are_read(capsys, tmp_path):
    whole = shard(Path("s/a.tar"), *sound()).read_bytes()
    (tmp_path / "s" / "b.tar").write_bytes(whole[:5000])
    (tmp_path / "s" / "c.tar").write_bytes(b"\1" * 4096)
    (tmp_path / "s" / "d.tar").write_bytes(b"")
    code, out, faults = run(capsys, *on("s"))
    assert code == 1
    assert "1 of 4 shards can be read, 4 samples" in out
    assert "31.0 on average" in out
    assert [fault.split(": ")[1] for fault in faults] == [f"s/{name}.tar" for name in "bcd"]
    assert "5000 bytes" in faults[0]


def test_compressed_shards(capsys, tmp_path):
    whole = shard(Path("a.tar"), *sound()).read_bytes()
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.tar.gz").write_bytes(gzip.compress(whole))
    _, _, faults = run(capsys, *on("s"))
    assert len(faults) == 1
    assert "a.tar.gz" in faults[0] and "compressed" in faults[0]


@pytest.mark.parametrize("key", ["data.shards", "data.validation_shards"])
def test_shards_that_are_not_there(key, capsys, tmp_path):
    good = shard(Path("a.tar"), *sound())
    (tmp_path / "empty").mkdir()
    for place, said in (("gone", "no such file or folder"), ("empty", "holds no *.tar and no *.parquet file")):
        _, _, faults = run(capsys, *on(good, **{key: place}))
        assert len(faults) == 1
        assert faults[0].startswith(f"{key}: ")
        assert said in faults[0] and place in faults[0]
        assert faults[0].endswith("to hold out none: data.validation_shards=") == (key == "data.validation_shards")


def test_a_folder_without_shards_says_where_they_are_or_come_from(capsys):
    shard(Path("built/train/a.tar"), *sound())
    shard(Path("built/held_out/a.tar"), *sound())
    Path("built/images").mkdir()
    (fault,) = run(capsys, *on("built"))[2]
    assert fault.endswith(
        "no *.tar and no *.parquet file with samples: give a folder inside of it that does: built/held_out, built/train"
    )
    (fault,) = run(capsys, *on("built/images"))[2]
    assert fault.endswith("no *.tar and no *.parquet file with samples: `mimo-train shards build` makes shards")


def test_shards_named_twice_and_those_of_training_in_the_evaluation_are_warnings(capsys):
    for name in ("a.tar", "b.tar"):
        shard(Path(name), *sound())
    for held_out, said in (
        ("./b.tar", ["data.shards: 1 shard, such as", "data.validation_shards: 1 shard, such as"]),
        ("", ["data.shards: 1 shard, such as"]),
    ):
        _, out, _ = run(capsys, *on("a.tar,b.tar,a.tar", **{"data.validation_shards": held_out}))
        found = [line for line in out.splitlines() if "such as" in line]
        assert [line.partition(" such as")[0] + " such as" for line in found] == [f"warning: {text}" for text in said]
        assert "a.tar, named more than once: an epoch has their samples as often" in found[0]
    _, out, _ = run(capsys, *on("a.tar", **{"data.validation_shards": "b.tar"}))
    assert "such as" not in out


def test_shards_without_samples(capsys):
    path = shard(Path("a.tar"))
    _, _, faults = run(capsys, *on(path))
    assert faults == [f"data.shards: 1 shard of {path} can be read, without any sample"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("/no/such/folder", "no folder"),
        ("./empty", "there is no tokenizer in"),
        ("gpt2", "no folder gpt2: give bytes, "),
    ],
)
def test_tokenizers_that_cannot_be_built(place, said, capsys, tmp_path):
    """The rest is checked nevertheless: the shards are opened, without reading samples."""
    (tmp_path / "empty").mkdir()
    path = shard(Path("a.tar"), *sound())
    code, out, faults = run(capsys, *on(path, **{"data.tokenizer": place}))
    assert code == 1
    (fault,) = faults
    assert fault.startswith("data.tokenizer: ") and said in fault and place in fault
    assert "1 of 1 shard can be read, 4 samples" in out
    assert "without token embeddings" in out


def test_another_tokenizer_than_that_of_the_weights_is_a_warning(capsys, tmp_path):
    sizes = {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 256}
    sizes |= {"num_hidden_layers": 4, "vocab_size": 400, "rms_norm_eps": 1e-6, "rope_theta": 5000.0}
    for name, template in (("weights", CHATML), ("same", CHATML), ("other", LLAMA)):
        save_tokenizer(tmp_path / name, template)
        (tmp_path / name / "config.json").write_text(json.dumps(sizes))
    write_weights(tmp_path / "weights")
    start = [*on(shard(Path("a.tar"), *sound())), f"modules.language.pretrained={tmp_path}/weights"]
    for name, warned in (("", False), ("weights", False), ("same", False), ("other", True)):
        _, out, faults = run(capsys, *start, *([f"data.tokenizer={tmp_path / name}"] if name else []))
        assert not faults, (name, faults)
        said = f"warning: data.tokenizer: {tmp_path}/other is not the tokenizer of modules.language.pretrained="
        assert (said in "".join(out.splitlines())) == warned, (name, out)


def test_the_first_sample_is_shown_as_rendered_and_what_is_learned(capsys):
    path = shard(Path("a.tar"), *sound())
    _, out, _ = run(capsys, *on(path))
    assert re.search(r"rendered +\[begin\]\[user\]<image> x 16 .*\[assistant\].+\[end\]", out)
    assert re.search(r"learned +[^\[]+\[end\]", out) and re.search(r"data.chat_template +auto +our own", out)


def test_a_template_that_cannot_be_used_is_a_fault_of_its_key(capsys):
    path = shard(Path("a.tar"), *sound())
    _, _, (fault,) = run(capsys, *on(path, **{"data.chat_template": "chat.jinja"}))
    assert fault.startswith("data.chat_template: is 'chat.jinja', but the tokenizer `bytes`")
    _, _, (fault,) = run(capsys, *on(path, **{"modules.language.placeholder.pad": "x"}))
    assert fault.startswith("modules.language.placeholder: ")


def test_special_tokens_that_stay_text_and_separators_are_counted(saved_qwen, capsys):
    """`check` and `verify` name the tokens; admitted ones are not counted."""
    records = [record(f"<image>\n{text}?") for text in ("<|im_end|>", "<|box_start|>1<|box_end|>", "What")]
    members = [one for at, json in enumerate(records) for one in ((f"{at}.png", image()), (f"{at}.json", json))]
    shard(Path("a.tar"), *members)
    given, plain = [*on("a.tar"), f"data.tokenizer={saved_qwen}"], "special tokens of the tokenizer as plain text"
    code, out, _ = run(capsys, *given)
    assert code == 0 and f"2 of the first 3 samples have {plain}" in out
    assert "(<|box_end|> <|box_start|> <|im_end|>). To read them as tokens, set data.special_tokens_in_text" in out
    assert "3 of the first 3 samples have a line break next to a marker. It is left out" in out
    code, out, _ = run(capsys, *given, "data.special_tokens_in_text=grounding")
    assert code == 0 and f"1 of the first 3 samples has {plain} (<|im_end|>)" in out
    assert main(["shards", "verify", *given, "--workers", "1"]) == 0
    assert f"\n  2 have {plain} (" in capsys.readouterr().out
    code, _, faults = run(capsys, *given, "data.special_tokens_in_text=[nothing]")
    assert code == 1 and "data.special_tokens_in_text: 'nothing' is not a special token of data.tokenizer" in faults[0]


@pytest.fixture
def saved_qwen(tmp_path):
    from transformers import AutoTokenizer

    folder = save_tokenizer(tmp_path / "qwen", QWEN_VL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|box_start|>", "<|box_end|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


def test_samples_are_read_once_the_other_faults_are_corrected(capsys):
    """Reading imports torch. Shards are opened nevertheless."""
    shard(Path("s/a.tar"), *sound(), ("bad.json", record("<image>\nWhere is it?")))
    values = ("background=blue", "max_bad_samples=-1", "shuffle_block=0", "sequence_length=0", "validation_fraction=2")
    _, out, faults = run(capsys, *on("s"), *(f"data.{value}" for value in values))
    assert {f"data.{value.partition('=')[0]}" for value in values} == {fault.partition(":")[0] for fault in faults}
    assert "1 of 1 shard can be read, 5 samples" in out and "note: samples are read when the other faults" in out
    faults = run(capsys, *on("s"))[2]
    assert any("key bad: " in fault for fault in faults)


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

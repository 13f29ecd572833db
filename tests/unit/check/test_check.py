"""`mimo-train check`: what it prints for sound runs, and that it names every fault with its numbers."""

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from mimo_train.check import check
from mimo_train.cli import main
from tests.unit.check.shards import heic, on, picture, record, shard, sound
from tests.unit.configs import load
from tests.unit.data.chat_templates import CHATML, LLAMA, save_tokenizer


def run(capsys, *argv: str) -> tuple[int, str, list[str]]:
    """(exit code, stdout, faults without their `error: `)."""
    code = main(["check", *argv])
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (code == 1) == bool(lines)
    if lines:
        assert lines.pop().endswith("this run cannot start")
    assert all(line.startswith("error: ") for line in lines)
    return code, out, [line.removeprefix("error: ") for line in lines]


def test_a_vision_language_run(capsys, tmp_path):
    code, out, faults = run(capsys, "vlm_digits")
    assert (code, faults) == (0, [])
    for said in (
        "vit_tiny: 3 layers x 64, 4 heads; mlp",
        "gpt_mini: 4 layers x 96, 4 heads",
        "194,240",  # parameters of encoder and projector
        "32 samples",
        "8 samples (train.micro_batch_size 8 x dp of language 1)",
        "4 a step",
        "images 8, language 8",
        "3,072 a step",
        "2 stages, bubble about 20% = (2 - 1) / (4 + 2 - 1)",
        "4 x 4 patches",
        "16 of 96",
        "the digits demo is made on first use",
    ):
        assert said in out
    assert out.splitlines()[-1] == "no faults; start it with: scripts/train_vlm.sh vlm_digits"
    assert list(tmp_path.iterdir()) == []  # the demo is not made here


@pytest.mark.parametrize(
    ("block", "said"),
    [(1, ""), (2, "20 blocks an epoch, about 16 a step"), (30, "less than 4 blocks of 30"), (40, "every epoch is in")],
)
def test_blocks_of_the_order_are_told(capsys, tmp_path, block, said):
    shard(tmp_path / "t" / "a.tar", *sound(40))
    _, out, faults = run(capsys, *on(tmp_path / "t"), f"data.shuffle_block={block}")
    assert not faults and said in out and ("blocks an epoch" in out) == (block > 1)
    _, _, faults = run(capsys, *on(tmp_path / "t"), f"data.shuffle_block={block}", "data.shuffle=false")
    assert len(faults) == (block > 1) and all(f"data.shuffle_block: is {block}" in fault for fault in faults)


def test_a_plain_gpt_run(capsys):
    code, out, _ = run(capsys, "gpt_tiny", "layout=language_pp2")
    assert code == 0
    assert "images" not in out
    assert "language, stage 2 of 2" in out
    assert out.splitlines()[-1] == "no faults; start it with: scripts/train_gpt.sh gpt_tiny layout=language_pp2"


def test_output_that_is_no_terminal_is_plain(capsys):
    _, out, _ = run(capsys, "vlm_digits")
    assert out.isascii()
    assert "\x1b" not in out


def test_samples_as_training_sees_them(capsys):
    shard(Path("s/a.tar"), *sound(3))
    shard(Path("s/b.tar"), *sound(2))
    code, out, _ = run(capsys, *on("s"))
    assert code == 0
    for said in (
        "2 of 2 shards can be read, 5 samples",
        "5 .json, 5 .png",
        "1.0 on average, 1 to 1 a sample",
        "32.0 on average, 32 to 32, of data.sequence_length 96",
        "6.0 on average, 6 to 6",
        "5120.00 (25,600 samples drawn from 5)",
        "note: data.validation_shards is empty: no evaluation",
        "activations of images: for 1.00 pictures a sample",
    ):
        assert said in out


def test_a_demo_that_is_there_is_read_like_other_shards(capsys):
    demo = Path("runs/demo/digits")
    shard(demo / "train" / "train-000000.tar", *sound(3))
    (demo / "demo.json").write_text("{}")
    _, out, _ = run(capsys, "vlm_digits")
    assert "1 of 1 shard can be read, 3 samples" in out
    assert out.count("is made on first use") == 1  # the held-out part


def test_a_demo_is_never_made_over_other_shards(capsys):
    """Not even started: making the demo would replace them."""
    path = shard(Path("mine/train/a.tar"), *sound())
    for given, said in (
        ("other/train", "data.validation_shards is runs/demo/digits/held_out"),
        (f"{path.parent} data.validation_shards=", f"would replace the shards of {path.parent}"),
        (f"{path} data.validation_shards=", f"but data.shards is {path}"),
    ):
        for command in ("check", "train"):
            assert main([command, "vlm_digits", "layout=one_process", *f"data.shards={given}".split()]) == 1
            (fault,) = (line for line in capsys.readouterr().err.splitlines() if "data.demo: " in line)
            assert said in fault and "data.demo=" in fault


@pytest.mark.parametrize(
    ("data", "warned"),
    [
        ("data.demo= data.shards=mine", True),
        ("data.demo= data.shards=mine data.validation_shards=runs/demo/digits/held_out/held_out-000000.tar", True),
        ("data.demo= data.shards=mine data.validation_shards=", False),
        ("data.demo= data.shards=mine data.validation_shards=mine_too", False),
        ("data.demo=", False),
        ("", False),
    ],
)
def test_own_data_that_are_evaluated_on_a_demo_are_a_warning(capsys, data, warned):
    demo = Path("runs/demo/digits")
    for path in (demo / "train/train-000000.tar", demo / "held_out/held_out-000000.tar"):
        shard(path, *sound(3))
    (demo / "demo.json").write_text("{}")
    shard(Path("mine/a.tar"), *sound(3))
    shard(Path("mine_too/a.tar"), *sound(3))
    code, out, _ = run(capsys, "vlm_digits", *data.split())
    assert code == 0
    found = [line for line in out.splitlines() if "is of the demo in" in line]
    assert len(found) == warned
    if warned:
        assert found[0].startswith("warning: data.validation_shards: runs/demo/digits/held_out")
        for words in ("demo in runs/demo/digits,", "data.validation_shards= and data.validation_fraction="):
            assert words in found[0]


def test_members_that_are_not_read_are_named(capsys):
    """A picture that cannot be decoded does not vanish, so that its caption would become a plain text."""
    shard(Path("a.tar"), *sound(), ("0009.avi", b"video"), ("0009.txt", b"A text."))
    code, out, _ = run(capsys, *on("a.tar"))
    assert code == 0
    said = "members .avi (1) are not read: video that is not decoded: convert it, video formats are m4v, mkv, mov"
    assert any(line.startswith(f"warning: data.shards: {said}") for line in out.splitlines())
    for command in ("inspect", "verify"):
        assert main(["shards", command, "a.tar"]) == 0
        assert said in "".join(capsys.readouterr())
    shard(Path("b.tar"), ("a.heic", picture()), ("a.txt", b"A cat."), ("b.JXL", b"II*\0"), ("b.txt", b"A dog."))
    _, _, faults = run(capsys, *on("b.tar"))
    named, budget = faults
    assert "key b: member .jxl (4 bytes) cannot be decoded: convert it, image formats are avif, bmp, gif" in named
    assert "1 of the first 2 samples" in budget


def test_pictures_in_a_sample_count_for_memory(capsys):
    two = [("x.0.png", picture()), ("x.1.png", picture()), ("x.json", record("<image><image>Sum?"))]
    shard(Path("a.tar"), *two, ("y.json", record("No picture?")))
    _, out, _ = run(capsys, *on("a.tar"))
    assert "1.0 on average, 0 to 2 a sample" in out


@pytest.mark.parametrize(
    ("name", "members", "said"),
    [
        ("two", [("k.png", picture()), ("k.json", record("<image><image>?"))], "2 image placeholder(s), but"),
        ("none", [("k.json", record("<image>?"))], "1 image placeholder(s), but the sample has 0"),
        ("lost", [("k.png", picture()), ("k.json", record("What?"))], "0 image placeholder(s), but the sample has 1"),
        ("text", [("k.png", b"no picture"), ("k.json", record("<image>?"))], "10 bytes"),
        ("cut", [("k.png", picture()[:-30]), ("k.json", record("<image>?"))], "cannot decode"),
        ("json", [("k.json", b"{")], "not JSON"),
        ("bare", [("k.png", picture())], "no .json and no .txt member"),
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
    assert fault.startswith("data.shards: ") and "key 'a'" in fault and "pip install 'mimo-train[heic]'" in fault


def test_bad_samples_within_the_budget_are_warnings(capsys):
    path = shard(Path("a.tar"), *sound(), ("k.json", record("<image>?")))
    code, out, _ = run(capsys, *on(path, **{"data.max_bad_samples": "1"}))
    assert code == 0
    assert "warning: data.shards: 1 of the first 5 samples are bad, data.max_bad_samples allows 1" in out
    assert "key k" in out


def test_many_bad_samples_are_named_in_part_and_counted(capsys):
    path = shard(Path("a.tar"), *((f"{at}.json", record("<image>?")) for at in range(9)))
    _, _, faults = run(capsys, *on(path))
    assert len(faults) == 5 + 1
    assert "9 of the first 9 samples of data.shards are bad, 4 more than named above" in faults[-1]


def test_pictures_that_do_not_fit_into_a_sequence(capsys):
    seven = [(f"k.{at}.png", picture()) for at in range(7)] + [("k.json", record("<image>" * 7))]
    path = shard(Path("a.tar"), *sound(), *seven)
    code, _, faults = run(capsys, *on(path))
    assert code == 1
    assert f"{path}, key k: its media alone need 112 tokens, but data.sequence_length is 96" in faults[0]


def test_one_picture_that_does_not_fit_is_a_fault_without_data(capsys):
    code, _, faults = run(capsys, "vlm_digits", "encoder@modules.images.encoder=vit_l14_336")
    assert code == 1
    (fault,) = faults
    assert fault.startswith("data.sequence_length: one picture takes 576 tokens of modules.images (336 x 336 pixels")
    assert "has only 96" in fault


def test_texts_that_are_cut_are_warnings(capsys):
    path = shard(Path("a.tar"), *sound(), ("k.png", picture()), ("k.json", record("<image>" + 200 * "long ")))
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
    assert "32.0 on average" in out
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
    for place, said in (("gone", "no such file or folder"), ("empty", "holds no *.tar file")):
        _, _, faults = run(capsys, *on(good, **{key: place}))
        assert len(faults) == 1
        assert faults[0].startswith(f"{key}: ")
        assert said in faults[0] and place in faults[0]


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


def test_no_shards_at_all(capsys):
    _, _, faults = run(capsys, *on(""))
    assert [fault.split(": ")[0] for fault in faults] == ["data.shards"]


def test_shards_without_samples(capsys):
    path = shard(Path("a.tar"))
    _, _, faults = run(capsys, *on(path))
    assert faults == [f"data.shards: 1 shard of {path} can be read, without any sample"]


@pytest.mark.parametrize(
    ("place", "said"),
    [("/no/such/folder", "no folder"), ("./empty", "there is no tokenizer in"), ("gpt2", "nothing is downloaded")],
)
def test_tokenizers_that_cannot_be_built(place, said, capsys, tmp_path):
    """The rest is checked all the same: the shards are opened, without reading samples."""
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
    assert fault.startswith("data.chat_template: is 'chat.jinja', and the tokenizer `bytes`")
    _, _, (fault,) = run(capsys, *on(path, **{"modules.language.placeholder.pad": "x"}))
    assert fault.startswith("modules.language.placeholder: ")


def test_faults_of_all_kinds_are_shown_at_once(capsys):
    path = shard(Path("a.tar"), ("k.json", record("<image>?")))
    values = {
        "modules.images.layout.dp": "3",
        "train.precision": "fp8",
        "data.validation_shards": "gone",
    }
    code, out, faults = run(capsys, *on(path, **values))
    assert code == 1
    assert [fault.split(": ")[0] for fault in faults] == [
        "modules.images.layout.dp",
        "train.precision",
        "data.shards",
        "data.max_bad_samples",
        "data.validation_shards",
    ]
    assert "at fault" in out
    assert "bubble" not in out


def test_faults_of_composition_are_shown(capsys):
    code, out, faults = run(capsys, "vlm_digits", "train.iter=5", "data.shard=x")
    assert (code, out) == (1, "")
    assert {fault.split(": ")[0] for fault in faults} == {"train.iter", "data.shard"}


def test_a_run_without_a_language_module_is_checked_as_far_as_it_goes(capsys, tmp_path):
    (tmp_path / "blind.yaml").write_text("optim: {decay: square}\n")
    _, _, faults = run(capsys, "blind.yaml")
    assert [fault.split(": ")[0] for fault in faults] == ["modules", "optim.decay"]


def test_freezing_shows_in_the_table(capsys):
    _, out, _ = run(capsys, "vlm_digits", "modules.images.freeze=[encoder]", 'modules.language.freeze=["*.bias"]')
    (images,) = (line for line in out.splitlines() if line.startswith(" images    vit_tiny"))
    assert "frozen: encoder" in images and images.split()[-1] == f"{64 * 96 + 96 + 96 * 96 + 96:,}"
    (language,) = (line for line in out.splitlines() if line.startswith(" language  gpt_mini"))
    assert language.rstrip().endswith("*")
    assert "* patterns of modules.language.freeze (*.bias) are not counted as frozen" in out


def test_a_batch_with_few_microbatches_is_a_warning():
    report = check(load("vlm_digits", "layout=language_pp2", "train.global_batch_size=8"))
    assert report.faults == []
    assert any("67% of the time: 1 microbatch for 3 stages" in warning for warning in report.warnings)
    assert check(load("vlm_digits")).warnings == []


def test_a_warm_up_longer_than_the_run_is_a_warning():
    """Of all modules, or of one. No fault: shipped configs are tried with a few steps."""
    (warning,) = check(load("vlm_digits", "train.iters=10")).warnings
    assert warning.startswith("optim.warmup_iters 50 is longer than train.iters 10: ")
    (warning,) = check(load("vlm_digits", "modules.images.optim.warmup_iters=900")).warnings
    assert warning.startswith("modules.images.optim.warmup_iters 900 is longer than train.iters 800: ")


def test_uneven_memory_is_a_warning():
    report = check(load("vlm_digits", "llm@modules.language.llm=llama_1b"))
    (warning,) = report.warnings
    assert "memory is uneven: rank 1 (language)" in warning and "rank 0 (images)" in warning


def mix_of(*sources: str) -> str:
    return f"data.mix=[{', '.join(f'{{{one}}}' for one in sources)}]"


def test_sources_with_one_name_are_a_fault(capsys):
    for folder in ("a/train", "b/train"):  # as `shards build` names its folders
        shard(Path(folder) / "x.tar", *sound(20))
    (fault,) = run(capsys, *on(""), mix_of("shards: a/train", "shards: b/train"))[2]
    assert fault == "data.mix[1].name: 'train' is the name of data.mix[0] too: give one"


def test_memory_and_length_are_those_of_all_sources_by_their_shares(capsys):
    shard(Path("p/a.tar"), *sound(40))
    shard(Path("t/b.tar"), *((f"{at}.json", record("No picture?")) for at in range(40)))
    mixed = (*on(""), "train.global_batch_size=8", "train.micro_batch_size=2", "train.iters=50")
    _, out, faults = run(capsys, *mixed, mix_of("name: p, shards: p, weight: 3", "name: t, shards: t, weight: 1"))
    assert not faults and "0.75 pictures" in out and "first 40 of p" in out and "first 40 of t" in out
    stop = (*mixed, "data.exhausted=stop", mix_of("shards: p, weight: 1", "shards: t, weight: 0"))
    _, out, faults = run(capsys, *stop)
    assert not faults and "after 5 of the 50 steps of train.iters" in out
    # What a run refuses, check does: a source without a held-out sample, and an end before the first step. A weight of
    # 0 keeps no samples from being held out.
    assert not run(capsys, *stop, "data.validation_fraction=0.3")[2]
    (fault,) = run(capsys, *stop, "data.validation_fraction=0.001")[2]
    assert fault.startswith("data.mix[0].shards: no sample is left") and "holds out none" in fault
    (fault,) = run(capsys, *stop, "train.global_batch_size=64")[2]
    assert fault.startswith("data.exhausted: is stop, and the 40 samples of p do not last for the first step of 64")

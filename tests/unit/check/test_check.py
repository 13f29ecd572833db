"""`mimo-train check`: what it prints for sound runs, and that it names every fault with its numbers."""

import dataclasses
import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from data.demo.make import DEMOS
from data.pipeline import Dataset
from data.tokens import build_tokenizer
from mimo_train.check import check
from mimo_train.cli import main
from mimo_train.config import compose
from mimo_train.config.keys import rules_of
from mimo_train.config.schema import DataConfig
from mimo_train.plan.run import config_faults
from tests.unit.configs import changed, load


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """In a folder of our own, with relative paths, so that equal overrides are composed once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compose, "load", lambda config, overrides=(): load(config, *overrides))


def picture(width: int = 20, height: int = 20) -> bytes:
    raw = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(raw, "PNG")
    return raw.getvalue()


def record(question: str, answer: str = "seven") -> bytes:
    return json.dumps(
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
    ).encode()


def shard(path: Path, *members: tuple[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, raw in members:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return path


def sound(count: int = 4) -> list[tuple[str, bytes]]:
    """Samples of 32 tokens: begin, 2 role markers, 16 of the picture, 6 of text, seven, 2 ends. 6 carry loss."""
    members = []
    for at in range(count):
        members += [(f"{at:04d}.png", picture()), (f"{at:04d}.json", record("<image>\nWhat?"))]
    return members


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


def on(shards, **more: str) -> list[str]:
    """Overrides of a run over `shards`, without a demo."""
    values = {"data.demo": "", "data.validation_shards": "", "data.shards": str(shards), **more}
    return ["vlm_digits", *(f"{key}={value}" for key, value in values.items())]


def test_a_vision_language_run(capsys, tmp_path):
    code, out, faults = run(capsys, "vlm_digits")
    assert (code, faults) == (0, [])
    for said in (
        "vit_tiny: 3 layers x 64, 4 heads; mlp",
        "gpt_mini: 4 layers x 96, 4 heads",
        "194,368",  # parameters of encoder and projector
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


def test_no_shards_at_all(capsys):
    _, _, faults = run(capsys, *on(""))
    assert [fault.split(": ")[0] for fault in faults] == ["data.shards"]


def test_shards_without_samples(capsys):
    path = shard(Path("a.tar"))
    _, _, faults = run(capsys, *on(path))
    assert faults == [f"data.shards: 1 shard of {path} can be read, without any sample"]


@pytest.mark.parametrize(("place", "said"), [("/no/such/folder", "no folder"), ("./empty", "cannot load")])
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


def wrong_values() -> Iterator[tuple[str, Any, str]]:
    """For every key of `vlm_digits` that has rules: values that break them, and what is said of each."""
    cfg = load("vlm_digits")
    names = ("run", "placement", "data", "train", "optim", "checkpoint", "log", "profiling")
    sections = {name: getattr(cfg, name) for name in names} | {"modules.language.llm": cfg.language.llm}
    for name, module in cfg.modules.items():
        parts = {"layout": module.layout, "optim": module.optim, "lora": module.lora, "cache": module.feature_cache}
        sections |= {f"modules.{name}": module} | {
            f"modules.{name}.{'feature_cache' if part == 'cache' else part}": section for part, section in parts.items()
        }
    for prefix, section in sections.items():
        for field in dataclasses.fields(section):
            rules, key = rules_of(field), f"{prefix}.{field.name}"
            if rules.choices:
                yield key, "wrong", "'wrong'"
            if rules.at_least is not None:
                yield key, rules.at_least - 1, f"at least {rules.at_least}"
            if rules.above is not None:
                yield key, rules.above, f"above {rules.above}, is {rules.above}"
            if rules.below is not None:
                yield key, rules.below, f"below {rules.below}, is {rules.below}"


def test_rules_are_many():
    assert len([*wrong_values()]) > 90


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        *wrong_values(),
        ("optim.beta1", 1.0, "at least 0 and below 1, is 1"),
        ("optim.beta2", -0.1, "at least 0 and below 1, is -0.1"),
        ("optim.min_lr", 1.0, "at most optim.lr 0.001, is 1.0"),
        ("data.shards", "", "data.demo=digits needs a folder"),
        ("modules.language.llm.num_attention_heads", 32, "even width, it is 3 (hidden_size 96 / 32 heads)"),
        ("modules.language.llm.num_query_groups", -1, "at least 0 (0: as many as query heads), is -1"),
        ("modules.images.freeze", ["llm"], "'llm' is no part of this module, it has encoder and projector"),
        ("modules.language.freeze", ["encoder"], "'encoder' is no part of this module, it has llm"),
    ],
)
def test_values_out_of_range_are_faults_of_their_key(key, value, said):
    messages = [fault.message for fault in config_faults(changed({key: value})) if fault.key == key]
    assert any(said in message for message in messages), messages


def test_the_demos_of_the_config_are_those_that_can_be_made():
    (field,) = (field for field in dataclasses.fields(DataConfig) if field.name == "demo")
    assert rules_of(field).choices == ("", *DEMOS)


def test_a_run_with_everything_frozen_has_nothing_to_train():
    frozen = {"modules.images.freeze": ["encoder", "projector"], "modules.language.freeze": ["llm"]}
    assert [fault.key for fault in config_faults(changed(frozen))] == ["modules.language.freeze"]
    assert config_faults(changed({"modules.images.freeze": frozen["modules.images.freeze"]})) == []


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
    (warning,) = check(load("vlm_digits", "train.iters=10")).warnings
    assert "optim.warmup_iters 50" in warning and "train.iters 10" in warning


def test_uneven_memory_is_a_warning():
    report = check(load("vlm_digits", "llm@modules.language.llm=llama_1b"))
    (warning,) = report.warnings
    assert "memory is uneven: rank 1 (language)" in warning and "rank 0 (images)" in warning


def saved(run_dir: Path, *overrides: str, fingerprint: str = "", steps=(100, 200)) -> str:
    """A run.dir as training leaves it, with a checkpoint that is not complete; returns the override that names it."""
    for step in steps:
        folder = run_dir / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        record = {"config": compose.to_dict(load("vlm_digits", *overrides)), "data_fingerprint": fingerprint}
        (folder / "run.json").write_text(json.dumps(record))
    (run_dir / "checkpoints" / "step_00000300").mkdir()
    return f"run.dir={run_dir}"


def test_a_run_that_resumes_says_from_where(tmp_path):
    report = check(load("vlm_digits", saved(tmp_path)))
    assert (report.faults, report.warnings) == ([], [])
    assert f"resumes {tmp_path}/checkpoints/step_00000200" in report.notes
    report = check(load("vlm_digits", f"checkpoint.resume={tmp_path}/checkpoints/step_00000100"))
    assert f"resumes {tmp_path}/checkpoints/step_00000100" in report.notes


def test_a_checkpoint_of_another_layout_is_fine(tmp_path):
    report = check(load("vlm_digits", saved(tmp_path, "layout=language_tp2")))
    assert (report.faults, report.warnings) == ([], [])
    (note,) = report.notes
    assert "language tp2; now images one rank, language one rank" in note and "resharded" in note


def test_a_checkpoint_of_another_model_is_a_fault(tmp_path):
    override = saved(tmp_path, "modules.language.llm.hidden_size=64", "modules.language.llm.dropout=0.1")
    (fault,) = check(load("vlm_digits", override)).faults
    assert fault.key == "run.dir"
    assert "(modules.language.llm.hidden_size was 64, is 96)" in fault.message
    assert check(load("vlm_digits", override, "checkpoint.resume=never")).faults == []


def test_a_checkpoint_of_other_modules_is_a_fault(tmp_path):
    override = saved(tmp_path)
    (fault,) = check(load("gpt_tiny", override)).faults
    assert "modules were images, language, are language" in fault.message


def test_learned_positions_tie_a_checkpoint_to_its_sequence_length(tmp_path):
    override = saved(tmp_path, "modules.language.llm.position=learned")
    report = check(load("vlm_digits", override, "modules.language.llm.position=learned", "data.sequence_length=64"))
    assert "data.sequence_length was 96, is 64" in report.faults[0].message
    assert check(load("vlm_digits", saved(tmp_path / "rope"), "data.sequence_length=64")).faults == []


def test_a_checkpoint_of_other_data_is_a_fault(tmp_path):
    path = shard(Path("a.tar"), *sound())
    fingerprint = Dataset([path], tokenizer=build_tokenizer("bytes"), sequence_length=96).fingerprint
    (fault,) = check(load(*on(path), saved(tmp_path / "old", fingerprint="0123"))).faults
    assert fault.key == "data.shards"
    assert f"fingerprint {fingerprint}, was 0123" in fault.message
    assert check(load(*on(path), saved(tmp_path / "same", fingerprint=fingerprint))).faults == []


def test_a_checkpoint_whose_record_is_damaged_is_a_warning(tmp_path):
    override = saved(tmp_path)
    for text in ("{}", '{"config": {"train": {"iter": 5}}, "data_fingerprint": ""}'):
        (tmp_path / "checkpoints" / "step_00000200" / "run.json").write_text(text)
        (warning,) = check(load("vlm_digits", override)).warnings
        assert "step_00000200" in warning and "run.json cannot be read" in warning


def test_a_checkpoint_whose_record_is_no_json_is_a_fault(tmp_path):
    """Training would end on it."""
    override = saved(tmp_path)
    for text in ("{", "[]", ""):
        (tmp_path / "checkpoints" / "step_00000200" / "run.json").write_text(text)
        (fault,) = check(load("vlm_digits", override)).faults
        assert fault.key == "checkpoint.resume"
        assert "step_00000200 is damaged: run.json" in fault.message and "remove this folder" in fault.message


def test_folders_of_checkpoints_must_be_there(tmp_path):
    (tmp_path / "file").touch()
    overrides = [f"run.dir={tmp_path}/file"], [f"checkpoint.resume={tmp_path}/none"]
    keys = [fault.key for given in overrides for fault in check(load("vlm_digits", *given)).faults]
    assert keys == ["run.dir", "checkpoint.resume"]


def test_what_a_module_computes_again_is_one_of_the_runs_choices():
    (found,) = config_faults(load("vlm_digits", "modules.images.recompute=all"))
    assert str(found) == "modules.images.recompute: must be empty or none or selective or full, is 'all'"


def test_gathering_parameters_needs_the_distributed_optimizer():
    overlap = ("optim.overlap_grad_reduce=true", "optim.overlap_param_gather=true")
    assert not config_faults(load("gpt_tiny", *overlap))
    (found,) = config_faults(load("gpt_tiny", *overlap, "optim.distributed_optimizer=false"))
    assert found.key == "optim.overlap_param_gather" and "optim.distributed_optimizer" in found.message

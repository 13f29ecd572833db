"""`mimo-train check`: the output for valid runs, and every fault with its numbers."""

import sys
from pathlib import Path

import pytest

from mimo_train.cli import main
from mimo_train.preflight.check import check
from tests.tables import write_table
from tests.unit.configs import load
from tests.unit.data.helpers import encode_image
from tests.unit.preflight.check.shards import on, record, run, shard, sound

SCRIPTS = Path(__file__).parents[4] / "scripts"


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
    assert out.splitlines()[-1] == f"no faults; start it with: {SCRIPTS}/train_vlm.sh vlm_digits"
    assert list(tmp_path.iterdir()) == []  # check does not make the demo


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


@pytest.mark.parametrize(("block", "times"), [(1, 10), (2, 5), (10, 0)])
def test_reads_of_row_groups_are_told(capsys, tmp_path, monkeypatch, block, times):
    monkeypatch.setattr("data.rows.row_reader.CACHE_BYTES", 1)
    table = {"image": [encode_image(28, 28, "PNG", seed=at) for at in range(35)], "caption": ["x"] * 35}
    write_table(tmp_path / "t" / "a.parquet", table, 10)
    _, out, faults = run(capsys, *on(tmp_path / "t"), f"data.shuffle_block={block}")
    assert not faults and "10 rows, 0.0" in out and "35 .image.png" in out
    said = f"reads about {times} times its size. Set data.shuffle_block=10"
    assert (said in " ".join(out.split())) == (times > 4)


def test_a_plain_gpt_run(capsys):
    code, out, _ = run(capsys, "gpt_tiny", "layout=language_pp2")
    assert code == 0
    assert "images" not in out
    assert "language, stage 2 of 2" in out
    assert out.splitlines()[-1] == f"no faults; start it with: {SCRIPTS}/train_gpt.sh gpt_tiny layout=language_pp2"


def test_the_command_to_start_with_is_a_script_of_a_checkout_or_the_launcher(capsys, monkeypatch, tmp_path):
    """An installed package has no scripts."""
    monkeypatch.chdir(SCRIPTS.parent)
    command = ("gpt_tiny", f"run.dir={tmp_path}")
    assert run(capsys, *command)[1].splitlines()[-1].startswith("no faults; start it with: scripts/train_gpt.sh gpt_t")
    monkeypatch.setattr("mimo_train.preflight.check.shipped_configs", lambda: tmp_path / "configs")
    assert run(capsys, *command)[1].splitlines()[-1].startswith("no faults; start it with: mimo-train launch here gp")


def test_samples_as_training_sees_them(capsys):
    shard(Path("s/a.tar"), *sound(3))
    shard(Path("s/b.tar"), *sound(2))
    code, out, _ = run(capsys, *on("s"))
    assert code == 0
    for said in (
        "2 of 2 shards can be read, 5 samples",
        "5 .json, 5 .png",
        "1.0 on average, 1 to 1 a sample",
        "31.0 on average, 31 to 31, of data.sequence_length 96",
        "6.0 on average, 6 to 6",
        "5120.00 (25,600 samples drawn from 5)",
        "note: data.validation_shards is empty: no evaluation",
        "activations of images: for 1.00 images a sample",
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
    """Such a run does not even start: a demo is made in an empty folder."""
    path = shard(Path("mine/train/a.tar"), *sound())
    for given, said in (
        ("other/train", "data.validation_shards is runs/demo/digits/held_out"),
        (f"{path.parent} data.validation_shards=", f"{path.parent} has shards, but not those of the digits demo"),
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


def test_faults_of_all_kinds_are_shown_at_once(capsys):
    path = Path("a.tar")
    path.write_bytes(shard(path, *sound()).read_bytes()[:5000])
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
        "data.validation_shards",
    ]
    assert "at fault" in out
    assert "bubble" not in out


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


@pytest.mark.parametrize(("device", "is_told"), [("auto", True), ("cpu", False)])
def test_layers_that_transformer_engine_does_not_compute_are_told(capsys, device, is_told):
    sinks = ("modules.language.llm.attention_sinks=true", f"run.device={device}")
    _, out, _ = run(capsys, "gpt_tiny", *sinks)
    note = "all layers of language are torch's, also where Transformer Engine is installed: modules.language.llm."
    assert (f"{note}attention_sinks requires torch's attention" in out) == is_told


def test_a_batch_with_few_microbatches_is_a_warning():
    report = check(load("vlm_digits", "layout=language_pp2", "train.global_batch_size=8"))
    assert report.faults == []
    assert any("67% of the time: 1 microbatch for 3 stages" in warning for warning in report.warnings)
    assert check(load("vlm_digits")).warnings == []


def test_a_warm_up_longer_than_the_run_is_a_warning():
    """Covers the run's warm-up and a module's. It is no fault: shipped configs are tried with a few steps."""
    (warning,) = check(load("vlm_digits", "train.iters=10")).warnings
    assert warning.startswith("optim.warmup_iters 50 is longer than train.iters 10: ")
    (warning,) = check(load("vlm_digits", "modules.images.optim.warmup_iters=900")).warnings
    assert warning.startswith("modules.images.optim.warmup_iters 900 is longer than train.iters 800: ")
    (warning,) = check(load("vlm_digits", "optim.warmup_iters=800")).warnings
    assert warning.startswith("optim.warmup_iters 800 is as long as train.iters 800: ")
    assert not check(load("vlm_digits", "optim.warmup_iters=799")).warnings


def test_uneven_memory_is_a_warning():
    report = check(load("vlm_digits", "llm@modules.language.llm=llama_1b"))
    (warning,) = report.warnings
    assert "memory is uneven: rank 1 (language)" in warning and "rank 0 (images)" in warning


def mix_of(*sources: str) -> str:
    return f"data.mix=[{', '.join(f'{{{one}}}' for one in sources)}]"


def test_sources_with_one_name_are_a_fault(capsys):
    for folder in ("a/train", "b/train"):  # as `shards build` names its folders
        shard(Path(folder) / "x.tar", *sound(20))
    _, out, (fault,) = run(capsys, *on(""), mix_of("shards: a/train", "shards: b/train"))
    assert fault == "data.mix[1].name: 'train' is the name of data.mix[0] too: give one"
    assert "1 of 1 shard can be read, 20 samples" in out


@pytest.mark.parametrize(
    ("weights", "said"),
    [((-1, 1), "data.mix[0].weight: must be at least 0"), ((0, 0), "data.mix: every weight is 0")],
)
def test_weights_without_an_order_are_one_fault(weights, said, capsys):
    for folder in "ab":
        shard(Path(folder) / "x.tar", *sound(20))
    sources = (f"shards: {folder}, weight: {weight}" for folder, weight in zip("ab", weights, strict=True))
    (fault,) = run(capsys, *on(""), mix_of(*sources))[2]
    assert fault.startswith(said)


def test_memory_and_length_are_those_of_all_sources_by_their_shares(capsys):
    shard(Path("p/a.tar"), *sound(40))
    shard(Path("t/b.tar"), *((f"{at}.json", record("No image?")) for at in range(40)))
    mixed = (*on(""), "train.global_batch_size=8", "train.micro_batch_size=2", "train.iters=50")
    _, out, faults = run(capsys, *mixed, mix_of("name: p, shards: p, weight: 3", "name: t, shards: t, weight: 1"))
    assert not faults and "0.75 images" in out and "first 40 of p" in out and "first 40 of t" in out
    stop = (*mixed, "data.exhausted=stop", mix_of("shards: p, weight: 1", "shards: t, weight: 0"))
    _, out, faults = run(capsys, *stop)
    assert not faults and "after 5 of the 50 steps of train.iters" in out
    # `check` reports what a run rejects: a source without a held-out sample, and an end before the first step.
    # Samples of a source with weight 0 can be held out.
    assert not run(capsys, *stop, "data.validation_fraction=0.3")[2]
    (fault,) = run(capsys, *stop, "data.validation_fraction=0.001")[2]
    assert fault.startswith(
        "data.validation_fraction: 0.001 holds out none of the 40 in 1 shard of data.mix[0].shards. Raise it"
    )
    (fault,) = run(capsys, *stop, "train.global_batch_size=64")[2]
    assert fault.startswith("data.exhausted: is stop, and the 40 samples of p do not last for the first step of 64")


def test_code_whose_module_is_not_there_is_a_fault(tmp_path, monkeypatch):
    """Modules are not imported, packages are."""
    for name, source in {"mine.py": "assert False", "broken/__init__.py": "raise RuntimeError('at import')"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.setattr(sys, "path", [*sys.path])
    entries = {
        "nope:No": "there is no such module",
        "nope.inner:No": "No module named 'nope'",
        "broken.inner:Good": "RuntimeError: at import",
        "mine:Good": "",
    }
    for key, form in (("train.callbacks", "[{}]"), ("train.forward_step", "{}")):
        for entry, said in entries.items():
            found = [str(fault) for fault in check(load("gpt_tiny", f"{key}={form.format(entry)}")).faults]
            assert len(found) == bool(said)
            assert all(text.startswith(f"{key}: {entry!r} cannot be used: ") and said in text for text in found)


def test_what_only_the_start_can_show_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr("mimo_train.preflight.check.GPU_DRIVERS", (tmp_path / "none", tmp_path / "none"))
    frozen = ("modules.language.freeze=[nothing*,llm]", "modules.language.freeze_until={also*: 3}")
    report = check(load("vlm_digits", *frozen, "run.device=cuda"))
    for key, pattern in (("freeze", "nothing*"), ("freeze_until", "also*")):
        said = f"modules.language.{key}: whether {pattern} match parameters is seen when the model is built, as with"
        assert any(said in note for note in report.notes)
    (warning,) = report.warnings
    assert warning.startswith("run.device is cuda, but this machine has no GPU driver. The run starts on other")
    monkeypatch.setattr("mimo_train.preflight.check.GPU_DRIVERS", (tmp_path / "none", tmp_path))
    assert check(load("vlm_digits", "run.device=cuda")).warnings == []


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ((), ""),
        (("modules.images.encoder.final_norm=true",), "modules.images.encoder.final_norm is true, and LLaVA reads"),
        (
            ("encoder@modules.images.encoder=dinov2_large",),
            "modules.images.encoder.final_norm is true, and LLaVA reads",
        ),
        (("encoder@modules.images.encoder=dinov2_large", "modules.images.encoder.final_norm=false"), ""),
        (
            ("encoder@modules.images.encoder=siglip2_so400m_naflex",),
            "modules.images.encoder.family is siglip2, and towers of clip, siglip, vit, dinov2 are written: "
            "Siglip2VisionModel requires spatial_shapes, which LLaVA does not pass",
        ),
        (
            ("encoder@modules.images.encoder=dinov3_vitl16", "modules.images.encoder.resize=native"),
            "modules.images.encoder.family is dinov3, and towers of clip, siglip, vit, dinov2 are written: LLaVA reads "
            "no tower with register tokens; the encoder of images is written by our names, since resize is native",
        ),
        (("modules.images.projector.kind=linear",), "modules.images.projector.kind is linear, and LLaVA's projector"),
    ],
)
def test_a_note_has_the_form_of_an_export_and_the_key_that_decides(overrides, why):
    form = f"a directory for each part, since transformers has no model for all: {why}" if why else "one directory, a L"
    (note,) = (note for note in check(load("vlm_digits", *overrides), without_data=True).notes if "an export" in note)
    assert note.startswith(f"an export of this run is {form}")


def test_a_language_model_alone_has_a_form_too():
    for overrides, form in (((), "one directory, of model_type llama"), (("position=learned",), "by our own names: ")):
        settings = [f"modules.language.llm.{each}" for each in overrides]
        (note,) = (note for note in check(load("gpt_tiny", *settings)).notes if "an export" in note)
        assert form in note and all(each.partition("=")[0] in note for each in settings)

"""The command line: what it prints, what it refuses, and what it does not import."""

import errno
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from encoders.transformers_media.spec import MediaImages
from mimo_train.cli import main
from mimo_train.commands import train
from mimo_train.config import compose
from tests.unit.preflight.check.shards import on, shard, sound

HEAVY = ("torch", "megatron", "transformers", "numpy", "hydra", "omegaconf")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No variables of a launcher, and a folder of our own."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trainer(monkeypatch):
    """Replaces `main` of a command; `body` is what it does."""

    def install(body: str) -> list:
        names = {"calls": []}
        exec(f"def main(run):\n    {body}\n", names)
        monkeypatch.setattr(train, "main", names["main"])
        return names["calls"]

    return install


def test_changes_to_the_config_may_stand_behind_options(capsys):
    assert main(["check", "vlm_digits", "train.iters=3", "--without-data", "trian.seed=3"]) == 1
    assert "trian: unknown key" in "".join(capsys.readouterr())
    assert main(["check", "vlm_digits", "--without-data", "~checkpoint", "~trian"]) == 1
    assert "Could not delete from config. 'trian' does not exist" in "".join(capsys.readouterr())
    line = "launch cluster kubernetes vlm_digits train.iters=2 run.dir=/runs/a --nodes 1 --gpus-per-node 2"
    values = "train.iters=3 --set image=here/mimo:1 --set claim=runs --set mount=/runs run.seed=5"
    assert main([*line.split(), *values.split()]) == 0
    (command,) = [pod["command"] for pod in _containers(capsys.readouterr().out)]
    assert command[3:] == ["vlm_digits", "train.iters=2", "run.dir=/runs/a", "train.iters=3", "run.seed=5"]
    for wrong in (["check", "vlm_digits", "--without_data", "a=b"], ["hang", "runs/x", "a=b"], ["check", "a", "--x=1"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
        assert "unrecognized arguments" in capsys.readouterr().err


def _containers(text: str) -> list[dict]:
    *_, job = yaml.safe_load_all(text)
    return job["spec"]["template"]["spec"]["containers"]


def imported(*argv: str) -> tuple[int, set[str], str]:
    """Runs a command in a fresh interpreter: (exit code, heavy packages that it imported, stderr)."""
    code = (
        "import sys\nfrom mimo_train.cli import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as stop:\n    code = stop.code\n"
        f"print('imported:', *[name for name in {HEAVY!r} if name in sys.modules])\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
    return done.returncode, set(done.stdout.splitlines()[-1].split()[1:]), done.stderr


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["train", "--help"], ["generate", "--help"], ["shards", "--help"], []]
)
def test_help_imports_nothing_heavy(argv):
    code, heavy, _ = imported(*argv)
    assert code == (0 if argv else 2)
    assert heavy == set()


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["world", "vlm_digits"], 0),
        (["config", "vlm_digits"], 0),
        (["train", "vlm_digits", "train.iter=5"], 1),
        (["train", "vlm_digits"], 1),
        (["check", "vlm_digits"], 0),
        (["check", *on("a.tar"), "modules.images.layout.dp=3"], 1),
    ],
)
def test_configs_layouts_and_their_faults_import_no_torch(argv, code):
    """Nor does a check of shards before the other faults are corrected: it opens them, and reads no sample."""
    shard(Path("a.tar"), *sound())
    found, heavy, stderr = imported(*argv)
    assert found == code, stderr
    assert not heavy & {"torch", "megatron", "transformers"}


def test_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "mimo_train.cli", "world", "vlm_digits", "train.iter=5"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: train.iter: unknown key. Did you mean iters or skip_iters or log_interval?\n"


@pytest.mark.parametrize(
    ("argv", "world"),
    [
        (["gpt_tiny"], "1"),
        (["vlm_digits"], "2"),
        (["vlm_digits", "layout=one_process"], "1"),
        (["vlm_digits", "layout=images_tp2_language_pp2"], "4"),
    ],
)
def test_world_prints_one_integer(argv, world, capsys):
    assert main(["world", *argv]) == 0
    assert capsys.readouterr().out == f"{world}\n"


def test_world_refuses_a_run_that_cannot_start(capsys):
    assert main(["world", "vlm_digits", "train.precision=fp8", "modules.images.layout.dp=3"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(": ")[:2] for line in err.splitlines()] == [
        ["error", "modules.images.layout.dp"],
        ["error", "train.precision"],
    ]


def test_config_prints_yaml_that_is_the_same_run(capsys):
    assert main(["config", "vlm_digits", "train.iters=7", "layout=language_pp2"]) == 0
    printed = compose.from_dict(yaml.safe_load(capsys.readouterr().out))
    assert printed == compose.load("vlm_digits", ["train.iters=7", "layout=language_pp2"])


def test_a_reader_that_stops_early_is_no_traceback():
    command = f"{sys.executable} -m mimo_train.cli config vlm_digits | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "run:\n"
    assert done.stderr == ""
    assert done.returncode in (0, 141), "it may have written all before the reader closed"


def test_train_hands_config_and_layout_on_and_returns_the_exit_code(trainer):
    calls = trainer("calls.append((run.cfg.train.iters, run.layout.world_size)); return 7")
    assert main(["train", "gpt_tiny", "train.iters=3"]) == 7
    assert calls == [(3, 1)]


def test_a_world_of_another_size_is_a_fault_with_both_numbers(trainer, monkeypatch, capsys):
    calls = trainer("calls.append(1)")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["train", "vlm_digits", "layout=images_tp2_language_pp2"]) == 1
    assert calls == []
    err = capsys.readouterr().err
    for said in ("3 processes started", "needs 4", "images 2 (tp2)", "language 2 (pp2)", "--nproc-per-node 4"):
        assert said in err
    assert "modules.images.layout and modules.language.layout" in err


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1"}, "RANK is '1': give a whole number, at least 0, at most 0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is '2': give a whole number, at least 0, at most 1"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"RANK": "1", "WORLD_SIZE": "y"}, "WORLD_SIZE is 'y'"),
    ],
)
def test_variables_that_no_launcher_sets_are_faults(variables, said, trainer, monkeypatch, capsys):
    """Whatever the rank is: there may be no other process to say it."""
    calls = trainer("calls.append(1)")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "gpt_tiny", "placement.allow_idle=true"]) == 1
    assert calls == []
    assert said in (err := capsys.readouterr().err) and err.startswith("error: ")


@pytest.mark.parametrize("overrides", [["train.iter=5"], ["modules.images.layout.dp=3"], ["layout=one_process"]])
def test_only_rank_0_prints_what_is_wrong_before_the_start(overrides, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    printed = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main(["train", "vlm_digits", *overrides]) == 1
        printed[rank] = capsys.readouterr().err
    assert printed["0"].startswith("error: ")
    assert printed["1"] == ""


def test_a_users_fault_in_training_is_a_line_that_names_the_rank(trainer, monkeypatch, capsys):
    trainer("from mimo_train.config.errors import UserError; raise UserError('data.shards: two things\\nare wrong')")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "vlm_digits"]) == 1
    assert capsys.readouterr().err == "error: rank 1: data.shards: two things\nerror: rank 1: are wrong\n"


@pytest.mark.parametrize(
    "body", ["int('x')", "raise ValueError('x')", "raise KeyError('x')", "assert False", "import json; json.loads('{')"]
)
def test_anything_unexpected_keeps_its_traceback(trainer, body):
    trainer(body)
    with pytest.raises((ValueError, KeyError, AssertionError)):
        main(["train", "gpt_tiny"])


def test_an_interrupt_exits_130(trainer):
    trainer("raise KeyboardInterrupt")
    assert main(["train", "gpt_tiny"]) == 130


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "runs/x"],
        ["generate", "x", "--prompt", "a", "--max-new-tokens", "0"],
        ["generate", "x", "--prompt", "a", "--seed", "-1"],
        ["generate", "x", "--prompt", "a", "--prompt-format", "chatty"],
        ["train"],
        ["bake", "x"],
    ],
)
def test_wrong_usage_exits_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: mimo-train" in capsys.readouterr().err


def test_control_characters_of_a_message_do_not_reach_the_terminal(capsys):
    """Keys of samples and names of files come from data: a terminal would obey them."""
    from data.errors import DataError
    from mimo_train.commands.arguments import print_fault

    print_fault(DataError("sample a\x1b]0;title\x07b \u202e in x.tar"))
    assert capsys.readouterr().err == "error: sample a\\x1b]0;title\\x07b \\u202e in x.tar\n"


def test_the_command_to_try_next_can_be_pasted(tmp_path):
    cfg = compose.load("vlm_digits", [f"run.dir={tmp_path / 'my run'}", "data.demo=", "data.shards=x"])
    run = SimpleNamespace(dir=tmp_path / "my run", cfg=cfg, checkpoints=tmp_path / "my run")
    run.dir.mkdir()
    sample = {"images": [""], "clips": [], "question": "It's?", "truth": "a"}
    (run.dir / "samples.json").write_text(json.dumps([sample]))
    words = shlex.split(train._try_it(run))[1:]
    image = str(run.dir / "held_out.png")
    assert words == ["generate", str(run.dir), "--image", image, "--prompt", "It's?"]
    cfg.modules["images"].encoder = MediaImages()  # of which a report shows no images
    (run.dir / "samples.json").write_text(json.dumps([sample | {"images": []}]))
    assert shlex.split(train._try_it(run))[3:] == ["--image", "FILE", "--prompt", "It's?"]


def test_ranks_that_are_not_there_are_refused_before_anything_is_checked(capsys):
    assert main(["check", "vlm_digits", "--without-data", "--dry-run", "--ranks=9"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: --ranks: '9' is not one of the ranks 0 to ") and not said.out


@pytest.mark.parametrize("command", ["build", "make-demo"])
def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path, capsys, command):
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "texts.jsonl").write_text('{"text": "A text."}')
    out = str(tmp_path / "file" / "out")
    arguments = {"build": [str(tmp_path / "texts.jsonl"), "--to", out], "make-demo": [out]}[command]
    assert main(["shards", command, *arguments]) == 1
    assert str(tmp_path / "file") in (said := capsys.readouterr().err) and said.startswith("error: ")


def test_an_export_on_a_full_disk_has_no_traceback(monkeypatch, capsys):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mimo_train.checkpoint.folders.in_folder", full)
    assert main(["export", "runs/a", "--to", "out"]) == 1
    assert capsys.readouterr().err.startswith("error: [Errno 28] No space left on device")

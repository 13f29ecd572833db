"""`mimo-train checkpoint list|show|verify`: what is there is said, and damage is named with an exit code."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mimo_train.checkpoint import folder_changes, folders
from mimo_train.checkpoint.format.files import COMPLETE, INDEX
from mimo_train.cli import main
from mimo_train.config.errors import UserError
from tests.records import write_record
from tests.unit.checkpoint.format.test_files import written

LAYOUT = {"images": [0, 1, 1, 2, 1, 1, 1, 1], "language": [2, 2, 1, 1, 2, 1, 1, 1]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run with checkpoints of steps 2, 3 (not persistent) and 4, one set aside, and one unfinished."""
    run_dir = tmp_path_factory.mktemp("run")
    first = written(tmp_path_factory.mktemp("first"))
    for step, non_persistent in ((2, False), (3, True), (4, False)):
        folder = folders.step_folder(run_dir, step, non_persistent)
        shutil.copytree(first, folder)
        write_record(folder, {"step": step, "layout": LAYOUT})
    aside = shutil.copytree(folder, folder.with_name("step_00000005"))
    write_record(aside, {"step": 5, "layout": LAYOUT})
    folder_changes.set_aside(aside, UserError())
    folder_changes.begin(run_dir, 6, False, 0)
    return run_dir


@pytest.fixture
def run_dir(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def said(capsys, *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, arguments)])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_all_folders_are_listed(whole, capsys):
    code, out, err = said(capsys, "list", whole)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert [(row[0], row[1]) for row in rows[1:]] == [
        ("2", "persistent"),
        ("3", "non-persistent"),
        ("4", "persistent"),
        ("5", "set"),
        ("?", "unfinished"),
    ]
    assert "images dp2, language tp2 pp2" in out
    assert said(capsys, "list", whole / "checkpoints")[1] == out
    code, out, _ = said(capsys, "list", whole, "--json")
    first = json.loads(out)[0]
    assert first["path"] == str(folders.step_folder(whole, 2)) and first["step"] == 2 and first["damage"] == ""
    assert first["nbytes"] == sum(path.stat().st_size for path in folders.step_folder(whole, 2).glob("*.safetensors"))


def test_the_newest_is_shown_with_its_tensors(whole, capsys):
    code, out, err = said(capsys, "show", whole)
    assert (code, err) == (0, "") and f"{folders.step_folder(whole, 4)}\nstep 4, persistent" in out
    (row,) = [line.split() for line in out.splitlines() if "linear_fc1" in line]
    assert row == ["language.decoder.layers.0.mlp.linear_fc1.weight", "37x29", "F32", "8.58", "kB", "3", "exp_avg"]
    (row,) = [line.split() for line in out.splitlines() if line.startswith("language ")]
    assert row == ["language", "2", "1,501,073", "1,073", "6.01", "MB"]
    one = folders.step_folder(whole, 3, True)
    code, out, _ = said(capsys, "show", one, "--json", "--tensors", "images.*token")
    assert [(tensor["name"], tensor["shape"], tensor["dtype"]) for tensor in json.loads(out)["tensors"]] == [
        ("encoders.images.class_token", [3, 1, 5], "BF16")
    ]
    code, _, err = said(capsys, "show", one, "--tensors", "audio.*")
    assert code == 1 and "--tensors: audio.* fits no tensor of" in err


def test_what_is_whole_verifies(whole, capsys):
    code, out, err = said(capsys, "verify", whole, "--workers", "2")
    assert (code, err) == (0, "") and out.count(": whole, 3 files") == 3 and "3 checkpoints, 0 damaged" in out


DAMAGES = ["rank_00001.safetensors", INDEX, folders.RECORD, COMPLETE]


@pytest.mark.parametrize("file", DAMAGES)
@pytest.mark.parametrize("gone", [False, True], ids=["flipped", "gone"])
def test_damage_is_named(file, gone, run_dir, capsys):
    path = folders.step_folder(run_dir, 4) / file
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.unlink() if gone else path.write_bytes(content)
    code, out, err = said(capsys, "verify", run_dir)
    assert code == 1 and f"error: checkpoint {path.parent} is damaged: " in err and (file in err or file == COMPLETE)
    assert out.count(": whole, ") == 2 and out.count(": damaged, ") == 1
    code, out, _ = said(capsys, "verify", run_dir, "--json")
    assert code == 1 and [bool(one["damage"]) for one in json.loads(out)] == [False, False, True]
    if gone or file != "rank_00001.safetensors":
        code, out, err = said(capsys, "list", run_dir)
        assert code == 1 and f"error: checkpoint {path.parent} is damaged: " in err
    else:
        assert "language embedding.word_embeddings.weight (weight)" in err or "language decoder" in err


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_no_checkpoint_is_an_error(command, tmp_path, capsys):
    for path, what in ((tmp_path, "no checkpoint in"), (tmp_path / "none", "there is no")):
        code, _, err = said(capsys, command, path)
        assert code == 1 and err == f"error: PATH: {what} {path}: give the folder of a run, or of a checkpoint\n"


def test_names_cannot_write_to_a_terminal(run_dir, capsys):
    folder = folders.step_folder(run_dir, 4)
    record = {"step": 4, "layout": {"lan\x1b[2Jguage": [0, 1, 1, 1, 1, 1, 1, 1]}}
    write_record(folder, record)
    _, out, _ = said(capsys, "list", folder)
    assert "\x1b" not in out and r"lan\x1b[2Jguage one rank" in out
    for layout in (7, {"language": [1]}, {"language": ["a"] * 8}):
        write_record(folder, record | {"layout": layout})
        assert said(capsys, "list", folder)[0] == 0


def test_no_torch_is_needed(whole):
    code = (
        f"import sys; from mimo_train.cli import main; main(['checkpoint', 'verify', {str(whole)!r}]); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "3 checkpoints, 0 damaged" in done.stdout, done.stderr

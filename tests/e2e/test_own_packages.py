"""A user's own `data` or `encoders` beside a run: never imported in the place of ours, and said where it would be."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_train import finish, start
from tests.hang import HANG_SECONDS

BIN = Path(sys.executable).parent
CALLBACK = """
from mimo_train.bridge.training import gpt_step
from mimo_train.training.callbacks import Callback
from notes import write

class Doubled:
    def __call__(self, state, data_iterator, model):
        output, loss_function = gpt_step.forward_step(state, data_iterator, model)
        return output, lambda output: twice(loss_function(output))

def twice(result):
    loss, tokens, reports = result
    return 2 * loss, tokens, {name: report * report.new_tensor([2, 1]) for name, report in reports.items()}

class Note(Callback):
    def on_train_end(self, state, exit_code):
        write(state.train_state.step)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A working directory whose modules have the names of ours and must not be imported, beside one that must."""
    (tmp_path / "data").mkdir()
    for name in ("data.py", "data/__init__.py", "encoders.py", "mimo_train.py", "venv.py", "argparse.py"):
        (tmp_path / name).write_text(f"raise RuntimeError('the {name} of the working directory was imported')\n")
    (tmp_path / "my_callbacks.py").write_text(CALLBACK)
    (tmp_path / "notes.py").write_text("def write(step):\n    open('noted', 'w').write(str(step))\n")
    return tmp_path


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )


def test_scripts_import_none_of_them_and_load_callbacks_and_forward_step_from_there(folder):
    """A plain GPT through its script, as far as its report."""
    overrides = (f"run.dir={folder}/run", "train.iters=2", "train.eval_samples=16")
    code = ("train.callbacks=[my_callbacks:Note]", "train.forward_step=my_callbacks:Doubled")
    process = start("train_gpt.sh", "gpt_tiny", *code, *overrides, cwd=folder)
    printed = finish(process)
    assert process.returncode == 0, printed
    said = printed.index("notice: train.callbacks names code that is imported: my_callbacks:Note\n")
    assert said < printed.index("; starting")
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["lm loss"] for line in steps if "lm loss" in line}
    assert [*losses] == [1, 2] and losses[1] > 1.5 * math.log(256)
    (held_out,) = [line["eval/loss"] for line in steps if "eval/loss" in line]
    assert held_out > 1.5 * math.log(256), "evaluation uses it too"
    assert (folder / "run" / "report.html").exists()
    assert (folder / "noted").read_text() == "2"


@pytest.mark.parametrize(
    "command",
    [
        [BIN / "mimo-train"],
        [sys.executable, "-m", "mimo_train.cli"],
        [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "-m", "mimo_train.cli"],
    ],
    ids=["mimo-train", "python -m", "torchrun"],
)
def test_commands_import_none_of_them(folder, command):
    for name in ("mimo_train.py", "argparse.py"):  # only -P helps where Python itself has the folder in front
        (folder / name).unlink()
    result = run(*command, "check", "vlm_digits", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "was imported" not in result.stderr


def foreign(place: Path, name: str) -> Path:
    """Another package of that name in `place`."""
    (place / name).mkdir(parents=True)
    (place / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    return place / name


@pytest.mark.parametrize("name", ["data", "encoders"])
def test_a_foreign_package_on_pythonpath_is_named_with_both_places_and_the_remedy(tmp_path, name):
    found = foreign(tmp_path / "theirs", name)
    result = run(BIN / "mimo-train", "world", "vlm_digits", cwd=tmp_path, PYTHONPATH=f"/nowhere:{found.parent}")
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {name}: Python finds {found} before mimo-train's own /") and f"/{name}: " in line
    assert f"take {found.parent} out of PYTHONPATH or rename {name}; if a package brought it, uninstall that" in line

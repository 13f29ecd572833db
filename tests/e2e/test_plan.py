"""A plan as a user asks for it: the config that it writes is checked and trained."""

import json
import subprocess
import sys
from pathlib import Path

import yaml

from tests.e2e.test_train import digits, finish, lines_of, start  # noqa: F401  # a fixture
from tests.hang import HANG_SECONDS


def mimo_train(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """The command; a plan must need no torch."""
    code = (
        "import sys\nfrom mimo_train.cli import main\ncode = main(sys.argv[1:])\n"
        "assert sys.argv[1] != 'plan' or 'torch' not in sys.modules\nsys.exit(code)"
    )
    command = [sys.executable, "-c", code, *arguments]
    path = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return subprocess.run(command, cwd=cwd, env=path, capture_output=True, text=True, timeout=HANG_SECONDS)


def test_a_written_layout_is_checked_and_trained(digits, tmp_path):  # noqa: F811
    run = ["vlm_digits", "run.dir=run", f"data.shards={digits}/train", f"data.validation_shards={digits}/held_out"]
    run += [
        "data.demo=",
        "train.iters=2",
        "train.eval_samples=8",
        "train.report_samples=0",
        "train.global_batch_size=8",
    ]
    asked = [*run, "modules.language.llm.num_layers=2", "--gpus", "2", "--top", "3"]
    # Of a node with one GPU: the links are slow, and two ranks are worth it all the same.
    planned = mimo_train("plan", *asked, "--tflops", "0.001", "--write", "layout.yaml", "--json", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    proposals = json.loads(planned.stdout)["proposals"]
    assert len(proposals) == 3 and proposals[0]["ranks"] == 2, proposals
    assert [one["step_seconds"] for one in proposals] == sorted(one["step_seconds"] for one in proposals)
    written = yaml.safe_load((tmp_path / "layout.yaml").read_text())
    assert written["train"]["iters"] == 2
    checked = mimo_train("check", "layout.yaml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    world = mimo_train("world", "layout.yaml", cwd=tmp_path)
    assert world.stdout.strip() == "2"
    process = start("train_vlm.sh", "layout.yaml", "run.device=cpu", cwd=tmp_path)
    printed = finish(process)
    assert process.returncode == 0, printed
    assert [line["step"] for line in lines_of(tmp_path / "run") if "lm loss" in line] == [1, 2]
    again = mimo_train("plan", *asked, "--write", "layout.yaml", cwd=tmp_path)
    assert again.returncode == 1 and "--write: layout.yaml is there already" in again.stderr

"""Training as a user starts it: the scripts, several processes, the files of a run, signals and failures."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from data.demo.make import make_demo
from mimo_train.logging.rank_log import Logs
from tests.hang import HANG_SECONDS

REPOSITORY = Path(__file__).resolve().parents[2]
QUICK = (
    "data.demo=",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.eval_samples=16",
    "train.report_samples=4",
    "modules.language.llm.num_layers=2",
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """A small digits demo."""
    return make_demo(tmp_path_factory.mktemp("digits"), train_samples=400, held_out_samples=32, shards=2)


def start(script: str, *arguments: str, cwd: Path) -> subprocess.Popen:
    """Starts one of scripts/ in the environment that runs the tests."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [REPOSITORY / "scripts" / script, *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> str:
    """What it printed, once it has ended; ends its whole session if it does not."""
    try:
        return process.communicate(timeout=HANG_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"still running after {HANG_SECONDS} s:\n{process.communicate()[0][-3000:]}")


def wait_for(event: Callable[[], bool], process: subprocess.Popen) -> None:
    """Until `event()` is true; fails if the process ends before it is."""
    deadline = time.monotonic() + HANG_SECONDS
    while not event():
        if process.poll() is not None or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"what was waited for has not happened:\n{process.communicate()[0][-3000:]}")
        time.sleep(0.05)


def vlm(digits: Path, run_dir: Path, *overrides: str) -> list[str]:
    """Arguments of a quick run on two processes."""
    shards = (f"data.shards={digits}/train", f"data.validation_shards={digits}/held_out")
    return ["vlm_digits", f"run.dir={run_dir}", *shards, *QUICK, *overrides]


def whole_lines(run_dir: Path) -> int:
    """Lines of metrics.jsonl, without one that is being written."""
    return (run_dir / "metrics.jsonl").read_text().count("\n")


def lines_of(run_dir: Path) -> list[dict]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_two_modules_on_two_processes_leave_every_file(digits, tmp_path):
    run_dir = tmp_path / "run"
    process = start("train_vlm.sh", *vlm(digits, run_dir, "train.iters=4", "checkpoint.save_interval=2"), cwd=tmp_path)
    printed = finish(process)
    assert process.returncode == 0, printed
    lines = lines_of(run_dir)
    assert [line["step"] for line in lines if "lm loss" in line] == [1, 2, 3, 4]
    assert {"grad_norm", "learning_rate/images", "learning_rate/language", "tokens_per_second"} <= set(lines[0])
    assert lines[-1]["eval/samples"] == 16 and 0 <= lines[-1]["eval/exact_match"] <= 1
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_00000002", "step_00000004"]
    assert {"config.yaml", "progress.txt", "report.html", "samples.json", "tensorboard"} <= set(os.listdir(run_dir))
    samples = json.loads((run_dir / "samples.json").read_text())
    assert len(samples) == 4 and all({"question", "answer", "truth", "correct"} <= set(sample) for sample in samples)
    assert "Warning" not in printed, "those of libraries are in the log of each rank"
    logged = list(Logs(run_dir))
    assert {line.rank for line in logged if "Warning" in line.text} == {0, 1}
    assert [line.stamp for line in logged] == sorted(line.stamp for line in logged)
    (rank,) = {line.rank for line in logged if line.text.startswith("step ")}
    assert any(line.text.startswith("held-out exact match") and line.rank == rank for line in logged)
    first = f"{run_dir}: images (one rank), language (one rank) on 2 processes; 4 steps of 8 samples of 72 tokens"
    assert printed.startswith(first), printed
    assert "  busiest: images (" in printed or "  busiest: language (" in printed
    assert "held-out exact match" in printed and "report.html" in printed and "mimo-train generate" in printed

    image = tmp_path / "image.png"
    Image.new("RGB", (60, 40), "red").save(image)
    question = ["--image", str(image), "--prompt", "Which digit is red?", "--max-new-tokens", "3"]
    command = [sys.executable, "-m", "mimo_train.cli", "generate", str(run_dir), *question]
    answered = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, cwd=tmp_path)
    assert answered.returncode == 0 and "Warning" not in answered.stderr, answered.stderr


def test_failing_rank_is_named_and_ends_the_others(digits, tmp_path):
    process = start("train_vlm.sh", *vlm(digits, tmp_path / "run", f"data.shards={tmp_path}/nowhere"), cwd=tmp_path)
    printed = finish(process)
    assert process.returncode != 0
    errors = [line for line in printed.splitlines() if line.startswith("error:")]
    assert errors and "data.shards" in errors[0] and "nowhere" in errors[0], printed
    assert "Traceback" not in printed

"""scripts/gpu_check.sh: a rehearsal of every section on the CPU, its sizes for a GPU, and what goes wrong."""

import json
import os
import re
import signal
import subprocess
import time

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import runs, sections, sizes, table
from benchmarks.gpu.jobs import Jobs
from tests.e2e.fake_python import REPOSITORY, Checkout, pid_runs
from tests.hang import HANG_SECONDS


def test_a_rehearsal_on_the_cpu_runs_every_section_and_writes_a_record(tmp_path, capsys):
    record, numbers = tmp_path / "gpu.md", tmp_path / "gpu.json"
    files = ["--to", str(record), "--json", str(numbers)]
    code = command.main(["--tiny", "--seconds", str(HANG_SECONDS), *files])
    printed = capsys.readouterr().out
    assert code == 0, printed
    rows: dict[str, list[dict]] = {}
    for row in json.loads(numbers.read_text())["rows"]:
        rows.setdefault(row["section"], []).append(row)
    assert list(rows) == list(sections.SECTIONS)
    assert any((row["what"], row["result"]) == ("megatron-core", "0.19.2") for row in rows["device"])
    assert all(row["values"]["median"] > 0 for row in rows["ceiling"])
    exact, half, engine, compiled = rows["losses"]
    assert exact["values"]["losses"] == exact["values"]["norms"] == 0
    assert half["values"]["losses"] > 0 and engine["state"] == "skipped"
    assert compiled["values"]["graphs"] > 0 and compiled["values"]["norms"] < 1e-6
    assert re.search(r"[1-9]\d* passed, 0 failed", rows["tests"][0]["result"])
    filled, packed = (row["values"] for row in rows["steps"])
    assert filled["tokens_per_second"] > filled["samples_per_second"] > 0 and packed["step_seconds"] > 0
    assert filled["estimate"] > 0 and 0 <= filled["data_wait"] < 1 and len(filled["kernels"]) == 10
    assert sum("aten::" in row["result"] for row in rows["kernels"]) >= 5
    (turns,) = (row["values"] for row in rows["transformers"])
    assert set(turns["seconds"]) == {"transformers", "mimo-train"} and turns["ratio"]["median"] > 0
    plain, ratio = (row["values"] for row in rows["compiled"])
    assert plain == filled, "not measured again"
    assert ratio["ratio"] == ratio["samples_per_second"] / filled["samples_per_second"]
    assert [row["values"]["steps"] for row in rows["variants"]] == [2] * 4 and "ratio" in rows["variants"][-1]["values"]
    text = record.read_text()
    for part in ("**What**", "**Machine**", "**Software**", "**Command**, once", "**Date**", "**Commit**"):
        assert part in text, part
    assert table.FORMULA in text and "scripts/gpu_check.sh --tiny" in text and "| variants | " in text
    assert str(REPOSITORY) not in text


def test_every_model_can_be_run_on_a_gpu():
    """Their configs have no fault; a smaller candidate needs less memory; fp8 keeps copies. Compiled layers are counted
    without the fused gates of Megatron-Core."""
    for model in sizes.GPU.models:
        for shape in (sizes.GPU.filled, sizes.GPU.packed, sizes.GPU.padded):
            common = [*sizes.COMMON, *model.changes, *shape.changes]
            candidates = [[*common, *changes] for changes in shape.candidates.values()]
            changed = [[*candidates[0], change] for change in ("train.fp8=tensorwise", "train.compile=layers")]
            *estimates, fp8, compiled = runs.estimates(
                config=sections.CONFIG, candidates=[*candidates, *changed], of_device="cuda"
            )
            assert estimates == sorted(set(estimates), reverse=True)
            assert estimates[-1] / 2**30 < sections.ROOM * 139, f"{model.name} fits a device of 139 GiB"
            assert min(fp8, compiled) > estimates[0]


def raise_error() -> None:
    print("before the end")
    raise RuntimeError("broken on purpose")


def die() -> None:
    print("its last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(*, pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    with open(f"{pid_file}.part", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(f"{pid_file}.part", pid_file)
    time.sleep(1000)


def test_a_job_that_goes_wrong_is_reported_and_leaves_nothing(tmp_path):
    with Jobs(HANG_SECONDS) as jobs:
        failed = jobs.run(raise_error, HANG_SECONDS)
        assert failed.state == "failed" and failed.text.endswith("RuntimeError: broken on purpose")
        died = jobs.run(die, HANG_SECONDS)
        assert died.state == "failed" and died.text == "its last words\nended by SIGKILL"
        row = table.row("a job", died)
        assert table.as_text("section", row, first=True).splitlines()[-1].strip() == "| its last words"
        ended = jobs.run(hang, 5, pid_file=str(tmp_path / "pids"))
        assert (ended.state, ended.text) == ("ended", "after 5 s")
        processes = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert not any(map(pid_runs, processes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_device_the_versions_are_printed_and_the_rest_is_skipped(capsys):
    assert command.main(["ceiling", "device"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"torch +{re.escape(torch.__version__)}", printed)
    assert re.search(r"^ceiling +ceiling +skipped: no CUDA device$", printed, re.MULTILINE)


def test_a_section_without_time_is_ended_and_the_exit_code_says_so(capsys):
    assert command.main(["--tiny", "--seconds", "0", "ceiling"]) == 1
    assert "ENDED: not run: the 0 s for all sections are over" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lossess"], "no section lossess: choose from device, ceiling, losses"),
        (["--to", "present.md"], "present.md exists, and a record is never changed"),
        (["--json", "nowhere/gpu.json"], "the folder nowhere does not exist"),
    ],
)
def test_wrong_arguments_are_errors(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "present.md").touch()
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_script_starts_it_in_the_environment(tmp_path):
    checkout = Checkout(tmp_path, "flock")
    checkout.program("python3")
    result = checkout.run("scripts/gpu_check.sh device")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"PYTHONPATH={checkout.root} -P -m benchmarks.gpu device\n"


def test_every_section_and_its_goal_is_in_the_docs():
    page = (REPOSITORY / "docs" / "performance.md").read_text()
    for name, section in sections.SECTIONS.items():
        assert f"| `{name}` | {section.title} | {section.goal} |".replace("|  |", "| |") in page

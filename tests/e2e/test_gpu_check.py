"""scripts/gpu_check.sh as a whole: a rehearsal on the CPU, which runs every check in small, and its refusals."""

import re

import pytest
import torch

from tests.e2e.fake_python import REPOSITORY, Checkout
from tests.e2e.test_train import finish, start


def test_a_rehearsal_on_the_cpu_runs_every_check_and_writes_a_record(tmp_path):
    process = start("gpu_check.sh", "--device", "cpu", "--to", "record.md", cwd=tmp_path)
    printed = finish(process)
    assert process.returncode == 0, printed
    rows, name = {}, ""
    for row in printed.splitlines():
        name = row[:9].strip() or name
        if row[10:11].strip():  # else a line goes on
            rows.setdefault(name, []).append(row[10:])
    assert any(row.startswith("megatron-core") and "0.19.2" in row for row in rows["device"])
    assert re.match(r"bf16 128 x 128 x 128 +[0-9.e-]+ TFLOP/s", rows["matmul"][0])
    exact = [row for row in rows["losses"] if re.search("on cpu, fp32(, torch| )", row)]
    assert len(exact) == 2 and all("0.0e+00 of losses, 0.0e+00 of gradient" in row for row in exact), printed
    (compiled,) = (row for row in rows["losses"] if "layers compiled" in row)
    assert all(float(number) < 1e-6 for number in re.findall(r"(\S+) of (?:losses|gradient norms)", compiled)), printed
    assert re.search(r"[1-9]\s+graphs\s+compiled", printed)
    (half,) = (row for row in rows["losses"] if "bf16, torch layers" in row)
    assert "0.0e+00" not in half
    assert "ms a step" in rows["step"][0] and "tokens/s" in rows["step"][0]
    assert sum("aten::" in row or "autograd" in row.lower() for row in rows["kernels"]) >= 5
    assert "0 passed, 0 failed, 1 skipped" in rows["tests"][0] or torch.cuda.is_available()
    assert re.search(r"^lines: \d+ ok, \d+ skipped, 0 failed, 0 ended; \d+ s$", printed, re.MULTILINE)

    record = (tmp_path / "record.md").read_text()
    for part in ("**What**", "**Machine**", "**Software**", "**Command**, once", "**Date**", "**Commit**"):
        assert part in record, part
    assert "scripts/gpu_check.sh --device cpu --to record.md" in record
    assert str(REPOSITORY) not in record
    assert len([row for row in record.splitlines() if row.startswith("| losses |")]) == len(rows["losses"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_without_a_device_the_versions_are_there_and_the_rest_says_so(tmp_path):
    process = start("gpu_check.sh", "matmul", "device", cwd=tmp_path)
    printed = finish(process)
    assert process.returncode == 0, printed
    assert re.search(r"^device +driver", printed, re.MULTILINE)
    assert re.search(rf"torch +{re.escape(torch.__version__)}", printed)
    assert re.search(r"^matmul +matmul +skipped: no CUDA device$", printed, re.MULTILINE)
    assert not re.search("^losses", printed, re.MULTILINE)


def test_a_check_that_takes_too_long_is_ended_and_the_exit_code_says_so(tmp_path):
    process = start("gpu_check.sh", "--device", "cpu", "--seconds", "0", "matmul", cwd=tmp_path)
    printed = finish(process)
    assert process.returncode == 1, printed
    assert "ENDED: not run: the 0 s for all checks are over" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("lossess",), "no check lossess: there are device, matmul, losses, step, kernels, tests"),
        (("--to", "there.md"), "there.md exists, and a record is never changed"),
        (("--to", "nowhere/record.md"), "there is no folder nowhere"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(tmp_path, arguments, words):
    (tmp_path / "there.md").touch()
    process = start("gpu_check.sh", *arguments, cwd=tmp_path)
    printed = finish(process)
    assert process.returncode == 2 and words in " ".join(printed.split()), printed


def test_without_an_environment_an_interpreter_with_torch_is_used(tmp_path):
    checkout = Checkout(tmp_path, "flock")
    checkout.program("python3")
    result = checkout.run("scripts/gpu_check.sh device", FAKE_INSTALL_FAILS="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"PYTHONPATH={checkout.root} -P -m benchmarks.gpu_check device\n"
    assert "checking with python3" in result.stderr


def test_without_python_nothing_is_checked(tmp_path):
    result = Checkout(tmp_path).run("scripts/gpu_check.sh")
    assert result.returncode == 1
    assert "no Python 3.12 with torch" in result.stderr.splitlines()[-1]

"""Jobs that need torch alone: versions, matmuls; and tests/gpu."""

import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.jobs import NO_TF32, ROOT

PACKAGES = ("megatron-core", "transformer-engine", "flash-attn", "flash-linear-attention", "transformers")
"""Those whose versions matter for speed."""


def versions(*, device: str) -> dict[str, Any]:
    """Versions of the hardware and the software; None if something is absent."""
    import torch

    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "python": platform.python_version(),
        "cpu": f"{os.cpu_count()} cores, {_cpu()}",
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "driver": _driver(),
        "gpus": [_gpu(index) for index in gpus],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpus else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _gpu(index: int) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_properties(index)
    return {"name": gpu.name, "memory": gpu.total_memory / 2**30, "capability": (gpu.major, gpu.minor)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0].strip() if answer else None


def matmul(*, device: str, size: int, repeats: int) -> dict[str, Any]:
    """TFLOP/s of a matmul of two bf16 matrices of random numbers, the median of `repeats`; zeros would run faster."""
    import torch

    from mimo_train.logging.throughput import peak_tflops

    torch.manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=torch.bfloat16)
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return _rates(lambda: torch.matmul(a, b, out=out), size, device, repeats) | {"peak": peak_tflops(name)}


def fp8_matmul(*, device: str, size: int, repeats: int) -> dict[str, Any]:
    """TFLOP/s of a matmul of two fp8 matrices of random numbers, each with one scale, summed into bf16."""
    import torch

    torch.manual_seed(0)
    # Kernels of fp8 need the second matrix in column-major order.
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device=device)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": device == "cuda"}
    return _rates(lambda: torch._scaled_mm(a, b.t(), scale, scale, **options), size, device, repeats)


def _rates(call: Callable[[], Any], size: int, device: str, repeats: int) -> dict[str, float]:
    """TFLOP/s of a call that multiplies two square matrices: the median of `repeats`, the lowest and the highest."""
    seconds = sorted([_seconds_of(call, device) for _ in range(repeats + 3)][3:])  # the first three warm up
    values = (2 * size**3 / each * 1e-12 for each in (statistics.median(seconds), seconds[-1], seconds[0]))
    return {"size": size, **dict(zip(("median", "lowest", "highest"), values, strict=True))}


def _seconds_of(call: Callable, device: str) -> float:
    import torch

    if device != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000


def run_tests(*, tests: list[str]) -> dict[str, Any]:
    """Run tests with pytest: how many passed and were skipped, and (name, message, last lines) of each that failed."""
    report = Path(tempfile.mkdtemp()) / "tests.xml"
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    environment = {name: value for name, value in os.environ.items() if name not in NO_TF32}
    code = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
    if not report.exists():
        raise RuntimeError(f"pytest ended with exit code {code} without a report")
    cases = list(ElementTree.parse(report).iter("testcase"))
    faults = [(case.get("name", ""), case.find(kind)) for case in cases for kind in ("failure", "error")]
    failed = [(name, fault) for name, fault in faults if fault is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "skipped": skipped,
        "failed": [(name, (fault.get("message") or "").split("\n")[0][:200], _cause(fault)) for name, fault in failed],
    }


def _cause(fault: ElementTree.Element) -> str:
    lines = [text for text in (fault.text or "").splitlines() if re.match(r"E  |\S+:\d+:", text)]
    return "\n".join(lines[-12:])

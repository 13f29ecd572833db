"""What the checks run: functions of numbers and names that return numbers and names, each in its own process."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import Missing

NEEDS = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "hydra-core": "hydra",
    "scikit-learn": "sklearn",
    "transformer-engine": "transformer_engine",
    "pytest": "pytest",
    "transformers": "transformers",
}
"""Package -> the module that it brings."""


def require(*packages: str) -> None:
    """
    Raises:
        Missing: packages are not installed; named all at once.
    """
    missing = [name for name in packages if not _found(NEEDS[name])]
    if missing:
        raise Missing(f"not installed: {', '.join(missing)}")


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def versions() -> dict[str, Any]:
    """Of the machine and the software; what is not there is None."""
    found = {
        "python": platform.python_version(),
        "cpu": f"{os.cpu_count()} cores, {_cpu()}",
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "driver": _driver(),
        "gpus": [],
        "torch": None,
    }
    found["packages"] = {name: _version(name) for name in ("megatron-core", "transformer-engine", "transformers")}
    if not _found("torch"):
        return found
    import torch

    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    try:
        if torch.cuda.is_available():
            found["gpus"] = [_gpu(index) for index in range(torch.cuda.device_count())]
            found["cudnn"] = torch.backends.cudnn.version()
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except RuntimeError as error:  # a driver that is too old, say
        found["fault"] = str(error).strip().splitlines()[0]
    return found


def _gpu(index: int) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_properties(index)
    return {"name": gpu.name, "memory": gpu.total_memory / 2**30, "capability": f"{gpu.major}.{gpu.minor}"}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        # On the path without being installed, or not there.
        return "on the path, not installed" if package in NEEDS and _found(NEEDS[package]) else None


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
    """TFLOP/s of a product of two bf16 matrices of random numbers, the median of `repeats`; zeros would run faster."""
    require("torch")
    import torch

    from mimo_train.logging.throughput import peak_tflops

    torch.manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=torch.bfloat16)
    found = rates(lambda: torch.matmul(a, b, out=out), 2 * size**3, device, repeats)
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return {"size": size, **found, "peak": peak_tflops(name)}


def rates(call: Callable, operations: int, device: str, repeats: int) -> dict[str, float]:
    """TFLOP/s of a call that makes so many floating point operations: the median of `repeats`, lowest and highest."""
    seconds = sorted([_seconds_of(call, device) for _ in range(repeats + 3)][3:])  # the first three warm up
    values = (operations / one * 1e-12 for one in (statistics.median(seconds), seconds[-1], seconds[0]))
    return dict(zip(("median", "lowest", "highest"), values, strict=True))


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

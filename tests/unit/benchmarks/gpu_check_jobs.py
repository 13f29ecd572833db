"""Jobs that go wrong in every way that a job of scripts/gpu_check.sh can."""

import os
import signal
import subprocess
import sys
import time

from benchmarks.gpu_check import Missing


def add(*, one: int, other: int) -> int:
    """What a job is given and gives back."""
    return one + other


def has_torch(**_any) -> list[bool]:
    """Whether the process had imported torch before, and may use CUDA."""
    return ["torch" in sys.modules, "torch" not in sys.modules or not sys.modules["torch"].cuda._is_in_bad_fork()]


def boom(**_any) -> None:
    """Raises."""
    print("before the end")
    raise RuntimeError("broken on purpose")


def miss(**_any) -> None:
    """Lacks something."""
    raise Missing("not installed: nothing-like-it")


def die(**_any) -> None:
    """Is ended by a signal, as by the driver or for its memory."""
    print("its last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(*, pid_file: str, **_any) -> None:
    """Never ends, and has a child that never does."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with open(pid_file, "w") as file:
        file.write(f"{os.getpid()} {child.pid}.")
    print("waits for nothing", flush=True)
    time.sleep(1000)

"""Processor time and wall time from the command to the end of the first step, on the CPU.

    python -m benchmarks.startup [--processes 1 2 4] [--blocks 5]

Processor time is that of all processes: the command's, the launcher's, the ranks'.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from data.demo.make import make_demo
from mimo_train.flight.read import descendants

LAYOUTS = {1: "one_process", 2: "two_processes", 4: "images_dp2_language_dp2"}


def main() -> None:
    """Print a table: medians, least and most of the blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    parser.add_argument("--blocks", type=int, default=5)
    args = parser.parse_args()
    times: dict[int, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        shards = make_demo(Path(folder, "digits"), train_samples=480, held_out_samples=8, shards=2)
        for block in range(args.blocks):
            for processes in args.processes:
                run = Path(folder, f"{block}_{processes}")
                times.setdefault(processes, []).append(first_step(processes, run, shards))
    print("| processes | s of processor time | s of wall time |\n|---|---|---|")
    for processes, pairs in sorted(times.items()):
        columns = (
            f"{statistics.median(column):.1f} ({min(column):.1f} to {max(column):.1f})"
            for column in zip(*pairs, strict=True)
        )
        print(f"| {processes} | {' | '.join(columns)} |")


def first_step(processes: int, run: Path, shards: Path) -> tuple[float, float]:
    """Seconds of processor time of all processes, and of wall time, until the log has the first step."""
    overrides = ["run.device=cpu", f"layout={LAYOUTS[processes]}", f"run.dir={run}", f"data.shards={shards}/train"]
    overrides += ["data.validation_shards=", "data.demo="]
    log, began = run / "metrics.jsonl", time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "mimo_train.cli", "launch", "here", "vlm_digits", *overrides],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MIMO_GRACE_SECONDS": "5"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as launcher:
        while not (log.exists() and '"step":1,' in log.read_text()):
            if launcher.poll() is not None:
                raise RuntimeError(f"the run has ended with code {launcher.returncode}")
            time.sleep(0.02)
        wall = time.monotonic() - began
        seconds = sum(map(processor_seconds, [launcher.pid, *descendants(launcher.pid)]))
        launcher.terminate()
    return seconds, wall


def processor_seconds(pid: int) -> float:
    """Of a process and those of its children that have ended; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()

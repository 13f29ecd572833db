"""What the flight recorder costs: the ratio of the seconds of a step with it and without it, on the same objects.

    OMP_NUM_THREADS=1 python benchmarks/flight_recorder.py                                  # one process
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/flight_recorder.py             # a module on each
    ... benchmarks/flight_recorder.py --pairs 40 --steps 6 train.micro_batch_size=4         # any key=value

Blocks of a few steps take turns, so that a machine that becomes slower is slower for both. Without it, the recorder's
methods do nothing, and its thread goes on: two heartbeats a second are part of both. Given are the median over pairs of
neighbouring blocks of the ratio of their processor time (the main thread's, in which waits do not count) and of their
wall time, and, since the difference is below what a busy machine resolves, the bound: calls of a step times the time of
a call, measured on the same recorder, over the seconds of a step.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimo_train.config.compose import load
from mimo_train.flight.recorder import RECORDER
from mimo_train.launch.processes import started_run
from mimo_train.launch.rank_monitor import watched

CALLS = ("enter", "leave", "at", "issue", "wait", "begin_step")
LEFT_OUT = 1
"""Steps at the start of a block, in which caches hold the other kind."""


def silenced() -> None:
    """The recorder's methods do nothing."""
    for name in CALLS:
        setattr(RECORDER, name, (lambda *_: 1) if name == "issue" else lambda *_: None)


def restored() -> None:
    """They record again."""
    for name in CALLS:
        delattr(RECORDER, name)


def counted(step) -> Counter:
    """Calls of one step, by method."""
    calls: Counter = Counter()
    for name in CALLS:
        method = getattr(RECORDER, name)

        def call(*arguments, method=method, name=name):
            calls[name] += 1
            return method(*arguments)

        setattr(RECORDER, name, call)
    step()
    restored()
    return calls


def seconds_of_calls() -> dict[str, float]:
    """Processor time of a call, by method; the least of some repeats."""
    channel = RECORDER.channel(1, -1, 0)
    bodies = {
        "enter": lambda: (RECORDER.enter("reduce"), RECORDER.leave()),  # with its end
        "at": lambda: RECORDER.at("images->language", 1, 0),
        "issue": lambda: RECORDER.issue(channel, 3, 16),
        "wait": lambda: (RECORDER.wait(channel, 3, 1), RECORDER.leave()),
    }
    found = {}
    for name, body in bodies.items():
        repeats = []
        for _ in range(7):
            start = time.thread_time()
            for _ in range(5000):
                body()
            repeats.append((time.thread_time() - start) / 5000)
        found[name] = min(repeats)
    return found


def main() -> None:
    """Measure on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    world = os.environ.get("WORLD_SIZE", "1")
    layout = "layout=two_processes" if world == "2" else "layout=one_process"
    steps = 2 * args.pairs * args.steps + 20
    with tempfile.TemporaryDirectory(prefix="flight-") as folder:
        place = os.environ.get("MIMO_BENCHMARK_DIR", folder)
        fixed = (layout, f"run.dir={place}/run", f"train.iters={steps}", "checkpoint.save_interval=0")
        cfg = load("vlm_digits", (*fixed, "data.validation_shards=", *args.overrides))
        with watched(started_run(cfg)):
            _measure(cfg, args.pairs, args.steps)


def _measure(cfg, pairs: int, steps: int) -> None:
    import torch.distributed as dist

    from benchmarks.stepped_run import SteppedRun

    run = SteppedRun(cfg)
    for _ in range(5):
        run.step()
    wall, processor, own = [], [], []
    for pair in range(pairs):
        times = {}
        for kind in (0, 1) if pair % 2 else (1, 0):
            if not kind:
                silenced()
            for number in range(steps):
                if number == LEFT_OUT:
                    start = time.perf_counter(), time.thread_time()
                run.step()
            times[kind] = time.perf_counter() - start[0], time.thread_time() - start[1]
            if not kind:
                restored()
        wall.append(times[1][0] / times[0][0])
        processor.append(times[1][1] / times[0][1])
        own.append(times[0][1] / (steps - LEFT_OUT))
    calls, cost = counted(run.step), seconds_of_calls()
    bound = sum(calls[name] * seconds for name, seconds in cost.items())
    if dist.get_rank() == 0:
        print(f"{pairs} pairs of blocks of {steps} steps, the first {LEFT_OUT} left out; {dist.get_world_size()} ranks")
        print(f"calls of a step: {dict(calls)}")
        print("microseconds of a call: " + ", ".join(f"{name} {1e6 * one:.2f}" for name, one in cost.items()))
        step = statistics.median(own)
        print(f"a step without it: {1e3 * step:.1f} ms of processor time; calls x time: {1e6 * bound:.0f} us")
        print(f"bound of the ratio: {1 + bound / step:.5f}")
        medians = f"processor {statistics.median(processor):.4f}, wall {statistics.median(wall):.4f}"
        print(f"measured ratio, median: {medians}")
    run.close()


if __name__ == "__main__":
    main()

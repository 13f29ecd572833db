"""Seconds and bytes of optimizer steps.

    OMP_NUM_THREADS=1 python benchmarks/optimizers.py [--device cuda] [--width 1024] [--layers 8] [--rounds 10]

Steps of each optimizer on the matrices of layers (queries, keys and values; output; gate and up; down), one optimizer
after the other in every round. Prints the bytes of states for each parameter on the device and on the host, the median
milliseconds of a step (processor time on the CPU), its ratio to AdamW's in the same round (median, least and most), and
on CUDA the most bytes for each parameter that a step allocates. Matrices are fp32; those that Muon iterates are bf16 on
CUDA, else fp32.
"""

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch

from mimo_train.optim.group_optimizer import GroupOptimizer
from mimo_train.optim.shards import Shard

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw bf16": {"moments": "bf16"},
    "adamw 8bit": {"moments": "8bit"},
    "adamw ema": {"ema": 0.999},
    "adamw offload": {"offload": True},
    "lion": {"algorithm": "lion"},
    "adafactor": {"algorithm": "adafactor"},
    "muon": {"algorithm": "muon", "momentum": 0.95},
}
"""Settings of the parameter group by name; the first one is the one to compare with."""

_ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


class Case:
    """An optimizer with its own weights."""

    def __init__(self, settings: dict[str, Any], shapes: list[tuple[int, int]], device: str):
        self.weights = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
        self.optimizer = GroupOptimizer([{"params": self.weights, **settings}], lr=1e-4, weight_decay=0.1)
        dtype, shards = torch.bfloat16 if device == "cuda" else torch.float32, dict[torch.Tensor, Shard]()
        for weight in self.weights:
            whole: Any = torch.nn.Parameter(torch.empty(weight.shape, dtype=dtype, device=device))
            shards[weight] = Shard(whole, ((0, weight.numel()),), 0, None, _ALONE)  # type: ignore[arg-type]
        self.optimizer.attach(shards, [list(shards.values())])

    def step(self, gradients: list[torch.Tensor]) -> tuple[float, int]:
        """Return (seconds, bytes allocated meanwhile on CUDA) of a step."""
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        before = _allocated()
        clock = time.perf_counter if self.weights[0].is_cuda else time.process_time
        start = clock()
        self.optimizer.step()
        most = _allocated(most=True)
        return clock() - start, most - before

    def state_bytes(self) -> tuple[int, int]:
        """Return the bytes of states (on the device of the weights, in host memory by `optim.offload`)."""
        size = sum(value.nbytes for state in self.optimizer.state.values() for value in state.values())
        return (0, size) if self.optimizer.param_groups[0].get("offload") else (size, 0)


def _allocated(*, most: bool = False) -> int:
    """Wait for the device, and return its allocated bytes, or the most since the last call; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    size = torch.cuda.max_memory_allocated() if most else torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return size


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    width, inner = args.width, args.width * 8 // 3
    shapes = [(3 * width, width), (width, width), (2 * inner, width), (width, inner)] * args.layers
    parameters = sum(rows * columns for rows, columns in shapes)
    torch.manual_seed(0)
    cases = {name: Case(settings, shapes, args.device) for name, settings in KINDS.items()}
    gradients = [torch.randn(shape, device=args.device) for shape in shapes]
    steps: dict[str, list[tuple[float, int]]] = {name: [] for name in cases}
    for _ in range(args.rounds + 1):
        for name, case in cases.items():
            steps[name].append(case.step(gradients))
    first = next(iter(cases))
    print(f"{parameters:,} parameters, {args.device}")
    print("| optimizer | bytes, device | bytes, host | ms a step | of AdamW | more bytes in a step |")
    print("|---|---|---|---|---|---|")
    for name, case in cases.items():
        timed = [seconds for seconds, _ in steps[name][1:]]
        ratios = [seconds / base for seconds, (base, _) in zip(timed, steps[first][1:], strict=True)]
        device, host = (size / parameters for size in case.state_bytes())
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        more = f"{max(size for _, size in steps[name][1:]) / parameters:.2f}" if args.device == "cuda" else "-"
        print(f"| {name} | {device:.3f} | {host:.3f} | {1000 * statistics.median(timed):.0f} | {spread} | {more} |")


if __name__ == "__main__":
    main()

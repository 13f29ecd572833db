"""What each fast path of `run.cpu_kernels` saves: processor time of a step without it, over that with all of them.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu_kernels demo            # or another of against_transformers.CASES
    ... -m benchmarks.cpu_kernels gpt_dp2 --blocks 16 --steps 2

Sides are forked from one imported process and make blocks of steps in turns (turns.py). The reference is `transformers`
(against_transformers.py). Printed are the fifth of the blocks that took least, since other work only adds time.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.against_transformers import (
    CASES,
    FIRST_STEPS,
    import_everything,
    record_batches,
    train_ours,
    train_reference,
)
from benchmarks.turns import ALL_THREADS, Block, Side, take_turns
from data.demo.make import make_demo


def without_attention() -> None:
    """Let torch compute attention."""
    from mimo_train.cpu import attention

    attention.supports = lambda hidden: False


def without_linear() -> None:
    """Let MKL compute the matmuls of layers."""
    from mimo_train.cpu import kernels

    kernels.ROWS = sys.maxsize


def without_swiglu() -> None:
    """Let autograd compute gated activations."""
    import torch.nn.functional as F

    from mimo_train.cpu import kernels

    def swiglu(inner):
        gate, up = inner.chunk(2, dim=-1)
        return F.silu(gate) * up

    kernels.swiglu = swiglu


def without_rms_norm() -> None:
    """Let torch compute RMSNorm."""
    import torch.nn.functional as F

    from mimo_train.cpu import kernels

    kernels.rms_norm = lambda inputs, weight, eps: F.rms_norm(inputs, weight.shape, weight, eps)


def without_cross_entropy() -> None:
    """Let Megatron-Core compute losses."""
    from mimo_train.models import language_model

    language_model.supports_cross_entropy = lambda logits, group: False


def without_gradient_sums() -> None:
    """Let Megatron-Core add gradients to its buffer."""
    from mimo_train.cpu.grad_accumulation import InPlaceGradients

    InPlaceGradients.sums_in_place = lambda self, parameter: False


def without_kept_memory() -> None:
    """Let glibc return memory."""
    from mimo_train.parallel import device

    device.keep_freed_memory = lambda: False


def without_dense_layers() -> None:
    """Let Megatron-Core compute layers."""
    from mimo_train.models.dense_layer import DenseLayer

    DenseLayer.of = classmethod(lambda cls, layer: None)


PATHS: dict[str, Callable[[], None]] = {
    "attention": without_attention,
    "linear": without_linear,
    "swiglu": without_swiglu,
    "rms_norm": without_rms_norm,
    "cross_entropy": without_cross_entropy,
    "gradient_sums": without_gradient_sums,
    "kept_memory": without_kept_memory,
    "dense_layers": without_dense_layers,
}


def main() -> int:
    """Measure one case and print a line for each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--blocks", type=int, default=20, help="rounds of a block of each side (default: 20)")
    parser.add_argument("--steps", type=int, default=2, help="steps of a block (default: 2)")
    args = parser.parse_args()
    import_everything()
    case = CASES[args.case]
    off = replace(case, changes=(*case.changes, "run.cpu_kernels=false"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        make_demo(folder, case.demo)

        def side(name: str, run: Callable[..., None], case=case) -> Side:
            options = {"processes": case.processes, "device": case.device}
            return Side(name, partial(run, case, folder, name), folder, **options)

        side("recorder", record_batches).close()
        sides = [side("transformers", train_reference), side("all", train_ours), side("none", train_ours, off)]
        sides += [side(f"no {name}", partial(train_ours, prepare=patch)) for name, patch in PATHS.items()]
        for each in sides:
            stack.enter_context(each).block(FIRST_STEPS)
        blocks = take_turns(sides, args.blocks, args.steps)
    reference, ours = low(blocks["transformers"]), low(blocks["all"])
    for name, values in blocks.items():
        seconds = low(values)
        print(f"{name:20} {1e3 * seconds:9.2f} ms | x {seconds / reference:.3f} | over all paths {seconds / ours:.3f}")
    return 0


def low(blocks: list[Block]) -> float:
    """Return the processor seconds of a step below which a fifth of the blocks lie."""
    return sorted(block.seconds[ALL_THREADS] for block in blocks)[len(blocks) // 5]


if __name__ == "__main__":
    sys.exit(main())

"""What a microbatch costs between modules: our bridge and Megatron-Core's own, on the same layout and samples.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/bridge.py layout=two_processes
    ... benchmarks/bridge.py --pairs 40 --steps 4 layout=images_dp1_language_dp2     # any key=value
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/bridge.py --bubble      # of two equal stages

Every process holds two runs that differ in `placement.bridge` alone. Of a step of each, all that the bridge and the
communicator launch is counted, told apart from the rest by the files on the stack: point-to-point messages and calls
of collectives with their bytes (of every rank's own tensor), reductions of tensors, and calls that wait for the device
to hand a number to the host. Where features join the text is counted too, and shapes of stages of the language model.
Then both runs make steps in
turns, a block each, so that a machine that becomes slower is slower for both. The first step of a block is left out.
"""

import argparse
import collections
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimo_train.config.compose import load
from mimo_train.config.schema import ConfigContainer

BETWEEN = (
    "bridge_communicator.py",
    "colocated_communicator.py",
    "multimodule_communicator.py",
    "p2p_communication.py",
    "/mimo_train/parallel/bridge/",
)
"""Parts of the names of files whose work is the bridge's."""

JOIN = {"get_text_embeddings", "align_embeddings_by_token_positions"}
"""Functions that put features between the text's embeddings."""

SIZED = ("aten::nonzero", "aten::masked_select")
"""Operations whose result has a size that the host waits for; nothing else in these models has one."""

NEAR = 14
"""Frames above a call in which such a file is looked for."""

POINT_TO_POINT = ("c10d::send", "c10d::recv_")
TO_HOST = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__index__,
           torch.Tensor.__float__, torch.Tensor.__format__, torch.Tensor.cpu, torch.Tensor.numpy}  # fmt: skip
COUNTS = ("messages", "message bytes", "collective calls", "collective bytes", "reductions", "host waits")


def is_between() -> bool:
    """Whether the bridge or the communicator made the call that is being looked at."""
    frame = sys._getframe(2)
    for _ in range(NEAR):
        if frame is None:
            return False
        if frame.f_code.co_name in JOIN or any(part in frame.f_code.co_filename for part in BETWEEN):
            return True
        frame = frame.f_back
    return False


class Messages(TorchDispatchMode):
    """Counts messages and reductions."""

    def __init__(self, counts: collections.Counter):
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        if name.startswith("c10d::") and is_between():
            tensors = args[1] if name.startswith("c10d::allgather") else args[0]
            size = sum(each.numel() * each.element_size() for each in torch.utils._pytree.tree_leaves(tensors)
                       if isinstance(each, torch.Tensor))  # fmt: skip
            if name == "c10d::send":
                self._counts["messages"] += 1
                self._counts["message bytes"] += size
            elif name not in POINT_TO_POINT:
                self._counts["collective calls"] += 1
                self._counts["collective bytes"] += size
        elif name == "aten::sum" and is_between():
            self._counts["reductions"] += 1
        elif name in SIZED:
            self._counts["host waits"] += 1
        return func(*args, **(kwargs or {}))


class HostWaits(TorchFunctionMode):
    """Counts calls that bring a number from the device to the host, and wait for it."""

    def __init__(self, counts: collections.Counter):
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in TO_HOST and is_between():
            self._counts["host waits"] += 1
        return func(*args, **(kwargs or {}))


class TimedRun:
    """A run that is set up and makes single steps."""

    def __init__(self, cfg: ConfigContainer):
        from mimo_train.training.stepped import SteppedRun

        self._steps = SteppedRun(cfg)
        self.run, self.stopwatch = self._steps.session.state.run, self._steps.session.parts.stopwatch

    def step(self) -> float:
        """Seconds of one step."""
        dist.barrier()
        started = time.perf_counter()
        self._steps.step()
        return time.perf_counter() - started

    def count(self) -> dict[str, float]:
        """`COUNTS` of a microbatch, forward and backward, over all ranks."""
        counts: collections.Counter = collections.Counter()
        with Messages(counts), HostWaits(counts):
            self.step()
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, dict(counts))
        total = sum(map(collections.Counter, found), collections.Counter())
        return {name: total[name] / self.run.batch.num_microbatches for name in COUNTS}

    def close(self) -> None:
        """End the run, without a checkpoint."""
        self._steps.close()


def compare(configs: dict[str, ConfigContainer], pairs: int, steps: int) -> None:
    """Count and time the two runs of `configs`, and print what was found."""
    runs = {bridge: TimedRun(cfg) for bridge, cfg in configs.items()}
    for run in runs.values():
        run.step()
    counts = {bridge: run.count() for bridge, run in runs.items()}
    blocks = [{bridge: [run.step() for _ in range(steps)][1:] for bridge, run in runs.items()} for _ in range(pairs)]

    def medians(chosen: list[dict]) -> list[float]:
        return [statistics.median(second for block in chosen for second in block[bridge]) for bridge in runs]

    def ratio(chosen: list[dict]) -> float:
        native, megatron = medians(chosen)
        return native / megatron

    if dist.get_rank() == 0:
        run = next(iter(runs.values())).run
        sizes = ", ".join(f"{name} {module}" for name, module in run.layout.modules.items())
        print(f"{sizes}; {run.layout.world_size} processes, {run.batch.num_microbatches} microbatches of "
              f"{run.batch.microbatch_samples} samples")  # fmt: skip
        for name in COUNTS:
            print(f"  {name:18}" + "".join(f"  {bridge} {found[name]:10.1f}" for bridge, found in counts.items()))
        draw = random.Random(1234)
        drawn = sorted(ratio(draw.choices(blocks, k=len(blocks))) for _ in range(2000))
        native, megatron = medians(blocks)
        print(f"  step: native {1e3 * native:.1f} ms, megatron {1e3 * megatron:.1f} ms, ratio {ratio(blocks):.3f} "
              f"(95 %: {drawn[50]:.3f} to {drawn[1949]:.3f})", flush=True)  # fmt: skip
    for run in runs.values():
        run.close()


def bubble(cfg: ConfigContainer, steps: int) -> None:
    """Print the share of forward and backward in which the two stages wait for each other."""
    timed = TimedRun(cfg)
    timed.step()
    timed.stopwatch.read_and_reset()
    for _ in range(steps):
        timed.step()
    seconds = timed.stopwatch.read_and_reset()
    busy, wait = seconds["forward_backward"], seconds["pipeline_wait"]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (busy, wait))
    if dist.get_rank() == 0:
        microbatches, stages = timed.run.batch.num_microbatches, timed.run.layout.language.pp
        expected = (stages - 1) / (microbatches + stages - 1)
        stage = ", ".join(f"stage {n}: busy {1e3 * b:.1f} ms, waits {1e3 * w:.1f} ms" for n, (b, w) in enumerate(found))
        share = sum(w for _, w in found) / sum(b + w for b, w in found)
        print(f"{microbatches} microbatches: waits {share:.3f}, (p - 1) / (m + p - 1) = {expected:.3f}; {stage}",
              flush=True)  # fmt: skip
    timed.close()


def main() -> int:
    """Measure on this rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of blocks (default: 40)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block (default: 4)")
    parser.add_argument("--bubble", action="store_true", help="measure the bubble of a plain GPT in two equal stages")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    args = parser.parse_args()
    from data.demo.make import ensure_demo

    scratch = Path(tempfile.gettempdir()) / f"bridge_{os.getppid()}"
    demo = "text" if args.bubble else "digits"
    if int(os.environ["LOCAL_RANK"]) == 0:
        ensure_demo(scratch, demo)
    shared = (
        f"data.shards={scratch}/train", "data.validation_shards=", f"data.demo={demo}", "run.device=cpu",
        "train.iters=100000", "data.workers=0", "log.tensorboard=false",
    )  # fmt: skip
    if args.bubble:
        # Wide layers beside a small vocabulary: the output layer of the last stage is little of its work.
        sizes = ("num_layers=4", "hidden_size=256", "ffn_hidden_size=1024", "num_attention_heads=4")
        model = [f"modules.language.llm.{size}" for size in sizes]
        for microbatches in (1, 2, 4, 8):
            batch = ("train.micro_batch_size=2", f"train.global_batch_size={2 * microbatches}")
            places = (f"run.dir={scratch}/{microbatches}", "layout=language_pp2")
            bubble(load("gpt_tiny", (*shared, *places, *model, *batch, *args.overrides)), args.pairs)
    else:
        configs = {
            bridge: load(
                "vlm_digits", (*shared, f"run.dir={scratch}/{bridge}", f"placement.bridge={bridge}", *args.overrides)
            )
            for bridge in ("native", "megatron")
        }
        compare(configs, args.pairs, args.steps)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(scratch)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

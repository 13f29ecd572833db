"""What freezing saves: seconds per step and bytes of runs that differ in what is frozen.

    OMP_NUM_THREADS=1 python benchmarks/frozen_encoder.py                                     # all on one process
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/frozen_encoder.py                # vision + language
    ... benchmarks/frozen_encoder.py --rounds 40 modules.images.encoder.num_layers=8         # any key=value

The runs stand in the same processes and make a step each in turns, so that a machine that becomes slower is slower for
all. Two clocks: the wall, and the processor time of all threads of this process, in which waiting does not count. For
each: the median, and the median of the ratios to the step of the same round that trains all.

Bytes on this rank: gradient buffers; states of the optimizer; and the most that forward passes keep for their backward
pass until the next one begins, each storage counted once, without weights. The cached run passes its samples
once before, which fills the cache; what that costs is shown apart.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimo_train.config.compose import load

SAMPLES, BATCH = 128, 16
MEBIBYTE = 2**20

ENCODER_SIZES = (
    "modules.images.encoder.patch_size=8",
    "modules.images.projector.merge=2",
    "modules.images.encoder.num_layers=6",
)
"""An encoder with as much work as the language model, as encoders of large images have."""

ENCODER = "modules.images.freeze=[encoder]"
WHOLLY = "modules.images.freeze=[encoder, projector]"
VARIANTS = {
    "nothing frozen": (),
    "encoder frozen": (ENCODER,),
    "encoder and projector frozen": (WHOLLY,),
    "encoder frozen, cached": (ENCODER, "modules.images.feature_cache.dir={scratch}/features"),
    "encoder frozen, prefetch 2": (ENCODER, "modules.images.prefetch_microbatches=2"),
    "language model frozen": (ENCODER, "modules.language.freeze=[llm]"),
    "LoRA of rank 8 on both": ("modules.images.lora.rank=8", "modules.language.lora.rank=8"),
}
TRAINED = "nothing frozen"


class Variant:
    """One run, stepped by hand."""

    def __init__(self, cfg: Any):
        from benchmarks.stepped_run import SteppedRun

        self._run = SteppedRun(cfg)
        self.seconds: tuple[list[float], list[float]] = [], []

    def step(self) -> None:
        """One training step, by both clocks."""
        wall, processor = time.perf_counter(), time.process_time()
        self._run.step()
        self.seconds[0].append(time.perf_counter() - wall)
        self.seconds[1].append(time.process_time() - processor)

    def bytes(self) -> dict[str, int]:
        """Of gradient buffers, optimizer states, and tensors kept for the backward pass of one step."""
        from mimo_train.models.parameters import modules_of

        gradients = sum(
            buffer.grad_data.nbytes
            for chunks in modules_of(self._run.model).values()
            for chunk in chunks
            for buffer in chunk.buffers + chunk.expert_parallel_buffers
        )
        states = sum(
            value.nbytes
            for info in self._run.session.optimizer.module_infos.values()
            for each in (info.optimizer.chained_optimizers if info.optimizer else ())
            for kept in each.optimizer.state.values()
            for value in kept.values()
            if isinstance(value, torch.Tensor)
        )
        return {"gradients": gradients, "states": states, "kept": self._kept()}

    def close(self) -> None:
        """End the reading threads."""
        self._run.close()

    def _kept(self) -> int:
        storages: dict[int, int] = {}
        largest = [0]
        weights = {parameter.untyped_storage().data_ptr() for parameter in self._run.model[0].parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        def give_back(tensor: torch.Tensor) -> torch.Tensor:
            largest.append(sum(storages.values()))
            storages.clear()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, give_back):
            self.step()
        for clock in self.seconds:
            clock.pop()
        return max(largest)


def measure(make: Callable[[str], Any], rounds: int) -> list[str]:
    """Rows of a table, one a variant, for this rank."""
    variants, sizes, filling = {}, {}, {}
    for name in VARIANTS:
        variant = variants[name] = Variant(make(name))
        variant.step()
        sizes[name] = variant.bytes()
        if "cached" in name:
            for _ in range(SAMPLES // BATCH):
                variant.step()
            filling = [statistics.median(clock[1:]) for clock in variant.seconds]
        for clock in variant.seconds:
            clock.clear()
    for _ in range(rounds):
        for variant in variants.values():
            variant.step()
    rows = ["| run | wall, ms | ratio | processor, ms | ratio | gradients, MiB | states, MiB | kept, MiB |"]
    rows.append("|---|" + "---|" * 7)
    base = variants[TRAINED].seconds
    for name, variant in variants.items():
        cells = [name]
        for clock in (0, 1):
            ratios = [own / trained for own, trained in zip(variant.seconds[clock], base[clock], strict=True)]
            cells += [f"{1e3 * statistics.median(variant.seconds[clock]):.1f}", f"{statistics.median(ratios):.3f}"]
        cells += [f"{sizes[name][what] / MEBIBYTE:.2f}" for what in ("gradients", "states", "kept")]
        rows.append(f"| {' | '.join(cells)} |")
    rows.append(f"filling the cache: wall {1e3 * filling[0]:.1f} ms, processor {1e3 * filling[1]:.1f} ms")
    for variant in variants.values():
        variant.close()
    return rows


def main() -> int:
    """Measure on every rank, and print what each found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="steps of each run that are measured (default: 40)")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    args = parser.parse_args()
    from data.demo.make import make_demo

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    scratch = Path(tempfile.gettempdir()) / f"frozen_encoder_{os.getppid() if processes > 1 else os.getpid()}"
    if int(os.environ.get("RANK", "0")) == 0:
        make_demo(scratch, train_samples=SAMPLES, held_out_samples=8, shards=1)
        (scratch / "made").touch()
    while not (scratch / "made").exists():
        time.sleep(0.1)

    def make(name: str) -> Any:
        chosen = [override.format(scratch=scratch) for override in VARIANTS[name]]
        return load(
            "vlm_digits",
            [
                f"layout={'one_process' if processes == 1 else 'two_processes'}",
                f"run.dir={scratch}/run",
                f"data.shards={scratch}/train",
                "data.validation_shards=",
                "data.demo=",
                "data.shuffle=false",
                "run.device=cpu",
                "checkpoint.resume=never",
                "log.tensorboard=false",
                f"train.global_batch_size={BATCH}",
                "train.micro_batch_size=4",
                "train.iters=100000",
                *ENCODER_SIZES,
                *args.overrides,
                *chosen,
            ],
        )

    rows = measure(make, args.rounds)
    for rank in range(processes):
        dist.barrier()
        if rank == dist.get_rank():
            print(f"rank {rank} of {processes}, {args.rounds} rounds", *rows, sep="\n", flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(scratch)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a checkpoint of about 100M parameters costs, beside torch.save of the same bytes and Megatron-Core's own way.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/checkpoint.py layout=language_dp2
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/checkpoint.py --rounds 5 layout=language_tp2

Every round saves in each way, one after the other, into a new folder, and loads what was saved. Of a save are measured:
the wall time for which training would stand still and that thread's CPU time, both until it may go on; wall and CPU
time of the process until the checkpoint is complete; and the largest resident memory above that before. Numbers are
those of the slowest rank. Beside each stands the median over rounds of its ratio to the yardstick of its round, and the
lowest and the highest: for a stall a copy of the rank's bytes into memory that has been used, for a whole save
torch.save and fsync, and for a load torch.load of what the rank needs: all of the model's weights that it computes
with, and its part of the moments. A plain read of that file into memory that has been used is what no load can do
without: torch.load fills new memory. CPU time says more than wall time on a machine that is shared.
"""

import argparse
import gc
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

from mimo_train.checkpoint.format.index import BLOCK
from mimo_train.config.compose import load

SIZES = (
    "modules.language.llm.num_layers=14",
    "modules.language.llm.hidden_size=768",
    "modules.language.llm.ffn_hidden_size=2048",
    "modules.language.llm.num_attention_heads=12",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "train.eval_interval=0",
    "train.report_samples=0",
    "data.workers=0",
    "log.tensorboard=false",
    "checkpoint.resume=never",
    "checkpoint.keep=0",
)
STALL, STALL_CPU, TOTAL, TOTAL_CPU, MEMORY = range(5)
NAMES = ("stall s", "stall CPU s", "total s", "total CPU s", "memory MB")
CORE = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
}

TORCH_LOAD = "torch.load"
"""Yardstick of loads."""

Save = Callable[[Path], Callable[[], object]]
"""Begins to save into a folder; what it returns waits until the checkpoint is complete."""
Load = Callable[[Path], object]
"""Loads what was saved into a folder."""


def nothing() -> None:
    pass


def memory(field: str) -> float:
    """A field of /proc/self/status in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1e3


def largest(numbers: list[float]) -> list[float]:
    """Of all ranks."""
    box = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return box.tolist()


def measured(save: Save, folder: Path) -> list[float]:
    """One save, by `NAMES`."""
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, begin, begin_cpu, begin_thread = (
        memory("VmRSS"),
        time.perf_counter(),
        time.process_time(),
        time.thread_time(),
    )
    finish = save(folder)
    stall, stall_cpu = time.perf_counter() - begin, time.thread_time() - begin_thread
    finish()
    total, total_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    return largest([stall, stall_cpu, total, total_cpu, memory("VmHWM") - before])


class Ways:
    """All ways to save and load one model on this rank."""

    def __init__(self, session: Any):
        from mimo_train.checkpoint.local_shards import shards_of_model

        self.session, self.checkpointer = session, session.checkpointer
        held = shards_of_model(session.model)
        self.parts, _ = self.checkpointer.local_parts(None, finite=True)
        self.nbytes = sum(part.nbytes for part in self.parts)
        self._copy = torch.zeros(self.nbytes, dtype=torch.uint8)
        self._live = torch.zeros(self.nbytes, dtype=torch.uint8)
        # Each tensor with a storage of its own: torch.save writes the whole buffer that a view is of.
        self._values = {f"{part.key}{part.span}": part.values.clone() for part in self.parts}
        # A rank of data parallelism reads the whole model, and its own part of the moments.
        trained = {f"{one.module}{one.name}": one.tensor.detach().clone() for one in held}
        moments = {name: value for name, value in self._values.items() if "exp_avg" in name}
        self._needed = trained | moments
        self._read = bytearray()
        self.saves: dict[str, Save] = {
            "copy in memory": self.copy,
            "torch.save, fsync": self.torch_save,
            "ours": self.ours,
            "ours, asynchronous": self.asynchronous,
            "Megatron-Core": self.core,
        }
        self.loads: dict[str, dict[str, Load]] = {
            "torch.save, fsync": {TORCH_LOAD: self.torch_load, "plain read": self.read},
            "ours": {"ours": self.load},
            "Megatron-Core": {"Megatron-Core": self.core_load},
        }
        """By the way of saving whose folder they read."""

    def copy(self, _folder: Path) -> Callable[[], object]:
        self._copy.copy_(self._live)
        return nothing

    def torch_save(self, folder: Path) -> Callable[[], object]:
        with open(folder / f"{dist.get_rank()}.pt", "wb") as file:
            torch.save(self._values, file)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()
        return nothing

    def torch_load(self, folder: Path) -> None:
        """What this rank needs, which is more than it has written: `prepare_load` has put it there."""
        torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True)

    def prepare_load(self, folder: Path) -> None:
        torch.save(self._needed, folder / f"{dist.get_rank()}.pt")

    def read(self, folder: Path) -> None:
        """The bytes of `torch_load`, into memory that is kept."""
        with open(folder / f"{dist.get_rank()}.pt", "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if len(self._read) != size:
                self._read = bytearray(size)
            left = memoryview(self._read)
            while left:
                left = left[file.readinto(left[:BLOCK]) :]

    def ours(self, folder: Path) -> Callable[[], object]:
        self.checkpointer.save(run_dir=folder)
        return nothing

    def asynchronous(self, folder: Path) -> Callable[[], object]:
        self.checkpointer.begin()
        return self.checkpointer.finish

    def load(self, folder: Path) -> None:
        from mimo_train.checkpoint import folders
        from mimo_train.checkpoint.load import load_checkpoint

        found = folders.newest(folder)
        assert found is not None
        session = self.session
        load_checkpoint(found, session.state.layout, session.model, session.optimizer)

    def core(self, folder: Path) -> Callable[[], object]:
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(
            self._core_state(is_loading=False),
            str(folder),
            content_metadata=CORE,
            preprocess_common_before_consistancy_check=lambda common: {},
            verify_integrity=True,
        )
        dist.barrier()
        return nothing

    def core_load(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        with torch.no_grad():
            dist_checkpointing.load(self._core_state(is_loading=True), str(folder))

    def _core_state(self, *, is_loading: bool) -> dict[str, Any]:
        import queue

        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.models.mimo.optimizer import MimoOptimizer
        from megatron.core.utils import unwrap_model

        filesystem_async._results_queue = filesystem_async._results_queue or queue.Queue()
        state = {"model": unwrap_model(self.session.model[0]).sharded_state_dict(metadata=dict(CORE))}
        state["optimizer"] = MimoOptimizer.sharded_state_dict(
            self.session.optimizer, state["model"], is_loading=is_loading, metadata=dict(CORE)
        )
        return state


def table(rows: dict[str, list[list[float]]], names: tuple[str, ...], yardsticks: dict[int, str]) -> None:
    """Medians, and in brackets those of the ratio to the yardstick of the same round, with the lowest and highest."""
    for way, numbers in rows.items():
        cells = []
        for column, name in enumerate(names):
            cell = f"{name} {statistics.median(row[column] for row in numbers):.3g}"
            if column in yardsticks and way != yardsticks[column]:
                other = rows[yardsticks[column]]
                ratios = [row[column] / base[column] for row, base in zip(numbers, other, strict=True)]
                cell += f" ({statistics.median(ratios):.2f} x, {min(ratios):.2f} to {max(ratios):.2f})"
            cells.append(cell)
        print(f"{way:20s} " + "  ".join(cells), flush=True)


def main() -> None:
    """Save and load on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without", action="append", default=[], help="a way to leave out")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    from benchmarks.stepped_run import SteppedRun

    rank = int(os.environ["RANK"])
    place = [tempfile.mkdtemp(prefix="checkpoint_", dir=".")] if rank == 0 else [""]
    cfg = load("gpt_tiny", (*SIZES, "run.dir=benchmark", "checkpoint.asynchronous=true", *options.overrides))
    dist.init_process_group("gloo")
    dist.broadcast_object_list(place)
    folder, cfg.run.dir = Path(place[0]).absolute(), place[0]
    run = SteppedRun(cfg)
    run.step()
    ways = Ways(run.session)
    if rank == 0:
        count = sum(part.span.numel for part in ways.parts if part.must_be_finite)
        print(f"{ways.nbytes / 1e6:.0f} MB on rank 0, {count / 1e6:.1f}M weights there", flush=True)
    names = [name for name in ways.saves if name not in options.without]
    saved: dict[str, list[list[float]]] = {name: [] for name in names}
    loaded: dict[str, list[list[float]]] = {load: [] for name in names for load in ways.loads.get(name, ())}
    for turn in range(options.rounds + 1):
        for name in names:
            into = folder if name == "ours, asynchronous" else folder / name.replace(" ", "_").replace(",", "")
            if rank == 0:
                shutil.rmtree(folder / "checkpoints" if into == folder else into, ignore_errors=True)
                into.mkdir(exist_ok=True)
            dist.barrier()
            numbers = measured(ways.saves[name], into)
            if turn:  # the first round takes new memory
                saved[name].append(numbers)
            loads = ways.loads.get(name, {})
            if TORCH_LOAD in loads:
                ways.prepare_load(into)
            for load_name, load_way in loads.items():
                dist.barrier()
                begin, cpu = time.perf_counter(), time.process_time()
                load_way(into)
                numbers = largest([time.perf_counter() - begin, time.process_time() - cpu])
                if turn:
                    loaded[load_name].append(numbers)
            if rank == 0:
                print(f"round {turn}: {name} done", file=sys.stderr, flush=True)
    if rank == 0:
        stall, whole = "copy in memory", "torch.save, fsync"
        table(saved, NAMES, {STALL: stall, STALL_CPU: stall, TOTAL: whole, TOTAL_CPU: whole})
        print("loading:")
        table(loaded, ("wall s", "CPU s"), dict.fromkeys(range(2), TORCH_LOAD))
    dist.barrier()
    run.close()  # which writes metrics.jsonl again where it is gone
    dist.destroy_process_group()
    if rank == 0:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

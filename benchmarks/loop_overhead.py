"""What our training loop costs over a bare one: the ratio of their seconds per step, on the same objects.

    OMP_NUM_THREADS=1 python benchmarks/loop_overhead.py                                       # a plain GPT, 1 process
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/loop_overhead.py                  # vision + language
    ... benchmarks/loop_overhead.py --pairs 80 --steps 4 train.log_interval=10                # any key=value

One process runs both loops in turns, a few steps each, so that a machine that becomes slower is slower for both. Ours
is `train()` with its default logging, every step. The bare loop is written out below: the same Megatron-Core schedule,
communicator, model, optimizer, schedules of the rate, and data loader, without anything else. It runs inside of
`train()`, in a callback; its time is not counted as ours. The first step of a block is left out.

Two clocks: the wall, and the processor time of the main thread, in which waiting for another rank or for the processor
does not count. For each: the median over pairs of neighbouring blocks of their ratio, and the interval that holds 95 %
of 2,000 redraws of the pairs. A machine that changes its speed during the run does so for both blocks of a pair, so
this ratio keeps its meaning where that of all steps, which is given too, loses it. On a machine with other work, the
time that the fastest tenth of the steps stays below says most.
"""

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimo_train.config.compose import load
from mimo_train.config.schema import ConfigContainer
from mimo_train.training.callbacks import Callback

BLOCK_WARMUP = 1
"""Steps at the start of a block that are left out: caches still hold the other loop."""

RUNS = {
    1: ("gpt_tiny", "text", ("train.global_batch_size=8", "train.micro_batch_size=4")),
    2: ("vlm_digits", "digits", ("train.micro_batch_size=4",)),
}
"""Processes -> config, demo, and the changes that make a step take about a tenth of a second on one CPU core."""


def now() -> tuple[float, float]:
    """Both clocks: the wall, and the processor time of this thread."""
    return time.perf_counter(), time.thread_time()


def since(started: tuple[float, float]) -> tuple[float, float]:
    """Seconds since `now()`, by both clocks."""
    wall, processor = now()
    return wall - started[0], processor - started[1]


class BareLoop:
    """Forward, backward and update on the run's own objects."""

    def __init__(self, session: Any, forward_step: Any):
        from megatron.core.utils import get_model_config

        from mimo_train.inputs.datasets import build_dataset
        from mimo_train.models.parameters import modules_of
        from mimo_train.training.step.batches import open_loader

        self._run, self._model = session.state.run, session.model
        self._optimizer, self._schedulers = session.optimizer, session.schedulers
        self._forward_step = forward_step
        self._pipeline, self._groups = session.parts.pipeline, session.parts.pipeline.groups
        self._modules = modules_of(session.model)
        self._config = get_model_config(session.model[0])
        dataset = build_dataset(self._run.cfg, session.parts.tokenizer)
        self._loader = open_loader(self._run, self._groups, dataset, consumed=0, steps=self._run.cfg.train.iters)

    def steps(self, count: int) -> list[tuple[float, float]]:
        """Seconds of each of `count` steps."""
        finalize, self._config.finalize_model_grads_func = self._config.finalize_model_grads_func, self._finalize
        try:
            return [self._step() for _ in range(count)]
        finally:
            self._config.finalize_model_grads_func = finalize

    def close(self) -> None:
        """End the threads that read."""
        self._loader.close()

    def _step(self) -> tuple[float, float]:
        started = now()
        batch = next(self._loader)
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._pipeline.shapes.follow(batch)
        self._pipeline._schedule(
            forward_step_func=self._forward_step,
            data_iterator=iter(batch.microbatches),
            model=self._model,
            num_microbatches=self._run.batch.num_microbatches,
            seq_length=self._run.cfg.data.sequence_length,
            micro_batch_size=self._run.batch.micro_batch_size,
            forward_only=False,
            p2p_communicator=self._pipeline._communicator,
            pg_collection=self._pipeline._schedule_groups,
        )
        updated, _, _ = self._optimizer.step()
        if updated:
            self._schedulers.step(increment=1)
        return since(started)

    def _finalize(self, _model, num_tokens=None, pg_collection=None, force_all_reduce=False) -> None:
        """What Megatron-Core does for one model, for each module: the divisor is the sum of tokens over all ranks."""
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads

        for name, chunks in self._modules.items():
            finalize_model_grads(chunks, None, self._groups.collections[name], force_all_reduce)
        tokens = torch.zeros((), dtype=torch.float32)
        if self._pipeline.is_last_stage:
            tokens.copy_(num_tokens)
        dist.all_reduce(tokens)
        for chunks in self._modules.values():
            for chunk in chunks:
                chunk.scale_gradients(1.0 / tokens)


def bare_gpt_step(data_iterator, model):
    """The forward step of a user who has only Megatron-Core, for a plain GPT."""
    batch = next(data_iterator)
    inputs = {key: batch[key] for key in ("input_ids", "position_ids", "labels")}
    return model(**inputs, attention_mask=None), partial(bare_loss, batch["loss_mask"])


def bare_mimo_step(data_iterator, model):
    """The same for a `MimoModel`, of which this rank has the encoder or the language model."""
    batch = next(data_iterator)
    keys = ("input_ids", "position_ids", "labels", "loss_mask", "modality_inputs")
    inputs = {"input_ids": None} | {key: batch[key] for key in keys if key in batch}
    output, loss_mask = model(**inputs)
    return output, partial(bare_loss, loss_mask) if "labels" in batch else None


def bare_loss(loss_mask, output_tensor):
    """(sum of losses, number of tokens, what is logged) of a microbatch."""
    mask = loss_mask.float()
    loss, tokens = (output_tensor.float() * mask).sum(), mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}


@dataclass
class Pair:
    """Two neighbouring blocks of steps; each step is (wall seconds, seconds of the processor)."""

    ours: list[tuple[float, float]]
    bare: list[tuple[float, float]]


class Alternate(Callback):
    """Runs a block of the bare loop before every block of ours, and takes the time of both."""

    def __init__(self, pairs: int, steps: int):
        self.bare: BareLoop | None = None
        self.blocks: list[Pair] = []
        self._pairs, self._steps, self._at, self._started = pairs, steps, 0, now()

    def on_step_start(self, state) -> None:
        if self._at:
            self.blocks[-1].ours.append(since(self._started))
        if self._at % self._steps == 0 and self._at < self._pairs * self._steps:
            self.blocks.append(Pair([], self.bare.steps(self._steps)))
        self._at += 1
        self._started = now()


def measure(cfg: ConfigContainer, pairs: int, steps: int) -> list[Pair]:
    """Train for `pairs` blocks of `steps` steps, with as many blocks of the bare loop between them."""
    from benchmarks.stepped_run import SteppedRun
    from mimo_train.training.callbacks import Callbacks
    from mimo_train.training.loop import train

    alternate = Alternate(pairs, steps)
    cfg.train.iters = pairs * steps + 1  # the step after the last block ends the time of its last step
    run = SteppedRun(cfg)
    alternate.bare = BareLoop(run.session, bare_mimo_step if cfg.encoders else bare_gpt_step)
    try:
        train(run.session, run.step_func, Callbacks([alternate]))
    finally:
        alternate.bare.close()
        run.close()
    return alternate.blocks


def summary(blocks: list[Pair], clock: int) -> str:
    """Medians of both loops by one clock (0 the wall, 1 the processor), their ratio and how sure it is."""
    pairs = [tuple([step[clock] for step in side[BLOCK_WARMUP:]] for side in (pair.ours, pair.bare)) for pair in blocks]

    def medians(chosen: list) -> tuple[float, float]:
        ours, bare = ([second for pair in chosen for second in pair[side]] for side in (0, 1))
        return statistics.median(ours), statistics.median(bare)

    def ratio(chosen: list) -> float:
        ours, bare = medians(chosen)
        return ours / bare

    each = [ratio([pair]) for pair in pairs]
    draw = random.Random(1234)
    drawn = sorted(statistics.median(draw.choices(each, k=len(each))) for _ in range(2000))
    ours, bare = medians(pairs)
    fast_ours, fast_bare = (
        statistics.quantiles([second for pair in pairs for second in pair[side]], n=10)[0] for side in (0, 1)
    )
    return (
        f"{('wall', 'processor')[clock]}: median ratio of pairs {statistics.median(each):.4f} "
        f"(95 %: {drawn[50]:.4f} to {drawn[1949]:.4f}); "
        f"all steps: ours {1e3 * ours:.2f} ms, bare {1e3 * bare:.2f} ms, ratio {ours / bare:.4f}; "
        f"fastest tenth: ours {1e3 * fast_ours:.2f} ms, bare {1e3 * fast_bare:.2f} ms, "
        f"ratio {fast_ours / fast_bare:.4f}"
    )


def main() -> int:
    """Measure on this rank; the one that logs prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=80, help="pairs of blocks (default: 80)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block (default: 4)")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    args = parser.parse_args()
    from data.demo.make import make_demo

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    name, demo, changes = RUNS[processes]
    scratch = Path(tempfile.gettempdir()) / f"loop_overhead_{os.getppid() if processes > 1 else os.getpid()}"
    shards = (f"data.shards={scratch}/demo/train", "data.validation_shards=", f"data.demo={demo}")
    cfg = load(name, (f"run.dir={scratch}/run", *shards, "run.device=cpu", *changes, *args.overrides))
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        make_demo(scratch / "demo", demo)
    blocks = measure(cfg, args.pairs, args.steps)
    for rank in range(processes):
        dist.barrier()
        if rank == dist.get_rank():
            print(
                f"{name}, rank {rank} of {processes}, {args.pairs} pairs of {args.steps} steps of "
                f"{cfg.train.global_batch_size * cfg.data.sequence_length} tokens\n  "
                f"{summary(blocks, 0)}\n  {summary(blocks, 1)}",
                flush=True,
            )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(scratch)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the sections run beside the functions of gpu_check, each in a process of its own: functions of numbers and names
that return numbers and names."""

import dataclasses
import functools
import gc
import statistics
import time
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.gpu_check import Missing, runs
from benchmarks.gpu_check.work import rates, require


def fp8_matmul(*, device: str, size: int, repeats: int) -> dict[str, Any]:
    """TFLOP/s of a product of two fp8 matrices of random numbers, each with one scale, summed into bf16.

    Raises:
        Missing: the device has no fp8.
    """
    require("torch")
    import torch

    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise Missing(f"fp8 needs compute capability 8.9, the device has {torch.cuda.get_device_capability()}")
    torch.manual_seed(0)
    # The second matrix lies column by column, as kernels of fp8 want it.
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)

    def product() -> None:
        torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=device == "cuda")

    return {"size": size, **rates(product, 2 * size**3, device, repeats)}


def estimates(*, config: str, candidates: list[list[str]], of_device: str) -> list[int]:
    """Bytes of the fullest rank for each list of overrides, as `mimo-train check` reckons them.

    Args:
        of_device: that the run would be on; this job needs none.
    """
    require(*runs.NEEDED)
    return [runs.estimated(config, ["data.shards=unread", *overrides], of_device) for overrides in candidates]


def steps(*, device: str, compiler: str, **options: Any) -> dict[str, Any]:
    """`runs.large`, with weights that the device draws: speed asks for random numbers, not for the run's own.

    Args:
        compiler: backend of torch.compile, where layers are compiled.
    """
    require(*runs.NEEDED)
    with quick_weights(device), patch("mimo_train.models.dense_layer.BACKEND", compiler):
        return runs.large(device=device, **options)


@contextmanager
def quick_weights(device: str):
    """Weights of a run that is set up inside are drawn by the device, which takes seconds where the program's own
    numbers, the same on every machine, take minutes of a billion parameters."""
    import torch

    def drawn(block: torch.Tensor, std: float, seed: int, row: int = 0, column: int = 0) -> None:
        block.copy_(torch.empty(block.shape, dtype=block.dtype, device=device).normal_(0.0, std))

    with patch("encoders.initial_weights.fill", drawn):
        yield


def versus(
    *,
    config: str,
    folder: str,
    device: str,
    overrides: list[str],
    te: bool,
    image: int,
    characters: int,
    compiled: str,
    rounds: int,
    recorded: int,
) -> dict[str, Any]:
    """Ours against `transformers` in turns; see benchmarks/against_transformers.py for both sides.

    Args:
        compiled: backend of torch.compile for the reference; empty: none.

    Returns:
        Seconds of a step and bytes at the peak of either, and the ratio of ours to the reference with its interval.
    """
    require(*runs.NEEDED, "transformers", *(["transformer-engine"] if te else []))
    from benchmarks import against_transformers, turns

    for name in ("llama", "llava", "siglip"):
        import_module(f"transformers.models.{name}.modeling_{name}")
    gc.freeze()
    where = Path(folder)
    shards = runs.write_images(where, image, [characters] * 64)
    changes = (*runs.FIXED, *overrides, f"data.shards={shards}")
    case = against_transformers.Case(config, "", changes, device=device, recorded=recorded)
    # Importing Transformer Engine may ask for the device, which forked processes could then not use.
    prepare = functools.partial(runs.choose_layers, te)
    with quick_weights(device), against_transformers.open_sides(case, where, compiled, prepare) as sides:
        found = turns.take_turns(sides, rounds, 1)
    reference, ours = found.values()
    return {
        "seconds": {name: turns.seconds(blocks, turns.WALL) for name, blocks in found.items()},
        "memory": {name: blocks[-1].memory for name, blocks in found.items()},
        "ratio": dataclasses.asdict(turns.ratio(ours, reference, turns.WALL)),
        "rounds": rounds,
    }


def saves(
    *,
    config: str,
    folder: str,
    device: str,
    overrides: list[str],
    te: bool,
    image: int,
    characters: int,
    before: int,
    asynchronous: bool,
) -> dict[str, Any]:
    """Seconds for which a checkpoint stops training, and what the steps are while it is written.

    Args:
        before: steps in front of it.
    """
    require(*runs.NEEDED, *(["transformer-engine"] if te else []))
    from mimo_train.training.callbacks import Callback

    class Enough(Exception):
        """The run has gone far enough."""

    class Watch(Callback):
        begun: list[float] = []
        complete: int | None = None
        size = 0

        def on_step_start(self, state: Any) -> None:
            if device == "cuda":
                import torch

                torch.cuda.synchronize()
            self.begun.append(time.perf_counter())
            if self.complete is not None and state.train_state.step > before + 1:
                raise Enough

        def on_checkpoint(self, state: Any, folder: Path) -> None:
            self.complete = state.train_state.step
            self.size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())

    watch = Watch()
    shards = runs.write_images(Path(folder), image, [characters] * 64)
    changes = [f"checkpoint.save_interval={before}", f"checkpoint.asynchronous={str(asynchronous).lower()}"]
    try:
        with quick_weights(device):
            runs.pretrained(
                config, [f"data.shards={shards}", *overrides, *changes], f"{folder}/run", device, te, callbacks=[watch]
            )
    except Enough:
        pass
    took = [end - begin for begin, end in zip(watch.begun, watch.begun[1:], strict=False)]
    usual = statistics.median(took[1 : before - 1])
    return {
        "usual": usual,
        "stall": took[before - 1] - usual,
        "behind": statistics.median(took[before:]),
        "steps_in_flight": watch.complete - before,
        "bytes": watch.size,
    }


def reading(
    *, config: str, folder: str, device: str, overrides: list[str], image: int, characters: int, steps: int
) -> dict[str, Any]:
    """Samples a second that are read, decoded, and put on the device, with nothing trained.

    Args:
        steps: that are timed, behind as many that are not.
    """
    require(*runs.NEEDED)
    from benchmarks.stepped_run import SteppedRun
    from mimo_train.config.compose import load

    shards = runs.write_images(Path(folder), image, [characters] * 64)
    fixed = [*runs.FIXED, f"run.dir={folder}/run", f"run.device={device}", f"data.shards={shards}"]
    with quick_weights(device):
        run = SteppedRun(load(config, [*fixed, *overrides]))
    data, samples, began = run.session.data, 0, 0.0
    for step in range(2 * steps):
        if step == steps:
            samples, began = 0, time.perf_counter()
        data.advance()
        for _ in data.current.microbatches:
            next(data)
        samples += data.current.size
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    run.close()
    return {"samples_per_second": samples / seconds, "samples": samples}

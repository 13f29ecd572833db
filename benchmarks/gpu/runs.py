"""Jobs that train: curves to compare, and models to time. Each runs in a process of its own."""

import dataclasses
import functools
import gc
import io
import json
import random
import statistics
import string
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

FIXED = (
    "data.demo=",
    "data.validation_shards=",
    "train.report_samples=0",
    "checkpoint.save_interval=0",
    "log.tensorboard=false",
)


def demos(*, folder: str, samples: int) -> dict[str, str]:
    """Write the demo shards of both models; return the folders of their training shards."""
    from data.demo.make import make_demo

    digits = make_demo(Path(folder) / "digits", train_samples=samples, held_out_samples=8, shards=2)
    return {"vlm_digits": f"{digits}/train", "gpt_tiny": f"{make_demo(Path(folder) / 'prose', 'text')}/train"}


def curve(
    *,
    config: str,
    shards: str,
    run_dir: str,
    device: str,
    overrides: list[str],
    precision: str,
    te: bool,
    compiled: bool,
) -> dict[str, Any]:
    """Losses and gradient norms of a run's steps, and what its layers were.

    Args:
        te: layers of Transformer Engine, not of torch.
        compiled: with `train.compile=layers`, on a CPU without a backend.
    """
    import torch
    import torch.distributed as dist

    torch.set_float32_matmul_precision("highest")  # no TF32 in matmuls,
    torch.backends.cudnn.allow_tf32 = False  # nor in convolutions
    look, changes = _Look(), [f"data.shards={shards}", f"train.precision={precision}", *overrides]
    changes += ["train.compile=layers"] if compiled else []
    with _counted_graphs("inductor" if device == "cuda" else "eager") as graphs:
        pretrained(config, changes, run_dir, device, te, look)
    steps = [line for line in _lines(run_dir) if "lm loss" in line]
    return {
        "losses": [step["lm loss"] for step in steps],
        "norms": [step["grad_norm"] for step in steps],
        "te_modules": look.te_modules,
        "graphs": len(graphs),
        "backend": dist.get_backend_config(),
    }


def steps(
    *,
    config: str,
    folder: str,
    device: str,
    overrides: list[str],
    te: bool,
    image: int,
    characters: int,
    varied: bool,
    profiled: bool,
    compiler: str,
    warm_up: int,
    timed: int,
) -> dict[str, Any]:
    """Seconds of a step of a model with random weights.

    Args:
        te: layers of Transformer Engine, not of torch.
        image: height and width in pixels.
        characters: of every text, enough to fill its sequence.
        varied: lengths of texts vary, see `lengths`.
        profiled: profile one more step, for its heaviest kernels.
        compiler: backend of torch.compile, where layers are compiled.
        warm_up: steps that are left out.
        timed: steps that are timed.

    Returns:
        The measurements; `{"out_of_memory": message}` where the model does not fit.
    """
    import torch

    run_dir = f"{folder}/run"
    look, watch, enough = _Look(), *_watch(warm_up + timed, device, profiled)
    changes = [f"data.shards={write_images(Path(folder), image, lengths(64, characters, varied))}", *overrides]
    try:
        with quick_weights(device), patch("mimo_train.models.dense_layer.BACKEND", compiler):
            pretrained(config, changes, run_dir, device, te, look, [watch])
    except enough:
        pass
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).partition(". ")[0]}
    steps = [line for line in _lines(run_dir) if warm_up < line["step"] <= warm_up + timed]
    names = ("step_seconds", "tokens_per_second", "tflops", "mfu", "mfu/images", "mfu/language")
    medians = {name: statistics.median(step[name] for step in steps) for name in names if name in steps[0]}
    seconds = [step["step_seconds"] for step in steps]
    waits = [value for step in steps for name, value in step.items() if name.endswith("/data_wait")]
    samples = steps[-1]["consumed_samples"] - steps[0]["consumed_samples"]
    return medians | {
        "samples_per_second": samples / sum(seconds[1:]),
        "data_wait": sum(waits) / sum(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "steps": len(steps),
        "parameters": look.parameters,
        "te_modules": look.te_modules,
        "memory": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "estimate": _estimated(config, changes, device) / 2**30,
        "kernels": watch.kernels,
        "without_kernel": watch.without_kernel,
    }


def estimates(*, config: str, candidates: list[list[str]], of_device: str) -> list[int]:
    """Bytes of the fullest rank for each list of overrides, as `mimo-train check` estimates them.

    Args:
        of_device: the device of the run; this job needs none.
    """
    return [_estimated(config, ["data.shards=unread", *overrides], of_device) for overrides in candidates]


def _estimated(config: str, overrides: list[str], device: str) -> int:
    from mimo_train.config.compose import load
    from mimo_train.layout.run import resolve
    from mimo_train.preflight.dry_run.command import estimates

    return max(estimates(resolve(load(config, [*FIXED, f"run.device={device}", *overrides]))).values())


def pretrained(
    config: str, overrides: list[str], run_dir: str, device: str, te: bool, look: "_Look | None" = None, callbacks=()
) -> None:
    """Run `pretrain` with layers of Transformer Engine, or of torch, whatever is installed."""
    from mimo_train.config.compose import load
    from mimo_train.training.pretrain import pretrain

    choose_layers(te)
    cfg = load(config, [*FIXED, f"run.dir={run_dir}", f"run.device={device}", *overrides])
    pretrain(cfg, callbacks=callbacks, pre_wrap_hook=look)


def choose_layers(te: bool) -> None:
    """Overrule the choice that the program makes by what is installed, in every module that asks."""
    if te:
        import transformer_engine.pytorch  # noqa: F401 (where it is broken, its error is the clearest)
    from mimo_train.models import layers

    original, chosen = layers.use_transformer_engine, lambda kind: te
    for name, module in list(sys.modules.items()):
        if name.startswith("mimo_train.") and getattr(module, "use_transformer_engine", None) is original:
            module.use_transformer_engine = chosen


@contextmanager
def quick_weights(device: str):
    """Let the device draw the weights of runs in the block: seconds, where the program's numbers, the same on every
    machine, take minutes for a billion parameters."""
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
    from benchmarks import against_transformers, turns

    for name in ("llama", "llava", "siglip"):
        import_module(f"transformers.models.{name}.modeling_{name}")
    gc.freeze()
    where = Path(folder)
    shards = write_images(where, image, [characters] * 64)
    changes = (*FIXED, *overrides, f"data.shards={shards}")
    case = against_transformers.Case(config, "", changes, device=device, recorded=recorded)
    # Importing Transformer Engine may ask for the device, which forked processes could then not use.
    prepare = functools.partial(choose_layers, te)
    with quick_weights(device), against_transformers.open_sides(case, where, compiled, prepare) as sides:
        blocks = turns.take_turns(sides, rounds, 1)
    reference, ours = blocks.values()
    return {
        "seconds": {name: turns.seconds(side, turns.WALL) for name, side in blocks.items()},
        "memory": {name: side[-1].memory for name, side in blocks.items()},
        "ratio": dataclasses.asdict(turns.ratio(ours, reference, turns.WALL)),
        "rounds": rounds,
    }


@contextmanager
def _counted_graphs(backend: str) -> Iterator[list]:
    """Yield a list that gets the graphs of layers that are compiled in the block, not those of small fusions."""
    from torch._dynamo.backends.registry import lookup_backend

    from mimo_train.models import dense_layer

    graphs: list = []

    def counting(graph: Any, inputs: list) -> Any:
        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs)

    with patch.object(dense_layer, "BACKEND", counting):
        yield graphs


class _Look:
    """Counts parameters, and modules of Transformer Engine, when the model has been built."""

    def __init__(self) -> None:
        self.te_modules = self.parameters = 0

    def __call__(self, model: list) -> list:
        for chunk in model:
            self.parameters += sum(parameter.numel() for parameter in chunk.parameters())
            for module in chunk.modules():
                bases = [base.__module__.partition(".")[0] for base in type(module).__mro__]
                self.te_modules += "transformer_engine" in bases
        return model


def _watch(last_step: int, device: str, profiled: bool) -> tuple[Any, type[Exception]]:
    """A callback that profiles the step after `last_step` and then ends the run, and the exception that it raises to do
    so: a run that ends as planned writes a checkpoint."""
    from torch.profiler import ProfilerActivity, profile

    from mimo_train.training.callbacks import Callback

    class Enough(Exception):
        """The run has gone far enough."""

    class Watch(Callback):
        kernels: list[dict[str, Any]] = []
        without_kernel: float | None = None

        def on_step_start(self, state):
            if state.train_state.step == last_step and not profiled:
                raise Enough
            if state.train_state.step == last_step:
                activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
                self.profiler = profile(activities=activities, acc_events=True)
                self.profiler.start()

        def on_step_end(self, state, result):
            if state.train_state.step == last_step + 1:
                self.profiler.stop()
                self.kernels = heaviest(self.profiler.key_averages(), device)
                if device == "cuda":
                    self.without_kernel = idle_share(kernel_times(self.profiler.events()))
                raise Enough

    return Watch(), Enough


def heaviest(averages: Any, device: str, count: int = 10) -> list[dict[str, Any]]:
    """The kernels of a profile that took most of the device's time; on a CPU the operators."""
    if device == "cuda":
        kernels = [each for each in averages if each.device_type.name == "CUDA" and not each.is_user_annotation]
        times = [(each.self_device_time_total, each) for each in kernels]
    else:
        times = [(each.self_cpu_time_total, each) for each in averages]
    total = sum(time for time, _ in times)
    times = sorted(times, key=lambda pair: -pair[0])[:count]
    return [{"name": each.key, "milliseconds": t / 1000, "share": t / total, "calls": each.count} for t, each in times]


def kernel_times(events: Any) -> list[tuple[float, float]]:
    """(start, end) of each kernel of a profile in microseconds; copies and fills of the device count too."""
    kernels = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    return [(event.time_range.start, event.time_range.end) for event in kernels]


def idle_share(times: list[tuple[float, float]]) -> float | None:
    """Share of the time between the first kernel's start and the last one's end in which none runs."""
    if not times:
        return None
    times = sorted(times)
    first = reached = times[0][0]
    idle = 0.0
    for begin, end in times:
        idle += max(0.0, begin - reached)
        reached = max(reached, end)
    return idle / (reached - first)


def lengths(samples: int, longest: int, varied: bool) -> list[int]:
    """Characters of each text: `longest`, or drawn from a log-normal distribution with a median of a sixth of that, as
    answers to instructions vary: most are short, few are long."""
    draw = random.Random(1)
    drawn = [min(longest, max(1, round(longest / 6 * draw.lognormvariate(0, 0.9)))) for _ in range(samples)]
    return drawn if varied else [longest] * samples


def write_images(folder: Path, size: int, characters: list[int]) -> Path:
    """Write a shard of images of random blots, each with a text of the given number of characters."""
    import numpy
    from PIL import Image

    noise, letters = numpy.random.default_rng(0), random.Random(0)
    shards = folder / "images"
    shards.mkdir(parents=True)
    with tarfile.open(shards / "images-000000.tar", "w") as shard:
        for number, length in enumerate(characters):
            file = io.BytesIO()
            blots = Image.fromarray(noise.integers(0, 256, (12, 12, 3), dtype=numpy.uint8))
            blots.resize((size, size)).save(file, "JPEG")
            text = "".join(letters.choices(string.ascii_lowercase + " ", k=length)).encode()
            for extension, content in (("jpg", file.getvalue()), ("txt", text)):
                member = tarfile.TarInfo(f"{number:06d}.{extension}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    return shards


def _lines(run_dir: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]

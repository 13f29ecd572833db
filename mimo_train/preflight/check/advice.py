"""Advice: a layout that the planner predicts to be clearly faster."""

import os
from dataclasses import dataclass
from pathlib import Path

from mimo_train.config.errors import ConfigError
from mimo_train.estimate.devices import DEVICES, Device, processor
from mimo_train.estimate.memory import run_memory
from mimo_train.layout.run import Run
from mimo_train.preflight.check.report import Report
from mimo_train.preflight.plan.candidate import Candidate
from mimo_train.preflight.plan.predict import Prediction
from mimo_train.preflight.plan.report import of_numbers, quoted, seconds_text
from mimo_train.preflight.plan.search import Proposal, Request, compare, require_sound

WORTH = 0.2
"""Share of a step that another layout must save. Each prediction may be off by a tenth, even with measured rates
(benchmarks/planner_demo_cpu2_2026-11-23.md)."""
DRIVER = Path("/proc/driver/nvidia")
"""Folder that exists with a driver for NVIDIA GPUs."""
WINDOWS_GPU = Path("/dev/dxg")
"""The same on Linux inside Windows."""
GPU, GPUS_OF_NODE = "h100", 8
"""Defaults of `mimo-train plan`."""
_SMALL = 0.03


@dataclass(frozen=True)
class Advice:
    """A layout to choose instead."""

    device: Device
    """The device of both predictions."""
    own: Candidate
    """The layout of the run."""
    now: Prediction
    better: Proposal


def add_advice(report: Report, run: Run, vocab: int, media_per_sample: dict[str, float]) -> None:
    """Add a note if there is `advice_of` the run."""
    advice = advice_of(run, vocab, media_per_sample)
    if advice is not None:
        report.notes.append(_text(run, advice))


def advice_of(run: Run, vocab: int, media_per_sample: dict[str, float]) -> Advice | None:
    """Return another layout of as many ranks, or fewer, that is predicted to be clearly faster.

    None for one rank, for `launch.layouts`, which choose layouts by nodes, and if only some separate encoders share
    ranks, which the planner does not support.

    Args:
        run: a run without faults.
        vocab: rows of the embedding.
        media_per_sample: media items in a sample, by encoder; 1 for missing encoders.
    """
    cfg = run.cfg
    if run.layout.world_size == 1 or cfg.launch.layouts:
        return None
    media = {name: media_per_sample.get(name, 1.0) for name in cfg.encoders}
    device, node = hardware(run, vocab, media)
    own = Candidate.of(cfg, node)
    try:
        require_sound(cfg)  # on one rank too, where plans start
    except ConfigError:
        return None
    if own is None:
        return None
    now, better = compare(cfg, own, Request(own.gpus, node, device, vocab, media), 1 - WORTH)
    return None if better is None else Advice(device, own, now, better)


def hardware(run: Run, vocab: int, media: dict[str, float]) -> tuple[Device, int]:
    """Return (the device that the run is probably for, number of devices of a node). `run.device` decides. `auto` is
    the CPU if this machine has fewer GPUs than ranks, and memory for all of them."""
    placement = run.cfg.placement
    ranks = run.layout.processes[-1] + 1
    if _is_for_cpu(run, ranks, vocab, media):
        node = placement.ranks_per_node or ranks
        return processor(_memory_of_machine() / min(node, ranks), _cores()), node
    return DEVICES[GPU], placement.ranks_per_node or GPUS_OF_NODE


def _is_for_cpu(run: Run, ranks: int, vocab: int, media: dict[str, float]) -> bool:
    device, node = run.cfg.run.device, run.cfg.placement.ranks_per_node or ranks
    if device != "auto":
        return device == "cpu"
    if ranks > node or _gpus(DRIVER) >= ranks:
        return False
    stages = run_memory(run, vocab, media)
    return sum(stage.memory.total * len(stage.ranks) for stage in stages) <= _memory_of_machine()


def has_gpu_driver() -> bool:
    """True if this machine has a driver for NVIDIA GPUs."""
    return DRIVER.exists() or WINDOWS_GPU.exists()


def _gpus(driver: Path) -> int:
    try:
        return len(os.listdir(driver / "gpus"))
    except OSError:
        return 0


def _memory_of_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _text(run: Run, advice: Advice) -> str:
    own, device, better = advice.own, advice.device, advice.better.candidate
    seconds, other = advice.now.seconds, advice.better.prediction.seconds
    idle = ", ".join(f"{name} {share:.0%}" for name, share in advice.now.idle.items() if share >= _SMALL)
    waits = f" (idle: {idle})" if idle else ""
    where = f" on {better.world_size:,} of them" if better.world_size < own.gpus else ""
    overrides = " ".join(quoted(one) for one in better.overrides(run.cfg))
    on = f"{own.gpus:,} {'' if device.cores else 'x '}{device.name}"
    return (
        f"this layout is predicted to take {seconds_text(seconds)} a step on {on}{waits}, and "
        f"{seconds_text(other)}{where}, {1 - other / seconds:.0%} less, with: {overrides} (as `mimo-train plan` "
        "reckons, by assumed rates and full rows: docs/planner.md)"
    ) + "".join(f"; {text}" for text in [of_numbers(run.cfg)] if text)

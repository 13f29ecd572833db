"""Profilers on chosen steps and ranks: torch's, NVIDIA's nsys, and the history of the CUDA allocator.

They write to `run.dir`/profile/rank_N. A run that ends before the last of `profiling.steps` keeps what it recorded.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.utils import configure_nvtx_profiling
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from mimo_train.config.errors import ConfigError
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_log import ProfilingConfig
from mimo_train.logging.runtime import start_memory_history_recording
from mimo_train.parallel import device


class NsysCapture:
    """The range that `nsys profile --capture-range=cudaProfilerApi` records. NVTX ranges name torch's operators and the
    functions that Megatron-Core marks."""

    def __init__(self) -> None:
        self._ranges = torch.autograd.profiler.emit_nvtx()
        self.is_open = False

    def __enter__(self) -> "NsysCapture":
        device.start_cuda_profiler()
        self._ranges.__enter__()
        configure_nvtx_profiling(True)
        self.is_open = True
        return self

    def __exit__(self, *exception: object) -> None:
        self.is_open = False
        configure_nvtx_profiling(False)
        self._ranges.__exit__(*exception)
        device.stop_cuda_profiler()


class StepProfiler:
    """The profilers of this rank; `torch` is torch's while it records, else None. Steps are counted from 1."""

    def __init__(self, cfg: ConfigContainer, run_dir: Path, kind: str):
        """Create it before the model, so that the allocator's history includes the model; `kind` is cuda or cpu. Raises
        ConfigError if a profiler needs CUDA and the run has none."""
        faults = list(cfg.profiling.faults(kind, cfg.train.iters))
        if faults:
            raise ConfigError(faults)
        self._folder, self._recorded = folder_of_rank(run_dir), cfg.profiling.record
        self._first, self._last = cfg.profiling.steps
        self._records = records(cfg.profiling)
        # With the CUDA activity the profiler would warn on a CPU run.
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kind == "cuda" else [])]
        self._first_step = self._step = 0
        self.torch: profile | None = None
        self._nvtx: NsysCapture | None = None
        self._has_history = self._records and "memory_history" in cfg.profiling.record
        if self._has_history:
            start_memory_history_recording(cfg.profiling)

    @property
    def nvtx(self) -> NsysCapture | None:
        """The capture of nsys while it records, else None."""
        return self._nvtx if self._nvtx is not None and self._nvtx.is_open else None

    def before_step(self, step: int) -> None:
        """Start the profilers within the chosen steps, or mark the step in a running recording."""
        self._step = step
        if self.torch is not None:
            self.torch.step()
        if not self._records or self._first_step or not self._first <= step <= self._last:
            return
        self._first_step = step
        if "torch" in self._recorded:
            # With a schedule, the profiler marks steps in the trace.
            self.torch = profile(
                activities=self._activities,
                schedule=lambda _: ProfilerAction.RECORD,
                on_trace_ready=self._write_trace,
                acc_events=True,
            )
            self.torch.step_num = step
            self.torch.start()
        if "nsys" in self._recorded:
            self._nvtx = NsysCapture()
            self._nvtx.__enter__()

    def after_step(self, step: int) -> None:
        """Stop the profilers after the last of `profiling.steps`."""
        if step == self._last:
            self._end()
            if self._has_history:
                write_memory_snapshot(self._folder, step)

    def close(self) -> None:
        """Stop active profilers of a run that ended or failed before the last of `profiling.steps`."""
        self._end()
        if self._has_history and 0 < self._step < self._last:
            write_memory_snapshot(self._folder, self._step)
        self._has_history = False

    def _end(self) -> None:
        if self.torch is not None:
            self.torch.stop()
        if self.nvtx is not None:
            self.nvtx.__exit__(None, None, None)

    def _write_trace(self, recorded: profile) -> None:
        self.torch = None
        self._folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self._folder / f"steps_{self._first_step}_{self._step}.pt.trace.json.gz"))


def records(profiling: ProfilingConfig) -> bool:
    """True if this rank is one of `profiling.ranks`."""
    return dist.get_rank() in profiling.ranks


def write_memory_snapshot(folder: Path, step: int) -> None:
    """Write the allocator's history up to `step`, for https://pytorch.org/memory_viz, and stop recording."""
    folder.mkdir(parents=True, exist_ok=True)
    device.write_memory_history(folder / f"memory_step_{step}.pickle")


def folder_of_rank(run_dir: Path) -> Path:
    """Return the folder of this rank's profiles."""
    return run_dir / "profile" / f"rank_{dist.get_rank()}"

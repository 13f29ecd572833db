"""Config of a run's metrics and profiles."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, is_installed, key, value_faults

TRACKERS = {
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "'mimo-train[track]'"),
    "comet": ("comet_ml", "'mimo-train[track]'"),
}
"""The module that a tracker needs, and its pip requirement."""


@dataclass
class LogConfig(Section):
    """Destinations of metrics, besides metrics.jsonl and the console."""

    tensorboard: bool = True
    """Write TensorBoard events. See docs/metrics.md#where-the-numbers-go."""
    wandb: bool = False
    """Write to Weights & Biases."""
    mlflow: bool = False
    """Write to MLflow. Needs the extra `track`."""
    comet: bool = False
    """Write to Comet. Needs the extra `track`."""
    metrics: list[str] = key(
        factory=list,
        choices=("params_norm", "grad_norms", "num_zeros_in_grad", "memory", "router_losses_per_layer", "straggler"),
    )
    """Further metrics: `params_norm`, `grad_norms`, `num_zeros_in_grad`, `memory`, `router_losses_per_layer` (of
    experts), `straggler`. See docs/metrics.md."""
    module_times: bool = True
    """Log where the time of each module goes. See docs/metrics.md#where-the-time-goes."""
    peak_tflops: float = key(0.0, at_least=0)
    """Dense peak of a device in TFLOP/s, for model FLOPs utilisation; 0: that of the device, if it is known, in
    `train.precision` or fp8. See docs/metrics.md#flops."""
    throughput_window: int = key(0, at_least=0, at_most=1_000_000)
    """Steps of a rolling mean of batches, samples and tokens per second; 0: off."""
    runtime_unit: str = key("", choices=("", "seconds", "minutes", "hours", "days"))
    """Log elapsed and remaining time in `seconds`, `minutes`, `hours` or `days`; empty: off."""

    def faults(self, experts: int) -> Iterator[Fault]:
        """Yield invalid values, and trackers whose library is not installed; `experts`: in a layer of the language
        model."""
        yield from value_faults(self, "log")
        for name, (module, install) in TRACKERS.items():
            if getattr(self, name) and not is_installed(module):
                yield Fault(
                    f"log.{name}", f"{module} is not installed. Run `pip install {install}`, or set it to false"
                )
        if "router_losses_per_layer" in self.metrics and not experts:
            yield Fault(
                "log.metrics",
                "router_losses_per_layer requires experts, but modules.language.llm.num_experts is 0. Remove it, or "
                "pick a mixture of experts such as llm@modules.language.llm=gpt_tiny_moe",
            )


@dataclass
class ProfilingConfig(Section):
    """The profilers, and the steps and ranks that they record."""

    torch: bool = False
    """Write a trace of torch's profiler to `profile/` of the run."""
    nsys: bool = False
    """NVTX ranges and cudaProfilerStart/Stop, for `nsys profile --capture-range=cudaProfilerApi`. Needs CUDA."""
    memory_history: bool = False
    """Write a snapshot of the CUDA allocator with its history at `step_end` to `profile/`. Needs CUDA."""
    step_start: int = key(10, at_least=1)
    """First recorded step, counted from 1."""
    step_end: int = key(12, at_least=1)
    """Last recorded step. At least `step_start`."""
    ranks: list[int] = key(factory=lambda: [0], at_least=0, at_most=2**20)
    """Ranks that record."""

    def faults(self, device: str, iters: int, world_size: int | None = None) -> Iterator[Fault]:
        """Yield the faults of enabled profilers. `device`: cuda or cpu, or `run.device`; `iters`: `train.iters`;
        `world_size`: processes of the run, if known.
        """
        yield from value_faults(self, "profiling")
        wanted = [name for name in ("torch", "nsys", "memory_history") if getattr(self, name)]
        if not wanted:
            return
        for name in wanted:
            if name != "torch" and device == "cpu":
                yield Fault(
                    f"profiling.{name}",
                    f"needs CUDA, and this run is on the CPU: set profiling.{name}=false, or use a GPU",
                )
        if self.torch and self.nsys:
            yield Fault("profiling.nsys", "nsys and torch's profiler cannot record at once: set profiling.torch=false")
        if self.step_end < self.step_start:
            yield Fault(
                "profiling.step_end", f"must be at least profiling.step_start {self.step_start}, is {self.step_end}"
            )
        if self.step_start > iters:
            yield Fault(
                "profiling.step_start",
                f"is {self.step_start}, but the run ends at train.iters {iters}: nothing would be recorded; lower it",
            )
        ranks = self.ranks
        if not ranks or (world_size is not None and max(ranks) >= world_size):
            allowed = "0 or more" if world_size is None else f"from 0 to {world_size - 1}"
            yield Fault("profiling.ranks", f"must name at least one rank, each {allowed}, is {ranks}")

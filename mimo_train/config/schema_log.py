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
    """Further metrics: `params_norm`, `grad_norms`, `num_zeros_in_grad`, `memory`, `router_losses_per_layer`,
    `straggler`. See docs/metrics.md."""
    peak_tflops: float = key(0.0, at_least=0)
    """Dense peak of a device in TFLOP/s; 0: from our table, if listed. See docs/metrics.md#flops."""
    throughput_window: int = key(0, at_least=0, at_most=1_000_000)
    """Steps of a rolling mean of throughput."""
    runtime_unit: str = key("", choices=("", "seconds", "minutes", "hours", "days"))
    """Log elapsed and remaining time in `seconds`, `minutes`, `hours` or `days`."""

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

    record: list[str] = key(factory=list, choices=("torch", "nsys", "memory_history"))
    """`torch` (a trace), `nsys` (NVTX ranges), `memory_history` (of the CUDA allocator). See
    docs/performance.md#profiling."""
    steps: list[int] = key(factory=lambda: [10, 12], at_least=1)
    """First and last recorded step, counted from 1."""
    ranks: list[int] = key(factory=lambda: [0], at_least=0, at_most=2**20)
    """Ranks that record."""

    def faults(self, device: str, iters: int, world_size: int | None = None) -> Iterator[Fault]:
        """Yield the faults of enabled profilers. `device`: cuda or cpu, or `run.device`; `iters`: `train.iters`;
        `world_size`: processes of the run, if known.
        """
        yield from value_faults(self, "profiling")
        if not self.record:
            return
        if device == "cpu" and (names := [name for name in self.record if name != "torch"]):
            yield Fault("profiling.record", f"{names[0]} requires CUDA, and this run is on the CPU. Remove it")
        if {"torch", "nsys"} <= set(self.record):
            yield Fault("profiling.record", "torch and nsys cannot record at once. Remove one of them")
        if len(self.steps) != 2 or self.steps[1] < self.steps[0]:
            yield Fault("profiling.steps", f"must be the first and the last step, [10, 12], is {self.steps}")
        elif self.steps[0] > iters:
            yield Fault(
                "profiling.steps", f"begins at {self.steps[0]}, but the run ends at train.iters {iters}. Lower it"
            )
        ranks = self.ranks
        if not ranks or (world_size is not None and max(ranks) >= world_size):
            allowed = "0 or more" if world_size is None else f"from 0 to {world_size - 1}"
            yield Fault("profiling.ranks", f"must name at least one rank, each {allowed}, is {ranks}")

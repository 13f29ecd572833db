"""Config of what a run says about itself: metrics and profiles."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, key, library_faults, value_faults


@dataclass
class LogConfig(Section):
    """Where metrics go, besides metrics.jsonl and the console."""

    tensorboard: bool = True
    """TensorBoard events in `tensorboard/` of the run's folder."""
    wandb: bool = False
    """Weights & Biases, project `WANDB_PROJECT` or `mimo-train`; offline in the run's folder when no key is
    configured."""
    mlflow: bool = False
    """MLflow, at `MLFLOW_TRACKING_URI`, else in `mlflow/` of the run's folder. Needs the extra `track`."""
    comet: bool = False
    """Comet; offline in `comet/` of the run's folder when no key is configured. Needs the extra `track`."""
    module_times: bool = True
    """Seconds of compute, bubble, bridge wait, data wait, reduction and optimizer, for every module. See
    docs/metrics.md#where-the-time-goes."""
    peak_tflops: float = key(0.0, at_least=0)
    """Dense peak of one device in TFLOP/s, for the model FLOPs utilisation; 0: that of the device in
    `train.precision`, in fp8 for modules with `fp8`, if it is known. See docs/metrics.md#flops."""
    params_norm: bool = False
    """L2 norm of all parameters; one more message at a logging step."""
    grad_norms: bool = False
    """L2 norm of the gradient of every parameter, after clipping; one more message at a logging step."""
    num_zeros_in_grad: bool = False
    """Number of gradient elements that are zero."""
    memory: bool = False
    """Statistics of the CUDA allocator in 10^9 bytes, the largest over ranks; without CUDA, resident memory."""
    throughput_window: int = key(0, at_least=0, at_most=1_000_000)
    """Steps of a rolling mean of batches, samples and tokens per second; 0: not logged."""
    runtime_unit: str = key("", choices=("", "seconds", "minutes", "hours", "days"))
    """`seconds`, `minutes`, `hours` or `days`: log elapsed and remaining time in this unit; empty: not logged."""
    router_losses_per_layer: bool = False
    """The load-balancing loss and the z-loss of every layer with experts, besides their means over layers."""
    straggler: bool = False
    """Name the slowest and the fastest rank of every module."""

    def faults(self, experts: int) -> Iterator[Fault]:
        """Values that cannot be, and trackers whose library is not installed.

        Args:
            experts: of a layer of the language model.
        """
        yield from value_faults(self, "log")
        yield from library_faults(self, "log", TRACKERS)
        if self.router_losses_per_layer and not experts:
            yield Fault(
                "log.router_losses_per_layer",
                "there are no routers, modules.language.llm.num_experts is 0: set it to false, or pick a mixture of "
                "experts such as llm@modules.language.llm=gpt_tiny_moe",
            )


TRACKERS = {
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "'mimo-train[track]'"),
    "comet": ("comet_ml", "'mimo-train[track]'"),
}
"""Modules that keys of `log` need when they are true, and what pip installs them by."""


@dataclass
class ProfilingConfig(Section):
    """What is recorded of which steps on which ranks."""

    torch: bool = False
    """Trace of torch's profiler, in `profile/` of the run's folder."""
    nsys: bool = False
    """NVTX ranges and cudaProfilerStart/Stop, for a run under `nsys profile --capture-range=cudaProfilerApi`. Needs
    CUDA."""
    memory_history: bool = False
    """Snapshot of the CUDA allocator with its history at `step_end`, in `profile/` of the run's folder. Needs CUDA."""
    step_start: int = key(10, at_least=1)
    """First step that is recorded; steps are counted from 1."""
    step_end: int = key(12, at_least=1)
    """Last step that is recorded. At least `step_start`."""
    ranks: list[int] = key(factory=lambda: [0], at_least=0, at_most=2**20)
    """Ranks that record."""
    record_shapes: bool = False
    """Whether the trace holds the shapes of operands."""

    def faults(self, device: str, iters: int, world_size: int | None = None) -> Iterator[Fault]:
        """What is wrong, as far as a profiler is on.

        Args:
            device: `run.device`, or what it has become: cuda or cpu.
            iters: `train.iters`.
            world_size: processes of the run, if they are known.
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

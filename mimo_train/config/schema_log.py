"""Config of what a run says about itself: metrics and profiles. Imports no torch."""

from dataclasses import dataclass, field


@dataclass
class LogConfig:
    """Where metrics go, besides metrics.jsonl and the console."""

    tensorboard: bool = True
    """TensorBoard events in `run.dir`/tensorboard."""
    wandb: bool = False
    """Weights & Biases; offline in `run.dir` when no key is configured."""
    mlflow: bool = False
    """MLflow, at MLFLOW_TRACKING_URI, else in `run.dir`/mlflow."""
    comet: bool = False
    """Comet; offline in `run.dir`/comet when no key is configured."""
    module_times: bool = True
    """Seconds of compute, bubble, bridge wait, data wait and optimizer for every module."""
    peak_tflops: float = 0.0
    """Dense peak of one device in TFLOP/s, for the model FLOPs utilisation; 0: that of the device if it is known."""
    params_norm: bool = False
    """L2 norm of all parameters."""
    grad_norms: bool = False
    """L2 norm of the gradient of every layer."""
    num_zeros_in_grad: bool = False
    """Number of gradient elements that are zero."""
    memory: bool = False
    """Statistics of the CUDA allocator, the largest over ranks."""
    throughput_window: int = 0
    """Steps of a rolling mean of batches, samples and tokens per second; 0: not logged."""
    runtime_unit: str = ""
    """seconds, minutes, hours or days: log elapsed and remaining time in this unit; empty: not logged."""
    straggler: bool = False
    """Name the slowest and the fastest rank of every module."""


@dataclass
class ProfilingConfig:
    """What is recorded of which steps on which ranks."""

    torch: bool = False
    """Trace of torch.profiler in `run.dir`/profile."""
    nsys: bool = False
    """NVTX ranges and cudaProfilerStart/Stop, for a run under `nsys profile --capture-range=cudaProfilerApi`."""
    memory_history: bool = False
    """Snapshot of the CUDA allocator with its history in `run.dir`/profile, at `step_end`."""
    step_start: int = 10
    """First step that is recorded."""
    step_end: int = 12
    """Last step that is recorded."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that record."""
    record_shapes: bool = False
    """Whether the trace holds the shapes of operands."""

"""What is wrong with `profiling`. Imports no torch."""

from collections.abc import Iterator

from mimo_train.config.schema import ConfigContainer, Fault


def profiling_faults(cfg: ConfigContainer, device: str, world_size: int | None = None) -> Iterator[Fault]:
    """Faults of `profiling`, as far as a profiler is on.

    Args:
        device: `run.device`, or what it has become: cuda or cpu.
        world_size: processes of the run, if they are known.
    """
    profiling, iters = cfg.profiling, cfg.train.iters
    wanted = [name for name in ("torch", "nsys", "memory_history") if getattr(profiling, name)]
    if not wanted:
        return
    for name in wanted:
        if name != "torch" and device == "cpu":
            yield Fault(
                f"profiling.{name}", f"needs CUDA, and this run is on the CPU: set profiling.{name}=false, or use a GPU"
            )
    if profiling.torch and profiling.nsys:
        yield Fault("profiling.nsys", "nsys and torch's profiler cannot record at once: set profiling.torch=false")
    if profiling.step_end < profiling.step_start:
        yield Fault(
            "profiling.step_end",
            f"must be at least profiling.step_start {profiling.step_start}, is {profiling.step_end}",
        )
    if profiling.step_start > iters:
        yield Fault(
            "profiling.step_start",
            f"is {profiling.step_start}, but the run ends at train.iters {iters}: nothing would be recorded; lower it",
        )
    ranks = profiling.ranks
    if not ranks or min(ranks) < 0 or (world_size is not None and max(ranks) >= world_size):
        allowed = "0 or more" if world_size is None else f"from 0 to {world_size - 1}"
        yield Fault("profiling.ranks", f"must name at least one rank, each {allowed}, is {ranks}")

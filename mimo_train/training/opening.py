"""The log of a run that begins or goes on: its files, and what the reader hears first."""

import io
import sys
from dataclasses import replace

import torch.distributed as dist

from data.storage.url import Place
from mimo_train.checkpoint.checkpointer import Checkpointer
from mimo_train.config.compose import to_yaml
from mimo_train.launch.processes import is_on_first_node
from mimo_train.layout.kernels import compile_remark
from mimo_train.layout.run import Run, warm_up_warnings
from mimo_train.logging import progress
from mimo_train.logging.console import Console, view_on
from mimo_train.logging.console_relay import ReceivedView, SentView
from mimo_train.logging.metrics_log import build_metrics_log
from mimo_train.parallel import device as devices
from mimo_train.training.data_setup import DataEnd
from mimo_train.training.step.state import GlobalState, TrainState


def open_state(
    run: Run,
    given: Run,
    train_state: TrainState,
    start_time: float,
    resumed_from: Place | None,
    checkpointer: Checkpointer,
    stops: DataEnd | None,
) -> GlobalState:
    """The state of the run, with the log open on the rank that writes it. `given` is the run as its config has it, and
    `stops` where the data ends it."""
    data_ends = None if stops is None else stops.step
    state = GlobalState(run, train_state, start_time=start_time, data_ends=data_ends)
    rank, step = dist.get_rank(), train_state.step
    is_remote = not is_on_first_node(run.layout, run.layout.logging_rank)
    if is_remote and rank == 0:
        local = view_on(sys.stdout or io.StringIO(), state.last_step, step)
        return replace(state, console=Console(state.last_step, step, view=ReceivedView(devices.meeting(), local)))
    if rank != run.layout.logging_rank:
        return state
    (run.dir / "config.yaml").write_text(to_yaml(given.cfg))
    metrics = build_metrics_log(run.cfg, run.dir, resumed_step=step)
    console = Console(state.last_step, step, view=SentView(devices.meeting()) if is_remote else None)
    flops = train_state.floating_point_operations_so_far
    progress.job_started(run.dir, world_size=run.layout.world_size, step=step, flops=flops)
    for loaded in checkpointer.loaded:
        console.message(str(loaded))
    for damaged in checkpointer.set_aside:
        progress.checkpoint_set_aside(run.dir, path=damaged.now, why=damaged.why)
        console.message(str(damaged))
    if stops is not None:
        console.message(str(stops))
    for warning in warm_up_warnings(run.cfg, state.last_step):
        console.message(f"warning: {warning}")
    if step < state.last_step and (remark := compile_remark(run.cfg)):
        console.message(remark)
    if resumed_from is not None:
        console.message(f"continues from {resumed_from}, step {step}")
    if checkpointer.unread:
        console.message(f"warning: {checkpointer.unread}")
    if checkpointer.otherwise:
        console.message(f"from here on numbers are others than so far: {checkpointer.otherwise}")
    return replace(state, metrics=metrics, console=console)

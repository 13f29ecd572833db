"""In-process restart: a run that fails on a rank restarts inside its processes, from its newest checkpoint.

nvidia-resiliency-ext monitors the ranks, aborts their collectives and calls the run again. This saves the start of new
processes: interpreter, imports, CUDA contexts and the file cache.
"""

import gc
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from mimo_train.config.schema_run import RunConfig
from mimo_train.parallel import device


def with_restarts(life: Callable[[dist.Store | None], int], run: RunConfig) -> Callable[[], int]:
    """Wrap `life`, which runs from the newest checkpoint to the end, so that it restarts after failures.

    `life` receives the store for the rendezvous; None means the address in the environment. It restarts at most
    `run.inprocess_restarts` times, if it raises on any rank or a rank's interpreter hangs for `run.timeout_minutes`. A
    process that has died cannot restart from inside: then all processes end.
    """
    restarts = run.inprocess_restarts
    if restarts == 0:
        return partial(life, None)
    from nvidia_resiliency_ext import inprocess

    class Finalize(inprocess.finalize.Finalize):
        """Clears the state that the failed attempt left in this process; its process groups are already destroyed."""

        def __call__(self, frozen_state: inprocess.state.FrozenState) -> inprocess.state.FrozenState:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_global_memory_buffer()
            for instance in gc.get_objects():
                # Not isinstance, which reads `__class__`: some libraries' objects import modules then.
                if issubclass(type(instance), DistributedDataParallel):
                    # The garbage collector does not see the graph nodes, whose hooks hold the model.
                    for node in instance.grad_accs:
                        node.register_hook(print).hooks_dict_ref().clear()
            return frozen_state

    last_error: list[Exception] = []

    def one_life(call_wrapper: inprocess.CallWrapper = None) -> int:
        # The wrapper has just released the last attempt's error, and the objects in its frames.
        gc.collect()
        device.release_cached_memory()
        # The wrapper's own connection is busy waiting for the status of other ranks.
        meeting = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(f"mimo_train/life_{call_wrapper.iteration}", meeting)
        try:
            return life(store)
        except Exception as error:
            if call_wrapper.iteration == restarts:
                last_error.append(error)
            else:
                traceback.print_exc()
            raise

    def lives() -> int:
        _be_reachable()
        patience = timedelta(minutes=run.timeout_minutes)
        wrapper = inprocess.Wrapper(
            initialize=inprocess.initialize.RetryController(
                max_iterations=restarts + 1, min_world_size=int(os.environ["WORLD_SIZE"])
            ),
            finalize=Finalize(),
            soft_timeout=patience,
            hard_timeout=1.5 * patience,
            barrier_timeout=2 * patience,
            completion_timeout=2 * patience,
        )
        try:
            return wrapper(one_life)()
        except inprocess.exception.RestartAbort:
            if last_error:
                raise last_error[0] from None
            raise

    return lives


def _be_reachable() -> None:
    """Set the rendezvous variables for a single process that torchrun did not start."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        os.environ.setdefault(name, value)

"""Runs that are there at once and train in turn, one step at a time: what makes this machine slower, now and then, does
so for all of them.

Ranks are forked from this process, which has imported the program (`import_program`). A rank whose run's turn it is not
waits for a pipe, and takes no time of a processor.
"""

import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from mimo_train.config.schema import ConfigContainer
from mimo_train.layout.ranks import lay_out

START_SECONDS = 180
"""After which a run that has not begun, or a step that has not ended, is given up."""


class Ranks:
    """Processes that call a function each, `function(pipe, *arguments)`, as the ranks of one world.

    Raises:
        RuntimeError: a rank failed, or took too long; of `told`.
    """

    def __init__(self, function: Callable[..., Any], world: int, *arguments: Any):
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
            process = context.Process(target=_rank, args=(theirs, place, function, arguments), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        port = self._pipes[0].recv()
        for pipe in self._pipes[1:]:
            pipe.send(port)

    def tell(self, what: Any = None) -> None:
        """Send to all."""
        for pipe in self._pipes:
            pipe.send(what)

    def told(self) -> list[Any]:
        """What each rank sends next, in the order of ranks."""
        found: dict[Connection, Any] = {}
        deadline = time.monotonic() + START_SECONDS
        while len(found) < len(self._pipes):
            ready = wait([pipe for pipe in self._pipes if pipe not in found], max(0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"{len(self._pipes) - len(found)} ranks took more than {START_SECONDS} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    good, found[pipe] = pipe.recv()
                except EOFError:
                    good, found[pipe] = False, "a rank has died"
                if not good:
                    raise RuntimeError(found[pipe])
        return [found[pipe] for pipe in self._pipes]

    def end(self) -> None:
        """Kill them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _rank(pipe: Connection, place: dict[str, Any], function: Callable[..., Any], arguments: tuple) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)  # none outlives the benchmark
    # The store is that of the first rank: a process that forks must have no thread, which may hold a lock meanwhile.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if place["RANK"] == 0 else None
    if store is not None:
        pipe.send(store.port)
    place["MASTER_PORT"] = store.port if store is not None else pipe.recv()
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="localhost")
    # As under torchrun: the store is another process's, a rank only joins it.
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # for as long as the process lives
    try:
        function(pipe, *arguments)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)  # without waiting for peers


def import_program() -> None:
    """Before the first rank is forked, so that none imports it for itself."""
    importlib.import_module("mimo_train.training.pretrain")
    gc.freeze()  # what is imported is no garbage: collections in ranks would only copy its pages


def _train(pipe: Connection, cfg: ConfigContainer) -> None:
    from mimo_train.training.callbacks import Callback
    from mimo_train.training.pretrain import pretrain

    class InTurn(Callback):
        """Begins a step when it is told to, and says how many seconds of a processor the rank took for it."""

        began = 0.0

        def on_train_start(self, state: Any, model: Any) -> None:
            pipe.send((True, 0.0))

        def on_step_start(self, state: Any) -> None:
            pipe.recv()
            self.began = time.process_time()

        def on_step_end(self, state: Any, result: Any) -> None:
            pipe.send((True, time.process_time() - self.began))

    pretrain(cfg, callbacks=[InTurn()])


@contextmanager
def started(cfg: ConfigContainer) -> Iterator[Ranks]:
    """A run on this machine, before its first step."""
    ranks = Ranks(_train, lay_out(cfg).world_size, cfg)
    try:
        ranks.told()
        yield ranks
    finally:
        ranks.end()


def step(ranks: Ranks) -> tuple[float, float]:
    """Seconds of one step of a run, and seconds of processors that its ranks took for it."""
    began = time.perf_counter()
    ranks.tell()
    processors = sum(ranks.told())
    return time.perf_counter() - began, processors


def in_processes(function: Callable[..., Any], number: int, *arguments: Any) -> list[Any]:
    """What `function(*arguments)` gives in as many processes at once, each a world of its own."""
    alone = [Ranks(_once, 1, function, arguments) for _ in range(number)]
    try:
        for ranks in alone:
            ranks.tell()
        return [found for ranks in alone for found in ranks.told()]
    finally:
        for ranks in alone:
            ranks.end()


def _once(pipe: Connection, function: Callable[..., Any], arguments: tuple) -> None:
    pipe.recv()
    pipe.send((True, function(*arguments)))


@contextmanager
def working_in_a_temporary_folder() -> Iterator[None]:
    """A block, for what runs write."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            yield
        finally:
            os.chdir(before)

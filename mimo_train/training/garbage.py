"""Garbage collection on all ranks at once, so that no rank waits for another's collector in the middle of a step."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def manual_garbage_collection(interval: int) -> Iterator[None]:
    """Turn off Python's own collector inside the block if `interval` (`train.manual_gc_interval`) is above 0.

    Objects alive at the start live for the whole run, so they are frozen and never scanned again.
    """
    if interval < 1:
        yield
        return
    was_on = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def collect_when_due(interval: int, step: int) -> None:
    """Collect after every `interval` steps; 0: never."""
    if interval > 0 and step % interval == 0:
        gc.collect()

"""Python's collector of garbage, while a program imports what it is made of. Imports no torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_waits() -> Iterator[None]:
    """A block of imports, in which nothing is collected, and what they leave is not looked through afterwards.

    What is imported stays: the collector would look through all of it again and again, for a tenth of the time until a
    run's first step, and find next to nothing.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()

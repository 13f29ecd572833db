"""Memory that tensors on the CPU have left is taken by the next ones.

glibc (2.36) gives memory back to the system as soon as much of it is free at the end of its heap, and large pieces at
once. A step frees nearly all that it has taken, so that every step would have its pages made and cleared anew: up to
5 % of its time.
"""

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Of malloc.h."""
_OPTIONS = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**26}
"""Bytes: free ones before some go back; those that a heap is ahead."""
_LARGEST, _LARGEST_BEFORE = 2**30, 2**25
"""Bytes of a piece that is of the heap: now, and at most before glibc 2.35."""
_OF_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let this process keep what it frees. Not where there is no glibc, or where the environment has options for its
    `malloc`.

    Returns:
        Whether it is so.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(os.environ.get(name) for name in _OF_USER):
        return False
    if not any(mallopt(_MMAP_THRESHOLD, largest) for largest in (_LARGEST, _LARGEST_BEFORE)):
        return False
    return all(mallopt(option, value) for option, value in _OPTIONS.items())

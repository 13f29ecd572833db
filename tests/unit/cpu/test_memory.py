"""Memory that is freed stays with a process on the CPU, unless its user wants otherwise."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mimo_train.cpu import backend
from tests.hang import HANG_SECONDS

FAULTS = """
import ctypes, json, os, resource
import torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page is one fault
{install}
# Pages that are made for one tensor after the other.
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (2**20, 2**22, 2**20, 2**24, 2**22):
        torch.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps([faults() for _ in range(10)][-1]))  # where pieces come to lie is settled after some rounds
"""
PAGES = 4 * (2 * 2**20 + 2 * 2**22 + 2**24) // 4096


def _faults(install: str, **variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FAULTS.format(install=install)],
        env=environment | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    return json.loads(ran.stdout)


KEPT = "from mimo_train.cpu.backend import keep_freed_memory; keep_freed_memory()"


def test_pages_of_freed_tensors_are_used_again():
    assert _faults(KEPT) < PAGES / 100


def test_glibc_gives_them_back_by_itself():
    """Else `cpu/backend.py` need not keep them."""
    assert _faults("") > PAGES / 4


def test_a_run_on_the_cpu_keeps_them():
    assert _faults('from mimo_train.parallel.device import install; install("cpu", cpu_kernels=True)') < PAGES / 100


@pytest.mark.parametrize("name, value", [("MALLOC_TRIM_THRESHOLD_", "131072"), ("MALLOC_MMAP_THRESHOLD_", "131072")])
def test_variables_of_a_user_come_first(name, value):
    assert _faults(KEPT, **{name: value}) > PAGES / 4


@pytest.mark.parametrize("largest", [2**30, 2**25])
def test_an_older_glibc_takes_smaller_pieces(monkeypatch, largest):
    asked = []

    def mallopt(option: int, value: int) -> int:
        asked.append((option, value))
        return int(option != backend._MMAP_THRESHOLD or value <= largest)

    for name in backend._USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backend.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    assert backend.keep_freed_memory()
    taken = dict(asked)
    assert taken[backend._MMAP_THRESHOLD] == largest and len(taken) == 3

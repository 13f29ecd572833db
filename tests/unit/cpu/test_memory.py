"""Memory that is freed stays with a process on the CPU, unless its user wants otherwise."""

import json
import os
import subprocess
import sys

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


def test_a_run_on_the_cpu_uses_pages_of_freed_tensors_again():
    assert _faults('from mimo_train.parallel.device import install; install("cpu", cpu_kernels=True)') < PAGES / 100


def test_glibc_gives_them_back_by_itself():
    """Else `cpu/backend.py` need not keep them."""
    assert _faults("") > PAGES / 4


def test_variables_of_a_user_come_first():
    assert _faults(KEPT, MALLOC_TRIM_THRESHOLD_="131072") > PAGES / 4

"""A process that imports what is slow to import, once, and forks for each job that its standard input asks for.

A job is a line `{"function": "module:name", "arguments": {...}, "out": FILE, "log": FILE}`. The answers, a line each:
`{"ready": true}` once, then for each job `{"pid": N}` when it has started and `{"status": N}` when it has ended. A job
is the leader of its own session and writes one JSON object to `out`:
`{"value": ...}`, `{"missing": "what is not there"}` or `{"error": "traceback"}`.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import Missing

SLOW = ("torch", "mimo_train.training.pretrain")


def main() -> None:
    """Serve until the standard input ends."""
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # what an import prints is no answer
    warnings.simplefilter("ignore")
    for name in SLOW:
        # A job that needs it imports it again, and says why it cannot.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become_job(json.loads(line))
        answers.write(json.dumps({"pid": pid}) + "\n")
        _, status = os.waitpid(pid, 0)
        answers.write(json.dumps({"status": os.waitstatus_to_exitcode(status)}) + "\n")


def _end_with_parent() -> None:
    """Asks Linux to kill this process when its parent has died, however: a job must not hold a device for nobody."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def _become_job(job: dict[str, Any]) -> None:
    os.setsid()
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open(job["log"], "w") as log, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch = sys.modules.get("torch")
    if torch is not None and job["arguments"].get("device") == "cuda" and torch.cuda._is_in_bad_fork():
        # An import has asked the driver for its devices, and a fork of such a process can use none: begin anew.
        os.execv(sys.executable, [sys.executable, "-P", "-m", __spec__.name, json.dumps(job)])
    _run(job)


def _run(job: dict[str, Any]) -> None:
    """The job's end is this process's: threads and peers are not waited for."""
    try:
        module, _, name = job["function"].partition(":")
        result = {"value": getattr(importlib.import_module(module), name)(**job["arguments"])}
    except Missing as missing:
        result = {"missing": str(missing)}
    except BaseException:
        result = {"error": traceback.format_exc()}
    sys.stdout.flush()
    sys.stderr.flush()
    out = Path(job["out"])
    out.with_suffix(".part").write_text(json.dumps(result))
    out.with_suffix(".part").rename(out)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:]:  # one job, in a process that has imported nothing
        warnings.simplefilter("ignore")
        _end_with_parent()
        _run(json.loads(sys.argv[1]))
    main()

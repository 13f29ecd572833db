"""What the tests of the scripts stand on: a scratch checkout, and interpreters that only pretend to install."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.hang import HANG_SECONDS

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "basename", "cat", "cp", "dirname", "env", "mkdir", "mv", "rm", "sh", "sleep")

PYTHON = """#!/bin/sh
# Notes each call. Makes environments that hold a copy of itself, installs nothing, lets Python run what -c gives.
echo "$*" >> "$FAKE_CALLS"
case "$*" in
  "-P -m venv --clear "*) rm -rf "$5"; mkdir -p "$5/bin"; cp "$0" "$5/bin/python" ;;
  "-P -m uv --version") [ -z "$FAKE_NO_UV" ] && echo "uv 0.13.8" ;;
  "-P -m uv pip install "*) sleep "${FAKE_INSTALL_SECONDS:-0}"; [ -z "$FAKE_NO_UV$FAKE_INSTALL_FAILS" ] ;;
  "-P -m pip install --quiet --disable-pip-version-check uv=="*) [ -z "$FAKE_NO_UV" ] ;;
  "-P -m pip install "*) echo "pip builds with $PIP_CONSTRAINT; $PIP_BUILD_CONSTRAINT" >> "$FAKE_CALLS"
    [ -z "$FAKE_INSTALL_FAILS" ] ;;
  "-P -m pip config list") printf '%s' "$FAKE_PIP_CONFIG" ;;
  "-P -m pip --version") ;;
  "-P -W ignore -c import torch"*) ;;
  "-P -m mimo_train.cli launch "*) echo "$@"; exit "${FAKE_EXIT:-0}" ;;
  "-P -m benchmarks.gpu"*) echo "PYTHONPATH=$PYTHONPATH" "$@" ;;
  *) exec REAL_PYTHON "$@" ;;
esac
"""


class Checkout:
    """A folder with the scripts and pyproject.toml of the repository, a PATH of its own, and notes of what was called.

    Args:
        folder: an empty folder.
        tools: further programs of this machine to find on PATH.
    """

    def __init__(self, folder: Path, *tools: str) -> None:
        self.root = folder / "checkout"
        self.bin = folder / "bin"
        self.calls_file = folder / "calls"
        self.venv = self.root / ".venv"
        shutil.copytree(REPOSITORY / "scripts", self.root / "scripts")
        shutil.copy(REPOSITORY / "pyproject.toml", self.root)
        self.bin.mkdir()
        for tool in (*TOOLS, *tools):
            path = shutil.which(tool)
            if path:
                (self.bin / tool).symlink_to(path)
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "PYENV_ROOT": str(folder / "pyenv"),
            "FAKE_CALLS": str(self.calls_file),
        }

    def program(self, path: Path | str, text: str = PYTHON) -> Path:
        """Writes an executable script; a relative path goes to the folder on PATH."""
        path = self.bin / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("REAL_PYTHON", sys.executable))
        path.chmod(0o755)
        return path

    def start(self, command: str, **variables: str) -> subprocess.Popen:
        """Starts a line of bash in the checkout."""
        return subprocess.Popen(
            [shutil.which("bash") or "bash", "-c", command],
            cwd=self.root,
            env=self.env | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str, **variables: str) -> subprocess.CompletedProcess:
        """Runs a line of bash in the checkout and notes its calls anew."""
        self.calls_file.write_text("")
        process = self.start(command, **variables)
        out, err = process.communicate(timeout=HANG_SECONDS)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def calls(self, what: str) -> int:
        """How many noted calls contain ``what``."""
        return sum(what in line for line in self.calls_file.read_text().splitlines())

    def append(self, name: str, text: str) -> None:
        """Adds text to the end of a file of the checkout."""
        with open(self.root / name, "a") as file:
            file.write(text)


def pid_runs(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False

"""Warnings of libraries are in a file, those of mimo-train and of the user on the console; none is lost."""

import subprocess
import sys
from pathlib import Path

import pytest

from mimo_train.cpu import backend
from mimo_train.logging import rank_log
from mimo_train.logging.rank_log import is_library
from tests.hang import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = """
import logging, warnings

def warn():
    warnings.warn("a warning of a library")
    logging.getLogger("a_library").warning("a record of a library")
    logging.getLogger("a_library").error("an error of a library")
    logging.getLogger("a_library").warning("%d", "a record that cannot be formatted")
"""
PROGRAM = """
import logging, sys, sysconfig, warnings
from pathlib import Path
from mimo_train.logging import rank_log

rank_log.LIBRARIES += (sys.argv[2] + "/",)
if sys.argv[1] == "nowhere":
    rank_log.divert_command("generate", None)
else:
    rank_log.divert(Path(sys.argv[1]))
import a_library
a_library.warn()
warnings.warn("a warning of the user's")
logging.getLogger("mine").warning("a record of the user's")
logging.getLogger("mine").info("nobody asked for it")
{more}
"""


def test_the_stand_in_for_cuda_is_where_it_was():
    assert is_library(backend.__file__) and not is_library(rank_log.__file__)


def run(tmp_path: Path, log: Path | str, more: str = "") -> str:
    """What a program prints on stderr that diverts to `log`."""
    library = tmp_path / "libraries"
    library.mkdir()
    (library / "a_library.py").write_text(LIBRARY)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(more=more))
    ended = subprocess.run(
        [sys.executable, program, log, library],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={"PYTHONPATH": f"{ROOT}:{library}", "PATH": "/usr/bin:/bin"},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def test_what_libraries_warn_of_is_in_the_file_and_their_errors_are_in_both(tmp_path):
    log = tmp_path / "logs" / "rank_0.log"
    printed, written = run(tmp_path, log), log.read_text()
    for text, on_console, in_file in (
        ("a warning of a library", 0, 1),
        ("a record of a library", 0, 1),
        ("an error of a library", 1, 1),
        ("a warning of the user's", 1, 0),
        ("a record of the user's", 1, 0),
        ("nobody asked for it", 0, 0),
    ):
        assert printed.count(f"{text}\n") == on_console, (text, printed)
        assert written.count(f"{text}\n") == in_file, (text, written)


def test_a_command_without_a_folder_leaves_them_out_and_shows_errors(tmp_path):
    printed = run(tmp_path, "nowhere")
    assert "a warning of a library" not in printed and "a record of a library" not in printed
    assert "an error of a library" in printed and "a warning of the user's" in printed


def test_a_file_that_cannot_be_written_leaves_them_on_the_console(tmp_path):
    (tmp_path / "logs").write_text("in the way")
    assert "a warning of a library" in run(tmp_path, tmp_path / "logs" / "rank_0.log")


@pytest.mark.parametrize("wanted", [False, True], ids=["as usual", "TORCH_LOGS"])
def test_records_of_torch_are_in_the_file_unless_its_log_is_asked_for(wanted, tmp_path):
    more = "import os, torch\n"
    more += "os.environ['TORCH_LOGS'] = '+all'\n" if wanted else ""
    more += "rank_log.adopt_torch()\nfrom torch.utils import cpp_extension\n"
    more += "cpp_extension.logger.warning('a record of torch')"
    # The record is made in this program's own file, which stands for torch's.
    more = "rank_log.LIBRARIES += (__file__,)\n" + more
    log = tmp_path / "rank_0.log"
    printed = run(tmp_path, log, more)
    assert ("a record of torch" in printed) == wanted
    assert ("a record of torch" in log.read_text()) != wanted

"""The watchdog, in processes without torch."""

import subprocess
import sys
import textwrap

import pytest

from mimo_train.flight.blame import ENDED
from mimo_train.flight.watchdog import HANG_CODE
from tests.hang import HANG_SECONDS

RANK = """
import sys, threading, time
from pathlib import Path
from data.storage.files import READS
from mimo_train.flight.recorder import RECORDER
from mimo_train.flight.watchdog import Watch

RECORDER.open(Path(sys.argv[1]), 0, 1)
RECORDER.to("index")
watch = Watch(RECORDER, Path(sys.argv[1]), float(sys.argv[2]), ends=sys.argv[3] == "ends", launched=False)

def again_and_again(sign):
    end = time.monotonic() + 3
    while time.monotonic() < end:
        sign()
        time.sleep(0.05)

def member():
    READS.count += 1

def microbatch():
    with RECORDER.during("data_wait"):
        pass

def anywhere():
    [place() for place in (lambda: time.sleep(0.01), lambda: time.sleep(0.011), lambda: time.sleep(0.012)) * 2]
"""
STUCK = "with READS.of('shards/000007.tar'):\n    threading.Event().wait()"
PHASE = "RECORDER.to('loop'); RECORDER.begin_step(1); RECORDER.enter('step'); RECORDER.enter('{}')\n"
COMPILES = """
import subprocess
subprocess.run([sys.executable, "-c", "import time\\nend = time.monotonic() + 3\\nwhile time.monotonic() < end: pass"])
"""
LONG = {
    "index": "again_and_again(member)",
    "save": PHASE.format("save") + "again_and_again(RECORDER.tick)",
    "evaluation": PHASE.format("evaluate") + "again_and_again(microbatch)",
    "first step": PHASE.format("forward_backward") + COMPILES,
    "Python of a first step": PHASE.format("forward_backward") + "again_and_again(anywhere)",
}
"""What takes twice the limit, by its signs of progress."""


def started(folder, code: str, seconds: str = "1.5", ends: str = "ends") -> subprocess.Popen:
    program = textwrap.dedent(RANK) + code
    command = [sys.executable, "-c", program, str(folder), seconds, ends]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_a_hang_is_reported_and_ends_the_rank_and_long_work_is_none(tmp_path):
    stuck = started(tmp_path / "stuck", STUCK)
    phases = ("save", "evaluate", "forward_backward")
    others = [started(tmp_path / phase, PHASE.format(phase) + "threading.Event().wait()") for phase in phases]
    # With limits that a busy machine keeps: what counts is that these take longer than the limit.
    works = [started(tmp_path / name, code) for name, code in LONG.items()]
    _, said = stuck.communicate(timeout=HANG_SECONDS)
    assert stuck.returncode == HANG_CODE
    assert "to blame: rank 0 waits for no rank and makes no progress" in said
    assert "in index" in said or "index, for" in said
    assert "reads shards/000007.tar" in said and 'File "<string>", line' in said
    (report,) = (tmp_path / "stuck").glob("flight/*/report.txt")
    text, ended = report.read_text().rsplit("\n", 2)[:2]
    assert text in said and ended == ENDED
    for phase, other in zip(phases, others, strict=True):
        _, said = other.communicate(timeout=HANG_SECONDS)
        assert other.returncode == HANG_CODE and f"step 1, loop > step > {phase}, for" in said, said
    for name, work in zip(LONG, works, strict=True):
        _, said = work.communicate(timeout=HANG_SECONDS)
        assert (work.returncode, said) == (0, ""), name


@pytest.mark.parametrize("seconds", ["0", "1000"])
def test_without_a_limit_or_before_it_nothing_is_said(tmp_path, seconds):
    rank = started(tmp_path, "time.sleep(1)", seconds)
    _, said = rank.communicate(timeout=HANG_SECONDS)
    assert (rank.returncode, said) == (0, "")

"""A disk that is full, a folder that is removed, a reader that has gone: none of it ends a run."""

import errno
import io
import os
import shutil
import subprocess
import sys

import pytest

from mimo_train.config.errors import UserError
from mimo_train.evaluation import held_out
from mimo_train.logging import progress
from mimo_train.logging.console import Console
from mimo_train.logging.sinks import jsonl
from mimo_train.logging.sinks.jsonl import JsonlSink, read_metrics


class Full:
    """Stands for `os`: takes some bytes, then none until there is room again."""

    def __init__(self, room: int):
        self.room = room

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = os.write(file, data[: self.room])
        self.room -= count
        return count


@pytest.mark.parametrize("room", range(0, 60, 7))
def test_lines_are_held_back_while_the_disk_is_full(room, tmp_path, monkeypatch, caplog):
    sink, whole = JsonlSink(tmp_path / "metrics.jsonl", 0), JsonlSink(tmp_path / "whole.jsonl", 0)
    for step in range(1, 7):
        monkeypatch.setattr(jsonl, "os", os)
        whole.log(step, step, {"lm loss": 0.25})
        monkeypatch.setattr(jsonl, "os", Full(room if step == 2 else 0 if step in (3, 4) else 10**6))
        sink.log(step, step, {"lm loss": 0.25})
    assert (tmp_path / "metrics.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert caplog.text.count("cannot be written") == 1
    monkeypatch.setattr(jsonl, "os", Full(5))
    sink.log(7, 7, {"lm loss": 0.25})
    with pytest.raises(UserError, match=r"the last 1 line of .*metrics.jsonl could not be written"):
        sink.close()
    assert [line["step"] for line in read_metrics(str(tmp_path / "metrics.jsonl"))] == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_is_removed_is_made_again_and_that_is_said(tmp_path, caplog):
    run_dir = tmp_path / "run"
    sink = JsonlSink(run_dir / "metrics.jsonl", 0)
    progress.job_started(run_dir, world_size=1, step=0)
    sink.log(1, 1, {})
    shutil.rmtree(run_dir)
    for step in (2, 3):
        sink.log(step, step, {})
    progress.job_exited(run_dir, step=3, reason="finished")
    sink.close()
    assert [line["step"] for line in read_metrics(run_dir / "metrics.jsonl")] == [1, 2, 3]
    assert caplog.text.count("metrics.jsonl was removed or moved: it is written again, with all its lines") == 1
    assert "reason=finished" in (run_dir / "progress.txt").read_text()


def test_a_file_that_is_removed_last_of_all_is_written_again(tmp_path, monkeypatch, caplog):
    """With the whole disk: what cannot be put back is an error."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, 0)
    sink.log(1, 1, {})
    path.unlink()
    monkeypatch.setattr("mimo_train.logging.sinks.jsonl._opened", lambda path: os.open("/proc/none/such", os.O_RDWR))
    sink.log(2, 2, {})
    monkeypatch.undo()
    path.unlink()
    sink.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("put", [False, True], ids=["moved", "replaced"])
def test_a_file_that_is_moved_or_replaced_by_hand_keeps_its_lines(put, tmp_path, caplog):
    path, kept = tmp_path / "metrics.jsonl", tmp_path / "kept.jsonl"
    sink = JsonlSink(path, 0)
    sink.log(1, 1, {})
    sink.log(2, 2, {})
    path.rename(kept)
    if put:  # as by `sed -i`
        path.write_bytes(kept.read_bytes())
        kept.unlink()
    sink.log(3, 3, {})
    sink.close()
    assert [line["step"] for line in read_metrics(path)] == ([1, 2, 3] if put else [3])
    assert put or [line["step"] for line in read_metrics(kept)] == [1, 2]
    assert ("another file has its name" if put else "one is begun with the next line") in caplog.text


def test_a_progress_file_that_cannot_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / "progress.txt").mkdir()
    for step in range(3):
        progress.job_exited(tmp_path, step=step, reason="finished")
    assert caplog.text.count("training goes on without it") == 1


def test_a_reader_that_has_gone_ends_nothing():
    """As by `| head -1`; nor does the interpreter complain at its end."""
    code = (
        "import sys; from mimo_train.logging.console import Console\n"
        "console = Console(3, 0)\n"
        "print('begun', flush=True); sys.stdin.read()\n"
        "console.message('one'); console.step(1, {}); console.evaluation(1, {}); console.close()\n"
        "print('more'); sys.stderr.write('went on')"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    assert process.stdout.readline() == "begun\n"
    process.stdout.close()
    process.stdin.close()
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), said) == (0, "went on")


def test_a_console_on_a_full_disk_is_silent_from_then_on():
    class Broken(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "full")

    console = Console(2, 0, stream=Broken())
    console.message("one")
    console.message("two")
    console.close()


def test_samples_of_an_evaluation_that_cannot_be_written_end_no_run(tmp_path, caplog):
    held_out._write_samples(tmp_path / "gone" / "samples.json", [{"answer": "7"}])
    assert "samples.json cannot be written" in caplog.text and "training goes on" in caplog.text

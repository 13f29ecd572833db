"""Logs of ranks: what is printed is in a file with its time, and the files of all ranks are read as one."""

import io
import os
import re
import sys
import threading

import pytest

from mimo_train.cli import main
from mimo_train.commands import logs as command
from mimo_train.logging.rank_log import Logs, RankLog, log_of


def texts(run_dir, rank: int = 0) -> list[str]:
    return [line.text for line in Logs(run_dir, [rank])]


def test_every_line_has_its_time(tmp_path):
    RankLog(log_of(tmp_path, 3)).write("one\ntwo")
    first, *lines = log_of(tmp_path, 3).read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", line) for line in (first, *lines))
    assert texts(tmp_path, 3)[1:] == ["one", "two"] and "-- process " in first


def test_what_is_printed_is_in_the_file_as_a_person_saw_it(tmp_path, monkeypatch):
    streams = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    log = RankLog(log_of(tmp_path, 0))
    log.copy_console()
    print("a line", "in parts")
    sys.stdout.write("step 1\rstep 2\r\x1b[2K\x1b[31ma message\x1b[0m\nstep 3")
    print("an error", file=sys.stderr)
    sys.stdout.writelines([" of 3\r\n", "begun"])
    assert texts(tmp_path)[1:] == ["a line in parts", "a message", "an error", "step 3 of 3"]
    assert streams[0].getvalue().endswith("step 3 of 3\r\nbegun") and streams[1].getvalue() == "an error\n"
    assert not sys.stdout.isatty() and sys.stdout.encoding == streams[0].encoding


def test_the_console_goes_on_where_the_file_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "logs").write_text("in the way")
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    log = RankLog(log_of(tmp_path, 0))
    log.copy_console()
    print("printed", file=sys.stderr)
    log.write("kept from the console")
    assert errors.getvalue() == "printed\nkept from the console\n"


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "logs").mkdir()
    for rank, lines in {
        0: ["2026-11-23T09:00:00.100Z a", "2026-11-23T09:00:02.000Z c", "without a time"],
        10: ["2026-11-23T09:00:01.000Z b", "2026-11-23T09:00:02.000Z d \x1b[2J"],
    }.items():
        log_of(tmp_path, rank).write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "logs" / "generate.log").write_text("of no rank\n")
    return tmp_path


def test_lines_of_all_ranks_are_in_the_order_of_their_times(run_dir, capsys):
    assert main(["logs", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2026-11-23T09:00:00.100Z rank 0: a",
        "2026-11-23T09:00:01.000Z rank 10: b",
        "2026-11-23T09:00:02.000Z rank 0: c",
        "2026-11-23T09:00:02.000Z rank 0: without a time",
        "2026-11-23T09:00:02.000Z rank 10: d \\x1b[2J",
    ]
    assert main(["logs", str(run_dir), "--rank", "10"]) == 0
    assert [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "rank 10: b", "rank 10: d \\x1b[2J"
    ]  # fmt: skip


def test_what_is_written_later_is_shown_once(run_dir):
    logs = Logs(run_dir)
    assert len(list(logs)) == 5 and not list(logs)
    with log_of(run_dir, 0).open("a") as file:
        file.write("2026-11-23T09:00:04.000Z f\n2026-11-23T09:00:05.000Z beg")
    log_of(run_dir, 2).write_text("2026-11-23T09:00:03.000Z e\n")
    assert [(line.rank, line.text) for line in logs] == [(2, "e"), (0, "f")]
    with log_of(run_dir, 0).open("a") as file:
        file.write("un\n")
    assert [line.text for line in logs] == ["begun"]


def test_a_log_is_followed_until_it_is_interrupted(run_dir, monkeypatch, capsys):
    written = threading.Event()

    def sleep(_seconds):
        if written.is_set():
            raise KeyboardInterrupt
        RankLog(log_of(run_dir, 1)).write("new")
        written.set()

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert main(["logs", str(run_dir), "--follow"]) == 130
    assert capsys.readouterr().out.splitlines()[-1].endswith(" rank 1: new")


def test_a_run_without_logs_is_an_error(run_dir, tmp_path, capsys):
    assert main(["logs", str(run_dir), "--rank", "7"]) == 1
    assert main(["logs", str(tmp_path / "nowhere")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "rank 7" in errors[0] and "nowhere" in errors[1]


@pytest.mark.parametrize("follow", [[], ["--follow"]])
def test_a_folder_of_several_runs_names_them_the_newest_first(tmp_path, capsys, follow):
    for age, name in enumerate(("d", "c", "b", "a")):
        (tmp_path / name / "logs").mkdir(parents=True)
        log_of(tmp_path / name, 0).write_text("a line\n")
        os.utime(tmp_path / name, (age, age))
    (tmp_path / "no_run").mkdir()
    assert main(["logs", str(tmp_path), *follow]) == 1
    named = " or ".join(str(tmp_path / name) for name in "abc")
    assert f"{tmp_path} has no logs of its own; there are runs in it: give {named}, or another of 4" in (
        capsys.readouterr().err
    )

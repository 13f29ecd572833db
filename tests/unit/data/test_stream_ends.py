"""Commands whose output is a shard: what is run, and that nothing of it stays."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from data.errors import DataError
from data.storage.command import Command, CommandBytes
from data.streams.find import find_streams
from mimo_train.flight.processes import process


def test_of_the_braces_of_a_command_only_ranges_are_ours():
    for text in ("awk '{print $1,$2}' list | xargs cat", "cat ${HOME}/a.tar", "{ cat a.tar; }", "cat x-{a,b}.tar, y"):
        assert find_streams(f"pipe:{text}") == [Command(text)]
    found = find_streams("pipe:{ cat ${D}/{a,b}-{08..10}.tar; }")
    assert found == [Command(f"{{ cat ${{D}}/{{a,b}}-{number}.tar; }}") for number in ("08", "09", "10")]
    assert [one.text for one in find_streams("pipe:cat {0..1}/{0..1}")] == [f"cat {a}/{b}" for a in "01" for b in "01"]
    with pytest.raises(DataError, match=r"the range \{3\.\.1\} in .* runs backwards"):
        find_streams("pipe:cat x-{3..1}.tar")


def started(folder, then):
    """(a command that writes and stands still, the file that names the process that does)."""
    file = folder / "pid"
    return f"printf abc; sh -c 'echo $$ > {file}.new; mv {file}.new {file}; exec sleep 1000' {then}", file


def wait_for(what):
    while not (found := what()):
        time.sleep(0.01)
    return found


def pid_in(file):
    return int(wait_for(lambda: file.exists() and file.read_text()))


def has_ended(pid):
    return (found := process(pid)) is None or found.state in "ZX"


@pytest.mark.parametrize("then", ["", "&", "| cat"])
def test_a_reader_is_released_and_what_the_shell_has_left_ends(tmp_path, then):
    command, file = started(tmp_path, then)
    raw, read = CommandBytes(Command(command)), []
    reader = threading.Thread(target=lambda: read.append(raw.read(512)) if then == "&" else None)
    reader.start()
    pid = pid_in(file)
    if then == "&":
        wait_for(lambda: process(raw._process.pid).state == "Z")
    raw.stop()
    reader.join()
    raw.close()
    assert read in ([], [b"abc"])
    wait_for(lambda: has_ended(pid))
    assert raw._guard._process.returncode == 0


@pytest.mark.parametrize("then", ["", "&", "| cat"])
def test_a_process_that_is_killed_leaves_no_command(tmp_path, then):
    command, file = started(tmp_path, then)
    code = "import sys; from data.storage.command import *; raw = CommandBytes(Command(sys.argv[1])); raw.read()"
    rank = subprocess.Popen([sys.executable, "-c", code, command], start_new_session=True)
    pid = pid_in(file)
    os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()
    wait_for(lambda: has_ended(pid))


def test_what_a_command_that_has_ended_leaves_behind_stays(tmp_path):
    os.mkfifo(tmp_path / "go")
    raw = CommandBytes(Command(f"printf abc; (read -r < {tmp_path}/go; echo x > {tmp_path}/late) > /dev/null 2>&1 &"))
    assert raw.readall() == b"abc"
    raw.close()
    (tmp_path / "go").write_text("\n")
    wait_for((tmp_path / "late").exists)

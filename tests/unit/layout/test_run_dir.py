"""A run.dir that cannot be written is reported, by `check` and at the start of a run."""

import os
from pathlib import Path

import pytest

from mimo_train.cli import main
from mimo_train.config.errors import ConfigError
from mimo_train.config.paths import folder_fault, make_folder


def in_the_way(tmp_path: Path, kind: str) -> tuple[Path, Path]:
    """Return (a run.dir that not even root can create, the obstacle)."""
    blocker = tmp_path / "blocker"
    if kind == "link that leads nowhere":
        blocker.symlink_to(tmp_path / "gone" / "away")
    else:
        blocker.touch()
    return (blocker if kind != "file above" else blocker / "runs" / "mine"), blocker


KINDS = ("file", "file above", "link that leads nowhere")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_the_way_is_named(tmp_path, kind):
    folder, blocker = in_the_way(tmp_path, kind)
    fault = folder_fault(folder)
    assert fault.key == "run.dir"
    what = f"is a link to {tmp_path}/gone/away, and there is" if kind == "link that leads nowhere" else "is"
    assert str(folder) in fault.message and f"{blocker} {what} no folder; give another" in fault.message
    with pytest.raises(ConfigError) as raised:
        make_folder(folder)
    assert str(raised.value).startswith(f"run.dir: the folder {folder} cannot be written (")
    assert isinstance(raised.value.__cause__, OSError)
    assert os.strerror(raised.value.__cause__.errno) in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o500)
    assert "(Permission denied: " in folder_fault(tmp_path / "runs" / "mine").message
    with pytest.raises(ConfigError, match="Permission denied"):
        make_folder(tmp_path / "runs" / "mine")


def test_a_file_system_that_refuses_is_named(tmp_path, monkeypatch):
    """A read-only mount: the folder exists, and accepts no file."""

    def refuse(**_options):
        raise OSError(30, "Read-only file system", str(tmp_path))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=rf"run\.dir: .*\(Read-only file system: {tmp_path}\)"):
        make_folder(tmp_path)
    assert f"the folder {tmp_path}/new cannot be written (Read-only file" in folder_fault(tmp_path / "new").message
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
@pytest.mark.parametrize("folder", ["/proc/none", "/proc/self/none"])
def test_a_file_system_of_the_kernel_takes_no_run(folder, capsys):
    """Root has the permission to write there."""
    assert main(["check", "gpt_tiny", f"run.dir={folder}", "--without-data"]) == 1
    assert f"error: run.dir: the folder {folder} cannot be written" in capsys.readouterr().err


def test_a_folder_is_made_and_left_empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "runs" / "mine", Path("relative/one"), Path(".")):
        assert folder_fault(folder) is None
        assert folder.is_dir() == (folder == Path("."))
        make_folder(folder)
        make_folder(folder)
    assert list((tmp_path / "runs" / "mine").iterdir()) == []


@pytest.mark.parametrize("kind", KINDS[:2])
def test_check_has_exit_code_1(tmp_path, kind, capsys):
    folder, _ = in_the_way(tmp_path, kind)
    assert main(["check", "gpt_tiny", f"run.dir={folder}"]) == 1
    assert f"error: run.dir: the folder {folder} cannot be made" in capsys.readouterr().err

"""The folder of an export: there is a whole model in it, or nothing of it is left."""

import errno
import os
from pathlib import Path

import pytest

from mimo_train.config.errors import UserError
from mimo_train.hf.directory import UNFINISHED, new_directory


def half_a_model(folder: Path) -> None:
    (folder / "base").mkdir()
    (folder / "base" / "model.safetensors").write_bytes(b"half")
    (folder / "link").symlink_to(folder.parent)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("was_there", [False, True])
def test_half_a_model_does_not_stay(tmp_path, was_there):
    (tmp_path / "own").touch()
    out = tmp_path / "new" / "out"
    if was_there:
        out.mkdir(parents=True)
    with pytest.raises(OSError), new_directory(out):
        half_a_model(out)
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert left == (["new", "new/out", "own"] if was_there else ["own"])


def test_what_was_there_before_stays(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="is there already"), new_directory(tmp_path):
        pass
    with new_directory(tmp_path / "out"):
        (tmp_path / "out" / "config.json").touch()
    assert (tmp_path / "mine").exists() and (tmp_path / "out" / "config.json").exists()


def test_a_folder_that_another_process_writes_is_not_written(tmp_path):
    """Two models in one folder would be one of parts of both."""
    out = tmp_path / "out"
    with new_directory(out):
        assert [path.name for path in out.iterdir()] == [UNFINISHED]  # also while nothing of the model is there
        with pytest.raises(UserError, match="not whole: another process is writing it, or was killed"):
            with new_directory(out):
                pass
        (out / "config.json").touch()
    assert [path.name for path in out.iterdir()] == ["config.json"]

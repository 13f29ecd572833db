"""A full disk is named with the folder, whoever has found it."""

import errno
import os

import pytest

from data.errors import DataError
from mimo_train.checkpoint.folder_changes import full_disk


def _within(kind, cause) -> BaseException:
    try:
        try:
            raise cause
        except OSError as error:
            raise kind("a library failed") from error
    except kind as error:
        return error


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        _within(RuntimeError, FULL),
    ],
    ids=["disk", "quota", "cause"],
)
def test_a_full_disk_is_named(error, tmp_path):
    found = full_disk(error, tmp_path)
    assert str(found).startswith(f"run.dir: {tmp_path} cannot take more files (") and "continues the run" in str(found)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "no"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/of/another/disk"),
        _within(DataError, FULL),  # the index of shards on another disk: it has a name and a remedy of its own
    ],
)
def test_other_errors_stay_as_they_are(error, tmp_path):
    assert full_disk(error, tmp_path) is None

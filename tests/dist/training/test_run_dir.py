"""A folder that cannot be written, the run's or its demo's, ends every rank with an error that names it."""

import errno
import os

from data.errors import DataError
from mimo_train.config.errors import UserError
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, train_rank


def _refused(cfg) -> str:
    try:
        train_rank(cfg)
    except (UserError, DataError) as error:
        return str(error)
    return ""


def _refused_on_a_full_disk(cfg) -> str:
    """Of the demo, and of nothing else."""
    from data.demo import make

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make.ensure_demo = full
    return _refused(cfg)


def test_a_file_in_the_way_ends_every_rank(digits, tmp_path):
    (tmp_path / "file").touch()
    cfg = config("vlm_digits", tmp_path / "file" / "mine", digits, "layout=two_processes")
    one, other = run_ranks(_refused, 2, cfg)
    assert one == other
    assert one.startswith(f"run.dir: the folder {tmp_path}/file/mine cannot be written (Not a directory")


def test_a_demo_that_cannot_be_made_is_named_by_every_rank(digits, tmp_path):
    (tmp_path / "file").touch()
    for refused, folder, why in (
        (_refused, "file/demo", "File exists"),
        (_refused_on_a_full_disk, "demo", "No space left on device"),
    ):
        place = tmp_path / folder
        wanted = ("data.demo=digits", f"data.shards={place}/train", f"data.validation_shards={place}/held_out")
        one, other = run_ranks(refused, 2, config("vlm_digits", tmp_path / "run", digits, *wanted))
        assert one == other and one.startswith(f"data.demo: cannot make the digits demo in {place} (")
        assert why in one and "run.dir" not in one


def _train(*arguments: str) -> tuple[int, str]:
    """Exit code and standard error of `mimo-train train`."""
    import contextlib
    import io

    from mimo_train.cli import main

    with contextlib.redirect_stderr(io.StringIO()) as said:
        return main(["train", *arguments]), said.getvalue()


def test_the_command_has_exit_code_1(digits, tmp_path):
    (tmp_path / "file").touch()
    arguments = ("gpt_tiny", f"run.dir={tmp_path}/file", f"data.shards={digits}/train", "data.demo=")
    ((code, said),) = run_ranks(_train, 1, *arguments)
    assert code == 1
    assert said.startswith(f"error: run.dir: the folder {tmp_path}/file cannot be written (File exists")
    assert "Traceback" not in said

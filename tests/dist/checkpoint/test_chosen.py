"""Rank 0 alone looks for the newest checkpoint of another run, which may train on meanwhile."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

from tests.dist.ranks import run_ranks
from tests.dist.runs import config
from tests.dist.steps import Steps


def _started(source, starts: list, missing: str) -> list[str]:
    """What a rank says of each start from a run, where only rank 0 may look into the run's folder."""
    from mimo_train.checkpoint import folders
    from mimo_train.config.errors import UserError

    steps = Steps(source)
    steps.save()
    steps.session.close()
    look, seen, rank = folders.in_folder, folders.require_seen, int(os.environ["RANK"])

    def in_folder(folder: Path, key: str) -> Path:
        assert rank == 0, "each rank looks by itself"
        return look(folder, key)

    folders.in_folder, said = in_folder, []
    for cfg in starts:
        if missing == cfg.run.dir and rank:
            folders.require_seen = lambda folder, key: seen(folder / "not here", key)
        if cfg.run.dir.endswith("unlisted") and not rank:
            folders.os = SimpleNamespace(**vars(os) | {"listdir": fails})
        try:
            Steps(cfg).session.close()
            said.append("")
        except UserError as error:
            said.append(str(error))
        folders.require_seen, folders.os = seen, os
    return said


def fails(folder: Path):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_rank_0_chooses_what_all_ranks_read(digits, tmp_path):
    def start(name: str, *overrides: str):
        return config("vlm_digits", tmp_path / name, digits, "train.iters=4", "layout=two_processes", *overrides)

    run, modules = tmp_path / "run", "checkpoint.load_modules"
    starts = [
        start("weights", f"checkpoint.weights={run}"),
        start("modules", f"{modules}.language.path={run}"),
        start("missing", f"checkpoint.weights={run}"),
        start("none", f"{modules}.language.path={tmp_path / 'nothing'}"),
        start("unlisted"),
    ]
    one, other = run_ranks(_started, 2, start("run"), starts, str(tmp_path / "missing"))
    assert one == other and one[:2] == ["", ""]
    assert one[2].startswith("checkpoint.weights: a rank does not find ") and "all nodes see" in one[2]
    assert one[3].startswith(f"{modules}.language.path: no complete checkpoint in ")
    assert one[4].startswith(f"the checkpoints in {tmp_path}/unlisted/checkpoints cannot be looked at ([Errno 13]")

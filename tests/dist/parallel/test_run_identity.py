"""Ranks that were started for different runs, or do not share a folder, end before anything is built."""

from pathlib import Path

from tests.dist.ranks import run_ranks
from tests.dist.runs import config


def _start(cfgs, folder):
    """What three starts say on this rank: with another learning rate, with folders that are not shared, and as it
    should be."""
    import dataclasses
    from types import SimpleNamespace

    import torch.distributed as dist

    from mimo_train.config.errors import UserError
    from mimo_train.parallel import run_identity
    from mimo_train.parallel.collectives import agreed
    from mimo_train.training.setup import setup
    from mimo_train.training.step.pipeline import start_processes

    start_processes(cfgs[0])
    rank, said = dist.get_rank(), []
    try:
        run = SimpleNamespace(cfg=cfgs[rank], dir=Path(folder), checkpoints=Path(folder))
        setup(run, None, start_time=0.0)
    except UserError as error:
        said.append(str(error))
    own = Path(folder) / f"of_{rank}"
    own.mkdir(parents=True, exist_ok=True)
    start = run_identity.Start.of(cfgs[0])
    start = dataclasses.replace(start, host=f"node{rank}")
    for place in (own, Path(folder)):
        with agreed(start) as starts:
            if rank == 0:
                (place / "lock").write_text(start.mark)
        try:
            run_identity.require_one_config(starts)
            run_identity.require_one_folder(place / "lock", starts, patience=0.0)
        except UserError as error:
            said.append(str(error))
    return said


def test_other_configs_and_folders_that_are_not_shared_are_refused_on_every_rank(tmp_path):
    given = ("run.device=cpu", "layout=two_processes")
    cfgs = [config("vlm_digits", tmp_path / "run", tmp_path, *given) for _ in range(2)]
    cfgs[1].optim.lr, cfgs[1].data.cache_dir = 0.5, "elsewhere"  # a cache may be each node's own
    said = run_ranks(_start, 2, cfgs, str(tmp_path / "run"))
    assert said[0] == said[1] and len(said[0]) == 2, said
    differs, unseen = said[0]
    assert differs.startswith("optim.lr: is 0.3 for rank 0 on ") and ", and 0.5 for rank 1 on " in differs
    assert "cache_dir" not in differs
    assert "run.dir: rank 1 on node1 does not see what rank 0 on node0 writes into" in unseen
    assert "all hosts of this run share (2)" in unseen

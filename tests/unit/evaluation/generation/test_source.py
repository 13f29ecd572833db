"""A checkpoint of any run can be asked on one process."""

from mimo_train.evaluation.generation.source import on_one_process
from mimo_train.layout.run import resolve
from tests.unit.configs import load


def test_what_only_training_uses_keeps_no_checkpoint_from_being_asked():
    """Rank 1 is not there, and a GPU need not be."""
    keys = ("profiling.torch=true", "profiling.ranks=[1]", "profiling.step_end=12", "run.device=cuda")
    cfg = load("vlm_digits", "layout=two_processes", *keys)
    run = resolve(on_one_process(cfg))
    assert run.layout.world_size == 1 and run.cfg.run.device == "auto" and run.cfg.modules.keys() == cfg.modules.keys()

"""Progress of a run on several nodes is printed on the first one."""

import contextlib
import io
import os

from tests.dist.ranks import run_ranks
from tests.dist.runs import config


def _printed(cfg) -> str:
    """Standard output of a rank that is alone on its node."""
    from mimo_train.training.pretrain import pretrain

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert pretrain(cfg) == 0
    return said.getvalue()


def test_the_first_node_prints_what_the_logging_rank_shows(digits, tmp_path):
    held_out = (f"data.validation_shards={digits}/held_out", "train.eval_samples=4")
    cfg = config("vlm_digits", tmp_path, digits, "layout=two_processes", "train.iters=2", *held_out)
    first, logging = run_ranks(_printed, 2, cfg)
    lines = first.splitlines()
    begins = ("step 1/2  lm loss", "step 2/2  lm loss", "checkpoint of step 2", "evaluation at step 2  loss")
    found = [next(index for index, line in enumerate(lines) if line.startswith(begin)) for begin in begins]
    assert found[0] < found[2] and found[1] < found[3], lines
    assert "step" not in logging

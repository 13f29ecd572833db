"""The rank with the loss prints the progress; where it is not on the first node, rank 0 says so."""

import contextlib
import io
import os

from tests.dist.ranks import run_ranks
from tests.dist.runs import config


def _printed(cfg) -> str:
    """Standard output of a rank that is alone on its node."""
    from mimo_train.training.pretrain import pretrain

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert pretrain(cfg) == 0
    return printed.getvalue()


def test_the_logging_rank_prints_and_the_first_node_names_it(digits, tmp_path):
    held_out = (f"data.validation_shards={digits}/held_out", "train.eval_samples=4")
    cfg = config("vlm_digits", tmp_path, digits, "layout=two_processes", "train.iters=2", *held_out)
    first, logging = run_ranks(_printed, 2, cfg)
    lines = logging.splitlines()
    begins = ("step 1/2  lm loss", "step 2/2  lm loss", "saved checkpoint at step 2", "evaluation at step 2  loss")
    places = [[line.startswith(begin) for line in lines].index(True) for begin in begins if "checkpoint" not in begin]
    assert places == sorted(places), lines
    assert first.startswith("rank 1, which computes the loss, prints") and "step" not in first

"""The example of GRPO, short: it runs on two ranks, moves the weights, and logs the reward."""

import importlib.util
import sys
from pathlib import Path

from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.ranks import run_ranks
from tests.dist.runs import config

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_digits.py"


def _trained(cfg) -> None:
    from tests.dist.steps import Steps

    run = Steps(cfg)
    run.train(1)
    run.save()
    run.session.close()


def _grpo(run: str, to: str) -> None:
    spec = importlib.util.spec_from_file_location("grpo_digits", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    # A model without training never answers right.
    example.reward_of = lambda answer, truth: float(len(answer) % 2)
    sys.argv = ["grpo_digits.py", run, to, "--steps", "2", "optim.warmup_iters=0"]
    example.main()


def test_rewards_are_logged_and_weights_move(digits, tmp_path):
    run, to = tmp_path / "run", tmp_path / "grpo"
    held_out = (f"data.validation_shards={digits}/held_out", "train.eval_samples=8")
    cfg = config("vlm_digits", run, digits, "layout=one_process", "data.sequence_length=120", *held_out)
    run_ranks(_trained, 1, cfg)
    run_ranks(_grpo, 2, str(run), str(to))
    lines = read_metrics(to / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(0 < line["reward"] < 1 and line["grad_norm"] > 0 for line in lines[1:])
    assert lines[0]["eval/loss"] != lines[2]["eval/loss"] and "eval/exact_match" in lines[2]
    assert (to / "checkpoints").is_dir()

"""The examples of GRPO and DPO, short: they move the weights, and log what they learn from."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.ranks import run_ranks
from tests.dist.runs import config

EXAMPLES = Path(__file__).parents[3] / "examples"


def _trained(cfg) -> None:
    from tests.dist.steps import Steps

    run = Steps(cfg)
    run.train(1)
    run.save()
    run.session.close()


def _example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def _grpo(run: str, to: str) -> None:
    example = _example("grpo_digits")
    # A model without training never answers right.
    example.reward_of = lambda answer, truth: float(len(answer) % 2)
    sys.argv = ["grpo_digits.py", run, to, "--steps", "2", "optim.warmup_iters=0"]
    example.main()


def _dpo(run: str, to: str, name: str) -> None:
    example = _example("dpo_digits")
    example.PAIRS, example.QUESTIONS = 4, 3
    sys.argv = ["dpo_digits.py", run, to, "--steps", "2", "--loss", name, "optim.warmup_iters=0", "run.device=cpu"]
    example.main()


def test_steps_are_logged_and_weights_move(digits, tmp_path):
    run, to = tmp_path / "run", tmp_path / "grpo"
    held_out = (f"data.validation_shards={digits}/held_out", "train.eval_samples=8")
    cfg = config("vlm_digits", run, digits, "layout=one_process", "data.sequence_length=120", *held_out)
    run_ranks(_trained, 1, cfg)
    run_ranks(_grpo, 2, str(run), str(to))
    reports = {"grpo": ("reward",), "dpo": ("logps/chosen", "logps/rejected"), "sft": ("sft loss",)}
    for name in ("dpo", "sft"):
        run_ranks(_dpo, 1, str(run), str(tmp_path / name), name)
    for name, keys in reports.items():
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        assert [line["step"] for line in lines] == [0, 1, 2]
        assert all(line["grad_norm"] > 0 and all(line[key] for key in keys) for line in lines[1:]), name
        assert lines[0]["eval/loss"] != lines[2]["eval/loss"] and "eval/exact_match" in lines[2]
        assert (tmp_path / name / "checkpoints").is_dir()
    assert all(0 < line["reward"] < 1 for line in read_metrics(to / "metrics.jsonl")[1:])


def test_pairs_of_a_batch_are_compared():
    example = _example("dpo_digits")
    example.PAIRS = 2
    samples = torch.tensor([[-1, 3, 3], [0, 0, -1], [2, -1, -1], [1, 1, -1]])  # rows in any order
    log_probs, reference = torch.rand(2, 4, 3)
    changes = [(log_probs - reference)[samples == number].sum() for number in range(4)]
    total, pairs, report = example.dpo(log_probs, {"samples": samples, "reference": reference})
    margins = torch.stack([changes[0] - changes[1], changes[2] - changes[3]])
    assert total == pytest.approx(torch.log1p((-example.BETA * margins).exp()).sum().item(), rel=1e-5) and pairs == 2
    assert report["logps/chosen"][0] == pytest.approx((log_probs[1, :2].sum() + log_probs[2, 0]).item(), rel=1e-5)

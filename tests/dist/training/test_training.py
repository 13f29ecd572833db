"""What a run does besides its curve: evaluations and their report, fine-tuning, the optimizer."""

import json

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.runs import config, curve, train_on_ranks


def evaluated(digits, run_dir, *overrides: str) -> tuple[list[dict], list[dict]]:
    """(metrics, samples of the report) of a short run with evaluation."""
    cfg = config(
        "vlm_digits",
        run_dir,
        digits,
        f"data.validation_shards={digits}/held_out",
        "train.iters=30",
        "train.report_samples=16",
        "train.global_batch_size=16",
        *overrides,
    )
    metrics = train_on_ranks(cfg)
    samples = run_dir / "samples.json"
    return metrics, json.loads(samples.read_text()) if samples.exists() else []


def test_predictions_samples_and_exact_match_agree_at_any_layout(digits, tmp_path):
    found = {}
    for layout in ("layout=one_process", "layout=images_tp2_language_pp2", "layout=images_dp1_language_tp2"):
        folder = tmp_path / layout
        metrics, samples = evaluated(digits, folder, layout, "train.eval_samples=8")
        last = metrics[-1]
        assert last["eval/samples"] == 8 and len(samples) == 8
        right = sum(sample["correct"] for sample in samples)
        assert last["eval/exact_match"] == pytest.approx(right / 8)
        lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
        assert [line["number"] for line in lines] == list(range(8)) and {line["step"] for line in lines} == {30}
        assert sum(line["exact_match"] for line in lines) == right
        assert [(line["question"], line["truth"]) for line in lines] == [
            (sample["question"], sample["truth"]) for sample in samples
        ]
        weights = sum(line["tokens"] for line in lines)
        assert last["eval/loss"] == pytest.approx(sum(line["loss"] * line["tokens"] for line in lines) / weights)
        assert len({(line["shard"], line["key"]) for line in lines}) == 8
        found[layout] = (last["eval/loss"], [sample["answer"] for sample in samples])
        assert all(sample["images"] or "after" in sample["question"] for sample in samples)
    losses, answers = zip(*found.values(), strict=True)
    assert max(losses) - min(losses) < 1e-4
    assert answers[0] == answers[1] == answers[2]


def test_held_out_samples_count_once_whatever_the_batch(digits, tmp_path):
    metrics, _ = evaluated(digits, tmp_path, "layout=one_process", "train.iters=1", "train.report_samples=0")
    assert metrics[-1]["eval/samples"] == 40


def test_the_report_has_as_many_samples_as_asked_for_whatever_the_batch(digits, tmp_path):
    batch = ("train.global_batch_size=16", "train.micro_batch_size=4", "train.iters=1", "train.report_samples=12")
    _, samples = evaluated(digits, tmp_path, "layout=images_dp1_language_dp2", *batch)
    assert len(samples) == 12


def test_finetune_without_weights_is_a_fault():
    from mimo_train.config.compose import load
    from mimo_train.config.errors import ConfigError
    from mimo_train.training.pretrain import finetune

    with pytest.raises(ConfigError, match=r"checkpoint\.weights"):
        finetune(load("vlm_digits"))


def test_finetune_starts_from_the_weights_of_another_run_on_other_data(digits, tmp_path):
    first = curve(train_on_ranks(config("vlm_digits", tmp_path / "first", digits, "train.iters=20")))
    cfg = config(
        "vlm_digits",
        tmp_path / "second",
        digits,
        "layout=images_dp1_language_tp2",
        f"data.shards={digits}/held_out",
        f"checkpoint.weights={tmp_path}/first",
        "train.iters=2",
    )
    second = curve(train_on_ranks(cfg))
    assert [point[0] for point in second] == [1, 2]
    assert second[0][1] < 0.7 * first[0][1] and abs(second[1][1] - first[-1][1]) < 1


def _adam_against_torch() -> float:
    import torch

    from mimo_train.optim.group_optimizer import GroupOptimizer

    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    one, other = GroupOptimizer(ours.parameters(), **settings), torch.optim.AdamW(theirs.parameters(), **settings)
    for _ in range(20):
        inputs = torch.randn(4, 5)
        for model, optimizer in ((ours, one), (theirs, other)):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    assert one.param_groups[0]["step"] == 20
    return max(float((a - b).abs().max()) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_our_adamw_is_torch_adamw():
    assert run_ranks(_adam_against_torch, 1)[0] < 1e-6

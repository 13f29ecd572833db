"""Losses of a step: every pattern of a loss function, against hand-computed numbers and at several layouts."""

import pytest

from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TOLERANCE, config

# Rank 0 learns from 1 token, rank 1 from 3 + 2; two microbatches each.
MASKS = ([[1, 0, 0, 0], [0, 0, 0, 0]], [[1, 1, 1, 0], [0, 0, 1, 1]])
VALUES = ([[4.0, 9, 9, 9], [9.0, 9, 9, 9]], [[1.0, 2, 3, 9], [9.0, 9, 5, 6]])


def _sum_over_ranks(returns: str, weights: dict[str, float]) -> tuple[dict[str, float], list[float], list[float]]:
    """Losses of the step, and total and count of every microbatch as the schedule gets them."""
    import os

    import torch

    from mimo_train.config.parts import LANGUAGE
    from mimo_train.layout.ranks import ModuleLayout, RunLayout
    from mimo_train.parallel import device
    from mimo_train.parallel.groups import build_groups
    from mimo_train.training.step.losses import StepLosses
    from mimo_train.training.tasks.sft import masked_token_loss
    from mimo_train.training.train_step import reduce_metrics

    device.install("cpu")
    device.init_process_group("cpu", 1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module = ModuleLayout(LANGUAGE, tp=1, pp=1, dp=world, cp=1, ep=1, sp=False, first_rank=0)
    losses = StepLosses(weights, build_groups(RunLayout({LANGUAGE: module}, (), (0, 1))))

    def loss_func(mask, output, non_loss_data=False):
        if non_loss_data:
            return "data"
        total, count, report = masked_token_loss(mask, output)
        if returns == "tokens":
            return total, count, report
        if returns == "mean":
            return total / count.clamp(min=1), {"mean": total / count.clamp(min=1)}
        if returns == "named":
            return {"lm loss": (total, count), "small": output.mean()}
        if returns == "axes":
            return total.reshape(1), count.reshape(1), {"lm loss": report["lm loss"], "total": total.reshape(1, 1)}
        if returns == "unnamed tokens":
            return total, int(count), {}
        if returns == "unnamed mean":
            return output.mean().reshape(1), {}
        if returns == "many":
            return total, count, {f"loss {number}": number for number in range(40)}
        if returns == "too many":
            return total, count, dict.fromkeys(map(str, range(65)), 0.0)
        if returns == "per token":
            return output, count, report
        if returns == "fractions":
            return total, count * 0.5, report
        return total

    losses.begin()
    totals, counts = [], []
    for mask, value in zip(MASKS[rank], VALUES[rank], strict=True):
        wrapped = losses.wrap(lambda output, mask=mask, **options: loss_func(torch.tensor([mask]), output, **options))
        assert wrapped(torch.tensor([value]), non_loss_data=True) == "data"
        total, count, _ = wrapped(torch.tensor([value]))
        totals.append(float(total))
        counts.append(float(count))
    sums = reduce_metrics({"losses": (losses.numbers, losses.local_sums())}, device.CPU)["losses"]
    means, _ = losses.reduced(sums)
    return {name: float(value) for name, value in means.items()}, totals, counts


def test_token_losses_of_uneven_ranks_are_those_of_one_process():
    for losses, _, counts in run_ranks(_sum_over_ranks, 2, "tokens", {}):
        assert losses == {"lm loss": pytest.approx((4 + 1 + 2 + 3 + 5 + 6) / 6)}
        assert sum(counts) in (1, 5)


@pytest.mark.parametrize(
    ("returns", "losses", "totals", "counts"),
    [
        ("axes", {"lm loss": 4.0, "total": (4 + 0) / 2}, [4, 0], [1, 0]),
        ("unnamed tokens", {"loss": 4.0}, [4, 0], [1, 0]),
        ("unnamed mean", {"loss": (7.75 + 9) / 2}, [7.75, 9], [1, 1]),
        ("many", {f"loss {number}": number for number in range(40)}, [4, 0], [1, 0]),
    ],
)
def test_losses_with_axes_without_names_and_of_many_names(returns, losses, totals, counts):
    assert run_ranks(_sum_over_ranks, 1, returns, {}) == [(losses, totals, counts)]


def test_means_are_averaged_over_microbatches_and_ranks():
    for losses, totals, counts in run_ranks(_sum_over_ranks, 2, "mean", {}):
        assert losses == {"mean": pytest.approx((4 + 0 + 2 + 5.5) / 4)}
        # Divided by the sum of counts, 4, gradients are those of the mean.
        assert counts == [1, 1] and len(totals) == 2


def test_named_losses_are_weighted_by_the_config():
    (first, totals, counts), _ = run_ranks(_sum_over_ranks, 2, "named", {"small": 0.5})
    assert first["lm loss"] == pytest.approx(21 / 6)
    assert first["small"] == pytest.approx((7.75 + 9 + 3.75 + 7.25) / 4)
    assert counts == [1, 0] and totals == [pytest.approx(4 + 0.5 * 7.75), 0]


@pytest.mark.parametrize(
    ("returns", "weights", "message"),
    [
        ("nothing", {}, r"returned Tensor: it must return one of \(loss, \{name: value\}\)"),
        ("tokens", {"lm loss": 2.0}, "train.loss_weights: names lm loss, but the loss function returns its total"),
        ("too many", {}, "the loss function reports 65 losses, expected at most 64"),
        ("per token", {}, r"returned the loss with shape \(1, 4\), expected one number. Return its sum or mean"),
        ("fractions", {}, r"num_tokens of type torch.float32, expected whole numbers. Return num_tokens.to\(torch.int"),
        ("named", {"smal": 2.0}, "train.loss_weights.smal: no such loss; the forward step returns lm loss, small"),
    ],
)
def test_what_a_loss_function_cannot_return_is_named(returns, weights, message):
    with pytest.raises(RankFailure, match=message):
        run_ranks(_sum_over_ranks, 1, returns, weights)


def _train_two_tasks(cfg, pattern: str) -> list[float] | None:
    """Gradient norms of three steps of a run whose forward step gives the token loss in another pattern."""
    from functools import partial

    from mimo_train.training.callbacks import Callback
    from mimo_train.training.pretrain import pretrain
    from mimo_train.training.step.forward_step import gpt_forward_step
    from mimo_train.training.step.state import GlobalState
    from mimo_train.training.tasks.sft import masked_token_loss

    norms = []

    class Notes(Callback):
        def on_step_end(self, state, result):
            norms.append(result.grad_norm)

    def loss_func(mask, output, non_loss_data=False):
        total, count, report = masked_token_loss(mask, output)
        if pattern == "mean":
            # A mean over a constant, so that every microbatch counts alike.
            return total / 100, {"lm loss": total / 100}
        return {"lm loss": (total, count), "square": ((output.float() ** 2 * mask).sum(), count)}

    def forward_step(state: GlobalState, data_iterator, model):
        output, token_loss = gpt_forward_step(state, data_iterator, model)
        return output, partial(loss_func, token_loss.args[0]["loss_mask"])

    pretrain(cfg, forward_step, callbacks=[Notes()])
    return norms


@pytest.mark.parametrize("pattern", ["mean", "named"])
def test_every_pattern_gives_the_gradients_of_one_process(pattern, prose, tmp_path):
    weights = ["train.loss_weights={square: 0.1}"] if pattern == "named" else []
    norms = []
    for layout in ("one", "dp2", "pp2", "cp2"):
        overrides = (
            f"layout=language_{layout}",
            "train.iters=3",
            f"train.micro_batch_size={2 if layout == 'dp2' else 4}",
        )
        cfg = config("gpt_tiny", tmp_path / layout, prose, *overrides, "train.global_batch_size=8", *weights)
        norms.append(run_ranks(_train_two_tasks, 1 if layout == "one" else 2, cfg, pattern)[0])
    # With dp2 there are as many microbatches, of half the samples: a sum of each is half as large.
    scale = 2 if pattern == "mean" else 1
    assert norms[2] == pytest.approx(norms[0], rel=TOLERANCE)
    assert norms[3] == pytest.approx(norms[0], rel=TOLERANCE), "ranks of cp add up to the loss of the sequence"
    assert norms[1][0] * scale == pytest.approx(norms[0][0], rel=TOLERANCE)

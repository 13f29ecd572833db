"""Losses: forms that cannot be mixed with losses of routers, sums of an interval, and the step of several modules."""

from types import SimpleNamespace

import pytest
import torch

from mimo_train.config.errors import UserError
from mimo_train.training.interval import add_step, take_means
from mimo_train.training.step import forward_step
from mimo_train.training.step.losses import StepLosses

ONE, PAIR = torch.tensor(2.0, requires_grad=True), torch.tensor([6.0, 3.0])
RETURNS = {
    "mean": ((ONE, {"loss": ONE}), True),
    "named mean": ({"loss": ONE, "other": PAIR}, True),
    "named sum": ({"loss": PAIR, "other": ONE}, False),
    "sum": ((ONE, torch.tensor(3), {"loss": PAIR}), False),
}


@pytest.mark.parametrize(("returned", "is_mean"), RETURNS.values(), ids=RETURNS.keys())
@pytest.mark.parametrize("needs_tokens", [False, True], ids=["dense", "experts"])
def test_a_mean_is_refused_beside_losses_of_routers(returned, is_mean, needs_tokens):
    losses = StepLosses({}, SimpleNamespace(collections={}), needs_tokens=needs_tokens)
    losses.begin()
    wrapped = losses.wrap(lambda output: returned)
    if needs_tokens and is_mean:
        with pytest.raises(UserError, match="router_aux_loss.*returns a mean"):
            wrapped(None)
    else:
        wrapped(None)
        assert len(losses.reports) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("sum of loss/web", "tokens of loss/web", "empty iterations of lm loss", "nan iterations", "step"),
        *("eval/loss", "test/exact_match"),
    ],
)
def test_a_loss_by_the_name_of_another_number_is_an_error(name):
    """Else it would be taken for the sum of a source's losses, or written over the step's number."""
    totals: dict = {}
    with pytest.raises(UserError, match=f"loss named '{name}'.*another name"):
        add_step(totals, {"lm loss": torch.tensor(1.0), name: torch.tensor(1.0)}, 0)
    assert not totals, "nothing is added"


@pytest.mark.parametrize(("pairs", "mean", "count"), [([(0.0, 0.0), (6.0, 3.0)], 2.0, 3), ([(0.0, 0.0)], 0.0, 0)])
def test_a_step_without_samples_of_a_value_does_not_count_in_its_mean(pairs, mean, count):
    """The log leaves out a value with a count of 0."""
    totals: dict = {}
    losses = StepLosses({}, SimpleNamespace(collections={}), rare=("rewards/rejected",))
    for pair in pairs:
        losses.begin()
        report = {"loss": torch.tensor([2.0, 1.0]), "rewards/rejected": torch.tensor(pair)}
        losses.wrap(lambda output, report=report: (ONE, torch.tensor(1), report))(None)
        means, sums = losses.reduced(torch.tensor([2.0, 1.0, *pair], dtype=torch.float64))
        add_step(totals, means, 0, of_sources=sums)
    values = take_means(totals)
    assert float(values["loss"]) == 2.0 and float(values["rewards/rejected"]) == mean
    assert float(values["tokens of rewards/rejected"]) == count


def model(output, *, last: bool = True, language: bool = True):
    """Stands for a `MimoModel` at one stage; keeps what it was called with."""
    role = SimpleNamespace(has_language_module=language, is_last_stage=lambda name: last)

    def forward(**inputs):
        forward.inputs = inputs
        return output, inputs.get("loss_mask")

    forward.role = role
    return forward


def test_a_microbatch_holds_what_the_model_takes_and_nothing_else():
    microbatch = {"input_ids": 1, "labels": 2, "loss_mask": 3, "position_ids": 4, "sample_numbers": 5, "texts": []}
    microbatch["modality_inputs"] = {"images": {"images": {"pixels": 6}}}
    batch = forward_step.get_batch(iter([microbatch]))
    assert batch == {key: value for key, value in microbatch.items() if key not in ("sample_numbers", "texts")}
    with pytest.raises(KeyError, match="attention_mask: not in this microbatch. It has input_ids, .*causal"):
        batch["attention_mask"]
    assert forward_step.get_batch(iter([])) is None


def test_features_at_the_last_stage_are_a_clear_error():
    stage = model({"images": torch.zeros(1), "audio": torch.zeros(1)})
    with pytest.raises(TypeError, match=r"features of images, audio instead of a loss.*modules\.\*\.layout"):
        forward_step.mimo_forward_step(None, iter([{}]), stage)


def test_data_that_ends_early_is_named():
    with pytest.raises(ValueError, match=r"data ended before train\.iters"):
        forward_step.mimo_forward_step(None, iter([]), model(None))

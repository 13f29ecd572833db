"""Patterns of loss functions that cannot be mixed with losses of routers."""

from types import SimpleNamespace

import pytest
import torch

from mimo_train.config.errors import UserError
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

"""Names of losses in the sums of a logging interval."""

import pytest
import torch

from mimo_train.config.errors import UserError
from mimo_train.training.interval import add_step


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

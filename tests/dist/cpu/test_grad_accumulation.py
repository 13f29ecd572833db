"""Gradients are summed where ranks reduce them, with the numbers of Megatron-Core's own sums."""

import pytest

from mimo_train.cpu.grad_accumulation import InPlaceGradients
from mimo_train.models.parameters import modules_of
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, largest_difference
from tests.dist.steps import Steps, whole

KERNELS = "run.cpu_kernels=true"
DP2 = (KERNELS, "layout=one_process", "modules.images.layout.dp=2", "modules.language.layout.dp=2")
STEPS = 3


def _curve(cfg, ours: bool, removed: bool = False) -> tuple[list[tuple], int, int]:
    """Return the curve, the number of parameters whose gradient is their part of the buffer, and of all parameters.

    Args:
        removed: gradients of parameters are removed behind the start of each step.
    """
    if not ours:
        InPlaceGradients.sums_in_place = lambda self, parameter: False
    if removed:
        begin = InPlaceGradients.zero_grad_buffer

        def begin_and_remove(self) -> None:
            begin(self)
            for parameter in self.params_with_grad:
                parameter.grad = None

        InPlaceGradients.zero_grad_buffer = begin_and_remove
    run = Steps(cfg)
    curve = run.train(STEPS)
    chunks = [chunk for chunks in modules_of(run.session.model).values() for chunk in chunks]
    parameters = [each for chunk in chunks for each in chunk.params_with_grad]
    run.session.optimizer.zero_grad()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    in_place = sum(each.grad is each.main_grad for each in parameters)
    return curve, in_place, len(parameters)


def test_gradients_that_someone_removes_are_summed_all_the_same(digits, tmp_path):
    def curve(name: str, removed: bool) -> tuple:
        (found,) = run_ranks(
            _curve, 1, config("vlm_digits", tmp_path / name, digits, KERNELS, "layout=one_process"), True, removed
        )
        return found

    (ours, *_), (removed, in_place, _) = curve("ours", False), curve("removed", True)
    assert in_place == 0
    assert max(largest_difference(whole([ours]), whole([removed]))) < 1e-6


@pytest.mark.parametrize("override", ["train.precision=bf16", "optim.overlap_grad_reduce=true"])
def test_of_another_type_or_reduced_earlier_they_are_megatron_cores(override, digits, tmp_path):
    cfg = config("vlm_digits", tmp_path / "run", digits, *DP2, override)
    for curve, in_place, every in run_ranks(_curve, 2, cfg, True):
        assert in_place == 0 < every
        assert len({loss for _, loss, _ in whole([curve])}) == STEPS, "it learns"

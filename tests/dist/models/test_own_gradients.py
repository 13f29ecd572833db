"""Gradients are summed where ranks reduce them, with the numbers of Megatron-Core's own sums."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mimo_train.models import own_gradients
from mimo_train.models.names import modules_of
from mimo_train.models.own_gradients import OwnGradients
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, largest_difference
from tests.dist.steps import Steps, whole

DP2 = ("layout=one_process", "modules.images.layout.dp=2", "modules.language.layout.dp=2")
STEPS = 3


def _curve(cfg, ours: bool, removed: bool = False) -> tuple[list[tuple], int, int, int]:
    """(curve, parameters whose gradient is the part of the buffer after the last step, all of them, products that were
    written into the buffer).

    Args:
        removed: gradients of parameters are removed behind the start of each step.
    """
    if not ours:
        OwnGradients.sums_in_place = lambda self, parameter: False
    if removed:
        begin = OwnGradients.zero_grad_buffer

        def begin_and_remove(self) -> None:
            begin(self)
            for parameter in self.params_with_grad:
                parameter.grad = None

        OwnGradients.zero_grad_buffer = begin_and_remove
    products = []
    backward = own_gradients._Linear.backward
    own_gradients._Linear.backward = staticmethod(lambda *given: (products.append(1), backward(*given))[1])
    run = Steps(cfg)
    curve = run.train(STEPS)
    chunks = [chunk for chunks in modules_of(run.session.model).values() for chunk in chunks]
    parameters = [each for chunk in chunks for each in chunk.params_with_grad]
    run.session.optimizer.zero_grad()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    in_place = sum(each.grad is each.main_grad for each in parameters)
    return curve, in_place, len(parameters), len(products)


@pytest.mark.parametrize("overrides", [DP2, (*DP2, "optim.distributed_optimizer=false"), (*DP2, "data.pack=true")])
def test_the_numbers_are_those_of_separate_sums(overrides, digits, tmp_path):
    def curves(name: str, ours: bool) -> list:
        return run_ranks(_curve, 2, config("vlm_digits", tmp_path / name, digits, *overrides), ours)

    ours, theirs = curves("ours", True), curves("theirs", False)
    for _, in_place, every, products in ours:
        assert in_place == every and products >= 4 * STEPS, "four products of a layer in each step"
    assert [each[1:] for each in theirs] == [(0, ours[0][2], 0)] * 2
    assert max(largest_difference(*(whole([curve for curve, *_ in each]) for each in (ours, theirs)))) < 1e-6


def test_gradients_that_someone_removes_are_summed_all_the_same(digits, tmp_path):
    def curve(name: str, removed: bool) -> tuple:
        (found,) = run_ranks(
            _curve, 1, config("vlm_digits", tmp_path / name, digits, "layout=one_process"), True, removed
        )
        return found

    (ours, *_), (removed, in_place, _, products) = curve("ours", False), curve("removed", True)
    assert in_place == products == 0
    assert max(largest_difference(whole([ours]), whole([removed]))) < 1e-6


@pytest.mark.parametrize("override", ["train.precision=bf16", "optim.overlap_grad_reduce=true"])
def test_of_another_type_or_reduced_earlier_they_are_megatron_cores(override, digits, tmp_path):
    cfg = config("vlm_digits", tmp_path / "run", digits, *DP2, override)
    for curve, in_place, every, products in run_ranks(_curve, 2, cfg, True):
        # Overlap is of the language model alone.
        assert (in_place, products) == (0, 0) if "bf16" in override else in_place < every
        assert len({loss for _, loss, _ in whole([curve])}) == STEPS, "it learns"


def test_a_weight_with_a_hook_has_its_gradient_by_itself():
    weight = torch.nn.Parameter(torch.randn(3, 4))
    weight.main_grad = torch.ones(3, 4)
    weight.grad = weight.main_grad
    inputs, seen = torch.randn(2, 5, 4, requires_grad=True), []
    own_gradients.linear(inputs, weight, None).sum().backward()
    once = weight.grad - 1
    torch.testing.assert_close(once, inputs.detach().sum((0, 1)).expand(3, 4))
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    own_gradients.linear(inputs, weight, None).sum().backward()
    torch.testing.assert_close(seen, [once])
    torch.testing.assert_close(weight.grad, 1 + 2 * once)
    torch.testing.assert_close(inputs.grad, 2 * weight.detach().sum(0).expand(2, 5, 4))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_that_was_frozen_since_gets_no_gradient(frozen):
    """As by `freeze_until`, or by a callback: it stays among the parameters of the buffer."""
    inputs, weight = torch.ones(3, 4, requires_grad=True), torch.nn.Parameter(torch.ones(2, 4))
    weight.main_grad = weight.grad = torch.zeros(2, 4)
    weight.requires_grad_(not frozen)
    own_gradients.linear(inputs, weight, None).sum().backward()
    assert torch.equal(weight.main_grad, torch.full((2, 4), 0.0 if frozen else 3.0))
    assert torch.equal(inputs.grad, torch.full((3, 4), 2.0))


@pytest.mark.parametrize("biased", [False, True])
def test_halves_of_a_weight_are_summed_in_place(biased):
    inputs, other = torch.randn(2, 5, 4), torch.randn(2, 5, 3)

    def gradients(in_place: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        weight, own = torch.nn.Parameter(torch.randn(6, 4)), inputs.clone().requires_grad_()
        bias = torch.nn.Parameter(torch.randn(6)) if biased else None
        weight.grad = torch.ones(6, 4)
        if in_place:
            weight.main_grad = weight.grad
        first, second = own_gradients.linear_halves(own, weight, bias)
        assert ("_Linear" in type(first.grad_fn).__name__) == in_place and first.is_contiguous() == in_place
        (first * other + second.sin()).sum().backward()
        return [first, second, own.grad, weight.grad, *([] if bias is None else [bias.grad])]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-6, atol=1e-6)


def _of_weight(change) -> str:
    weight = torch.nn.Parameter(torch.ones(4, 3))
    weight.main_grad = weight.grad = torch.zeros(4, 3)
    inputs = torch.ones(2, 3, requires_grad=True)
    change(weight)
    return type(own_gradients.linear_halves(inputs, weight, None)[0].grad_fn).__name__


def test_halves_whose_weight_is_not_summed_in_place_are_cut():
    assert "_Linear" in _of_weight(lambda weight: None)
    for change in (
        lambda weight: weight.requires_grad_(False),
        lambda weight: weight.register_hook(lambda gradient: None),
        lambda weight: setattr(weight, "grad", None),
        lambda weight: setattr(weight, "main_grad", torch.zeros(4, 3)),
    ):
        assert "Split" in _of_weight(change)
    weight = torch.nn.Parameter(torch.ones(4, 3))
    weight.main_grad = weight.grad = torch.zeros(4, 3)
    with torch.no_grad():
        first, second = own_gradients.linear_halves(torch.ones(2, 3), weight, None)
    assert first.equal(torch.full((2, 2), 3.0)) and first.equal(second) and not first.requires_grad


def test_a_hook_that_waits_for_the_gradient_sees_it_whole():
    """As of an optimizer that steps within the backward pass."""
    weight, seen = torch.nn.Parameter(torch.ones(2, 4)), []
    weight.main_grad = weight.grad = torch.zeros(2, 4)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    own_gradients.linear(torch.ones(3, 4), weight, None).sum().backward()
    torch.testing.assert_close(seen, [torch.full((2, 4), 3.0)])


@pytest.mark.parametrize("reentrant", [False, True])
def test_products_that_are_computed_again_are_summed_in_place(reentrant):
    weight, inputs = torch.nn.Parameter(torch.ones(2, 4)), torch.ones(3, 4, requires_grad=True)
    weight.main_grad = weight.grad = torch.zeros(2, 4)

    def product(own: torch.Tensor) -> torch.Tensor:
        return own_gradients.linear(own, weight, None)

    checkpoint(product, inputs, use_reentrant=reentrant).sum().backward()
    assert weight.grad is weight.main_grad and torch.equal(weight.main_grad, torch.full((2, 4), 3.0))
    assert torch.equal(inputs.grad, torch.full((3, 4), 2.0))

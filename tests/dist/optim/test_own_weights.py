"""fp32 weights are updated where the model reads them, and nothing is copied onto itself."""

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mimo_train.optim.factory import has_own_weights
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, largest_difference
from tests.dist.steps import Steps, whole

DP2 = ("layout=one_process", "modules.images.layout.dp=2", "modules.language.layout.dp=2")


def _curve(cfg, copies: bool) -> tuple[list[tuple], list[bool], int]:
    """(curve, whether the weights of each optimizer are the model's own, copies of one onto itself if it had them)."""
    run = Steps(cfg)
    inner = [one for one in run.session.optimizer.inner() if isinstance(one, DistributedOptimizer)]
    own = [has_own_weights(one) for one in inner if not one.is_stub_optimizer]
    if copies:
        for one in inner:
            vars(one).pop("_copy_main_params_to_model_params", None)
    curve = run.train(3)
    onto_itself = []
    copy = torch.Tensor.copy_

    def counted(into, given, *rest):
        onto_itself.append(into.data_ptr() == given.data_ptr())
        return copy(into, given, *rest)

    torch.Tensor.copy_ = counted
    for one in inner:
        DistributedOptimizer._copy_main_params_to_model_params(one)
    return curve, own, sum(onto_itself)


def test_without_copies_the_curve_is_the_same(digits, tmp_path):
    def curves(name: str, copies: bool) -> list:
        return run_ranks(_curve, 2, config("vlm_digits", tmp_path / name, digits, *DP2), copies)

    ours, theirs = curves("ours", False), curves("theirs", True)
    assert max(largest_difference(*(whole([curve for curve, _, _ in each]) for each in (ours, theirs)))) == 0
    for _, own, onto_itself in ours:
        assert own and all(own)
        assert onto_itself, "Megatron-Core copies nothing onto itself any more: own_weights is not needed"


def test_weights_of_bf16_are_copied_from_those_that_are_updated(digits, tmp_path):
    cfg = config("vlm_digits", tmp_path / "run", digits, *DP2, "train.precision=bf16")
    for curve, own, onto_itself in run_ranks(_curve, 2, cfg, False):
        assert own and not any(own) and not onto_itself
        assert len({loss for _, loss, _ in whole([curve])}) == 3, "it learns"

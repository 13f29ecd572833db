"""The optimizer over modules: Megatron-Core's numbers in fewer messages, clip groups, the guard, loss scaling."""

import math
from collections import Counter

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, config, largest_difference
from tests.dist.steps import Steps, whole

WORLD = {"one_process": 1, "two_processes": 2, "images_dp2_language_dp1": 3, "images_tp2_language_pp2": 4}


def vlm(digits, run_dir, layout: str, *overrides: str):
    return config("vlm_digits", run_dir, digits, f"layout={layout}", "train.iters=20", *overrides)


def _curve(cfg, megatrons_own: bool) -> list[tuple]:
    from megatron.core.models.mimo.optimizer import MimoOptimizer

    steps = Steps(cfg)
    if megatrons_own:
        steps.optimizer.step = lambda: MimoOptimizer.step(steps.optimizer)
    return steps.train(6)


@pytest.mark.parametrize("layout", ["two_processes", "images_dp2_language_dp1", "images_tp2_language_pp2"])
def test_a_step_gives_the_numbers_of_megatron_cores_own(layout, digits, tmp_path):
    # A norm that is small enough for clipping to matter.
    cfg = vlm(digits, tmp_path, layout, "optim.clip_grad=0.5")
    ours = whole(run_ranks(_curve, WORLD[layout], cfg, False))
    theirs = whole(run_ranks(_curve, WORLD[layout], cfg, True))
    assert max(largest_difference(theirs, ours)) < TOLERANCE
    assert all(norm > 0.5 for _, _, norm in ours)


def _count(cfg) -> Counter:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Messages(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found[func.overloadpacket._qualified_op_name] += 1
            return func(*args, **(kwargs or {}))

    found = Counter()
    steps = Steps(cfg)
    steps.train(1)
    inner = steps.optimizer.step_with_ready_grads

    def without_gathering_of_weights():
        kept = Counter(found)
        inner()
        found.clear()
        found.update(kept)

    steps.optimizer.step_with_ready_grads = without_gathering_of_weights
    with Messages():
        steps.optimizer.step()
    return found


def test_norms_and_overflows_of_all_modules_travel_in_one_message(digits, tmp_path):
    for counts in run_ranks(_count, 2, vlm(digits, tmp_path, "two_processes")):
        assert {name: count for name, count in counts.items() if name.startswith("c10d::")} == {"c10d::allreduce_": 1}


def _norms_and_clipping(cfg) -> tuple[dict, float, dict]:
    """Norms by module, the norm that is reported, and the norm of what is left of each module's gradient here."""
    steps = Steps(cfg)
    optimizer, left = steps.optimizer, {}
    inner = optimizer.step_with_ready_grads

    def look():
        inner()  # which may be what scales them
        for name, info in optimizer.module_infos.items():
            squares = [
                float(parameter.grad.double().square().sum())
                for part in optimizer.inner(info)
                for parameter in part.get_parameters()
            ]
            left[name] = math.sqrt(sum(squares))

    optimizer.step_with_ready_grads = look
    ((_, norm),) = steps.train(1)
    return optimizer.module_grad_norms, norm, left


@pytest.mark.parametrize("layout", ["one_process", "two_processes"])
def test_a_module_with_its_own_clip_grad_is_a_group_of_its_own(layout, digits, tmp_path):
    own = ("modules.images.optim.clip_grad=1e-4", "optim.clip_grad=1e-3")
    results = run_ranks(_norms_and_clipping, WORLD[layout], vlm(digits, tmp_path, layout, *own))
    left = {name: max(result[2][name] for result in results) for name in ("images", "language")}
    for norms, reported, _ in results:
        assert reported == pytest.approx(math.hypot(norms["images"], norms["language"]), rel=1e-6)
        assert norms["images"] > 1e-4 and norms["language"] > 1e-3
    assert left["images"] == pytest.approx(1e-4, rel=1e-3)
    assert left["language"] == pytest.approx(1e-3, rel=1e-3)


def test_modules_without_their_own_clip_grad_are_clipped_together(digits, tmp_path):
    norms, reported, left = run_ranks(
        _norms_and_clipping, 1, vlm(digits, tmp_path, "one_process", "optim.clip_grad=0.01")
    )[0]
    for name in ("images", "language"):
        assert left[name] == pytest.approx(norms[name] * 0.01 / reported, rel=1e-3)


def test_clip_grad_of_zero_does_not_clip_that_module(digits, tmp_path):
    own = ("modules.images.optim.clip_grad=0", "optim.clip_grad=1e-3")
    norms, _, left = run_ranks(_norms_and_clipping, 1, vlm(digits, tmp_path, "one_process", *own))[0]
    assert left["images"] == pytest.approx(norms["images"], rel=1e-6)
    assert left["language"] == pytest.approx(1e-3, rel=1e-3)


def _broken_step(cfg, poison: float, rank: int) -> dict:
    """Two good steps with a broken one between them, in which one gradient of one rank is `poison`."""
    import torch
    import torch.distributed as dist

    from mimo_train.models.parameters import modules_of

    steps = Steps(cfg)
    steps.train(1)
    before, moments = steps.parameters(), [_states(steps)]
    scales = [float(steps.optimizer.get_loss_scale())]
    finalize = steps.model[0].config.finalize_model_grads_func

    def poisoned(*args, **kwargs):
        finalize(*args, **kwargs)
        if dist.get_rank() == rank:
            chunks = next(iter(modules_of(steps.model).values()))
            chunks[0].buffers[0].grad_data[:] = poison

    steps.model[0].config.finalize_model_grads_func = poisoned
    rates = steps.scheduler.learning_rates()
    steps.train(1)
    broken = steps.result
    scales.append(float(steps.optimizer.get_loss_scale()))
    after = steps.parameters()
    moments.append(_states(steps))
    steps.model[0].config.finalize_model_grads_func = finalize
    unmoved_rates = steps.scheduler.learning_rates() == rates
    ((_, norm),) = steps.train(1)
    return {
        "result": (not broken.skipped_iter, broken.grad_norm, broken.num_zeros_in_grad),
        "weights": all(torch.equal(before[name], after[name]) for name in before),
        "states": all(torch.equal(one, other) for one, other in zip(*moments, strict=True)),
        "rates": unmoved_rates,
        "norm after": norm,
        "scales": scales,
    }


def _states(steps) -> list:
    import torch

    found = []
    for part in steps.optimizer.inner():
        found += [value.clone() for state in part.optimizer.state.values() for value in state.values()]
        found += [torch.tensor(group["step"]) for group in part.param_groups]
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(poison, precision, digits, tmp_path):
    cfg = vlm(digits, tmp_path, "two_processes", f"train.precision={precision}")
    for found in run_ranks(_broken_step, 2, cfg, poison, 0):
        updated, norm, zeros = found["result"]
        assert updated is False and zeros is None and not math.isfinite(norm)
        assert found["weights"] and found["states"] and found["rates"]
        assert math.isfinite(found["norm after"])


@pytest.mark.parametrize(("rank", "frozen"), [(0, ()), (1, ()), (0, ("modules.language.freeze=[llm]",))])
def test_an_overflow_in_one_module_halves_the_scale_of_all(rank, frozen, digits, tmp_path):
    """Also on ranks that train nothing, where the loss is scaled all the same."""
    cfg = vlm(digits, tmp_path, "two_processes", "train.precision=fp16", "optim.initial_loss_scale=256", *frozen)
    for found in run_ranks(_broken_step, 2, cfg, math.inf, rank):
        updated, norm, _ = found["result"]
        assert updated is False and not math.isfinite(norm)
        assert found["scales"] == [256, 128]
        assert found["weights"] and found["states"] and found["rates"]
        assert math.isfinite(found["norm after"])

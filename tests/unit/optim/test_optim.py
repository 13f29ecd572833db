"""Settings and schedules of modules, stages of freezing, and forward hooks, without processes."""

from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch

from mimo_train.bridge.training.train import (
    _handle_mxfp8_param_buffer_copy,
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    should_disable_forward_pre_hook,
)
from mimo_train.config.schema_optim import GroupConfig
from mimo_train.layout.run import config_faults
from mimo_train.models.freeze import FreezeStages
from mimo_train.optim import group_optimizer
from mimo_train.optim.factory import _grad_scaler
from mimo_train.optim.group_optimizer import GroupOptimizer
from mimo_train.optim.schedules import ModuleSchedulers
from tests.unit.configs import changed


def test_a_module_takes_what_it_sets_and_the_rest_from_the_run():
    cfg = changed(
        {
            "optim.lr": 1e-3,
            "optim.beta2": 0.9,
            "modules.images.optim.lr": 0.0,
            "modules.images.optim.decay": "linear",
            "modules.images.optim.projector_lr": 5e-3,
        }
    )
    images, language = cfg.optim_of("images"), cfg.optim_of("language")
    assert (images.lr, images.decay, images.beta2, images.clip_grad) == (0.0, "linear", 0.9, cfg.optim.clip_grad)
    assert language == cfg.optim
    assert cfg.optim.lr == 1e-3


def test_megatron_core_builds_our_optimizer_whatever_is_installed(monkeypatch):
    core, shards = group_optimizer.megatron_optimizer, group_optimizer.distrib_optimizer
    for module, name in (
        (core, "USING_PYTORCH_OPTIMIZER"),
        (core, "Adam"),
        (shards, "Adam"),
        (shards, "HAVE_APEX_OR_TE"),
        (shards, "USING_APEX_OPTIMIZER"),
    ):
        monkeypatch.setattr(module, name, None)
    group_optimizer.install()
    assert core.Adam is shards.Adam is GroupOptimizer
    assert shards.HAVE_APEX_OR_TE and core.USING_PYTORCH_OPTIMIZER is False


def schedulers(values: dict) -> ModuleSchedulers:
    """Schedules of a rank that holds no module."""
    cfg = changed({"train.iters": 110, "optim.lr": 1e-3, "optim.min_lr": 1e-4, "optim.warmup_iters": 10, **values})
    infos = {name: SimpleNamespace(optimizer=None) for name in cfg.modules}
    return ModuleSchedulers(cfg, SimpleNamespace(module_infos=infos))


def test_every_rank_knows_the_rates_of_all_modules():
    rates = schedulers(
        {
            "optim.decay": "cosine",
            "modules.images.optim.lr": 2e-3,
            "modules.images.optim.warmup_iters": 20,
            "modules.images.optim.decay": "constant",
            "modules.images.optim.projector_lr": 4e-3,
        }
    )
    assert rates.learning_rates() == {"images": 0, "images.projector": 0, "language": 0}
    rates.step(5)
    assert rates.learning_rates() == pytest.approx({"images": 5e-4, "images.projector": 1e-3, "language": 5e-4})
    rates.step(55)
    # Half-way from step 10 to step 110 the cosine is half-way from its peak to its end.
    assert rates.learning_rates() == pytest.approx({"images": 2e-3, "images.projector": 4e-3, "language": 5.5e-4})
    rates.step(50)
    assert rates.learning_rates()["language"] == pytest.approx(1e-4)


def test_the_projectors_rate_follows_the_schedule_of_its_module():
    rates = schedulers({"modules.images.optim.decay": "linear", "modules.images.optim.projector_lr": 4e-3})
    rates.load_state_dict({"num_steps": 35})
    assert rates.learning_rates()["images"] == pytest.approx(1e-4 + 9e-4 * 0.75)
    assert rates.learning_rates()["images.projector"] == pytest.approx(1e-4 + 3.9e-3 * 0.75)


@pytest.mark.parametrize(
    ("values", "rates"),
    [
        # Constant to step 90, then 1 - sqrt(share of the last 20 steps).
        ({"decay": "wsd", "wsd_decay_fraction": 0.2}, {60: 1e-3, 90: 1e-3, 95: 5.5e-4, 110: 1e-4}),
        # The square root of warm-up over steps, which stops at min_lr.
        ({"decay": "inverse_sqrt"}, {5: 5e-4, 10: 1e-3, 40: 5e-4, 110: 1e-3 * (10 / 110) ** 0.5}),
        ({"decay": "inverse_sqrt", "min_lr": 4e-4}, {40: 5e-4, 110: 4e-4}),
    ],
)
def test_schedules_that_do_not_end_with_the_run(values, rates):
    run = schedulers({f"optim.{key}": value for key, value in values.items()})
    for step, rate in rates.items():
        run.load_state_dict({"num_steps": step})
        assert run.learning_rates()["language"] == pytest.approx(rate)


def test_groups_with_rates_are_logged_and_follow_the_schedule_of_their_module():
    groups = {"encoder": GroupConfig(lr=2e-3, min_lr=0.0), "*bias": GroupConfig(weight_decay=0.0)}
    run = schedulers({"modules.images.optim.decay": "linear", "modules.images.optim.groups": groups})
    run.load_state_dict({"num_steps": 35})
    assert set(run.learning_rates()) == {"images", "images.encoder", "language"}
    assert run.learning_rates()["images.encoder"] == pytest.approx(2e-3 * 0.75)


def test_a_frozen_module_has_no_rate():
    rates = schedulers({"modules.images.freeze": ["encoder", "projector"]})
    assert list(rates.learning_rates()) == ["language"]


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ({"train.precision": "fp32"}, None),
        ({"train.precision": "bf16"}, None),
        ({"train.precision": "fp16"}, 65536),
        ({"train.precision": "fp16", "optim.loss_scale": 128.0}, 128),
    ],
)
def test_only_fp16_scales_the_loss(values, scale, monkeypatch):
    # Scalers stand on the GPU.
    monkeypatch.setattr(torch, "tensor", lambda *args, device=None, make=torch.tensor, **kwargs: make(*args, **kwargs))
    scaler = _grad_scaler(changed(values))
    assert (scaler and float(scaler.scale)) == scale


class Released:
    """Notes what is released, in the place of an optimizer."""

    def __init__(self, releases: dict):
        self.releases, self.released = releases, []

    def release(self, step: int) -> None:
        self.released.append(step)


def staged(*steps: int) -> tuple[list[torch.nn.Parameter], Released, FreezeStages]:
    """Parameters that are trained from `steps` on (0: always), and their stages."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in steps]
    optimizer = Released({each: step for each, step in zip(parameters, steps, strict=True) if step})
    cfg = changed({"modules.images.freeze_until": {"encoder": 3, "projector": 5}})
    return parameters, optimizer, FreezeStages(cfg, optimizer.releases, optimizer.release)


def test_parameters_are_released_at_their_step():
    parameters, optimizer, stages = staged(0, 3, 5)
    seen = []
    for step in range(7):
        stages.apply(step)
        seen.append([parameter.requires_grad for parameter in parameters])
    assert seen == [[True, False, False]] * 3 + [[True, True, False]] * 2 + [[True, True, True]] * 2
    assert optimizer.released == [3, 5]


def test_a_resumed_run_releases_what_has_been_released():
    parameters, optimizer, stages = staged(0, 3, 5)
    stages.apply(4)
    assert [parameter.requires_grad for parameter in parameters] == [True, True, False]
    assert optimizer.released == [3]


def test_a_rank_without_such_parameters_releases_at_the_same_step():
    _, optimizer, stages = staged(0)
    stages.apply(9)
    assert optimizer.released == [3, 5]


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        (
            {"modules.images.optim.lr": 1e-6},
            "modules.images.optim.lr",
            "set modules.images.optim.min_lr to at most 1e-06",
        ),
        ({"modules.language.optim.projector_lr": 1e-3}, "modules.language.optim.projector_lr", "no projector"),
        ({"modules.images.freeze_until": {"llm": 3}}, "modules.images.freeze_until", "encoder and projector"),
        (
            {"modules.images.freeze_until": {"encoder": 3}, "modules.images.freeze": ["encoder"]},
            "modules.images.freeze_until",
            "remove it from one of them",
        ),
        (
            {
                "modules.images.freeze": ["encoder"],
                "modules.images.freeze_until": {"projector": 7},
                "modules.language.freeze_until": {"llm": 9},
            },
            "modules.images.freeze_until",
            "nothing is trained in the first 7 steps",
        ),
        ({"optim.overlap_param_gather": True}, "optim.overlap_param_gather", "optim.overlap_grad_reduce"),
    ],
)
def test_impossible_settings_are_faults_of_their_key(values, key, said):
    found = {fault.key: fault.message for fault in config_faults(changed(values))}
    assert said in found[key], found


@pytest.mark.parametrize(
    ("fsdp", "distributed", "overlap", "disable"),
    [(False, True, True, True), (True, True, True, False), (False, False, True, False), (False, True, False, False)],
)
def test_hooks_are_off_while_saving_where_parameters_may_be_on_their_way(fsdp, distributed, overlap, disable):
    assert should_disable_forward_pre_hook(fsdp, distributed, overlap) is disable


def test_hooks_are_switched_where_there_are_any():
    plain, hooked = Mock(use_forward_hook=False), Mock(use_forward_hook=True)
    disable_forward_pre_hook([plain, hooked])
    enable_forward_pre_hook([plain, hooked])
    disable_forward_pre_hook([plain, hooked], param_sync=False)
    disable = call.disable_forward_pre_hook
    assert hooked.mock_calls == [disable(param_sync=True), call.enable_forward_pre_hook(), disable(param_sync=False)]
    assert plain.mock_calls == []


def test_main_parameters_are_copied_where_the_buffer_is_shared_and_gathering_overlaps():
    copied = []

    def optimizer(name: str) -> SimpleNamespace:
        return SimpleNamespace(_copy_main_params_to_param_buffer=lambda: copied.append(name))

    chain = SimpleNamespace(chained_optimizers=[optimizer("dense"), SimpleNamespace(), optimizer("experts")])
    infos = {"images": SimpleNamespace(optimizer=None), "language": SimpleNamespace(optimizer=chain)}
    modules = SimpleNamespace(module_infos=infos)
    for reuse, overlap in ((False, True), (True, False), (False, False)):
        _handle_mxfp8_param_buffer_copy(modules, reuse, overlap)
    assert copied == []
    _handle_mxfp8_param_buffer_copy(modules, True, True)
    assert copied == ["dense", "experts"]


def test_gradients_are_scaled_by_one_update_alone():
    torch.manual_seed(0)
    weights = [torch.randn(5, 3), torch.randn(7)]
    gradients = [[torch.randn_like(weight) for weight in weights] for _ in range(3)]
    scales = [0.25, 1.0, 0.3]

    def updated(scaled_before: bool) -> list[torch.Tensor]:
        own = [torch.nn.Parameter(weight.clone()) for weight in weights]
        adam = GroupOptimizer(own, lr=0.1, weight_decay=0.01)
        for scale, each in zip(scales, gradients, strict=True):
            for weight, gradient in zip(own, each, strict=True):
                weight.grad = gradient * scale if scaled_before else gradient.clone()
            if not scaled_before and scale != 1.0:
                adam.scale_gradients(scale)
            adam.step()
        return own

    for one, other in zip(updated(True), updated(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)

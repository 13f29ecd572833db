"""Norms at several layouts, against those read directly in one process, and what ranks agree on."""

import functools
import math

import pytest

from mimo_train.layout.run import resolve
from tests.dist.ranks import run_ranks
from tests.dist.runs import config
from tests.dist.steps import Steps

LANGUAGE = "modules.language.layout."
GATHERED_LATE = ("optim.overlap_grad_reduce=true", "optim.overlap_param_gather=true")
LAYOUTS = {
    "gpt": {
        "tp2, sequence parallel": ("layout=language_tp2", f"{LANGUAGE}sp=true"),
        "dp2, parameters gathered late": ("layout=language_dp2", *GATHERED_LATE),
        "tp2 pp2": ("layout=language_tp2", f"{LANGUAGE}pp=2"),
        "cp2 dp2": ("layout=language_cp2", f"{LANGUAGE}dp=2"),
        "pp2, interleaved": ("layout=language_pp2_vpp2",),
    },
    "vlm": {
        "vision tp2 + language pp2": ("layout=images_tp2_language_pp2",),
        "both tp2 on the same ranks": ("layout=one_process", "modules.images.layout.tp=2", f"{LANGUAGE}tp=2"),
    },
    "moe": {
        "cp2 ep2": ("layout=language_cp2", f"{LANGUAGE}ep=2"),
        "dp2": ("layout=language_dp2",),
        "tp2 etp2": ("layout=language_tp2", f"{LANGUAGE}sp=true", f"{LANGUAGE}etp=2"),
    },
}
QUICK = ("train.global_batch_size=8", "train.micro_batch_size=2", "optim.warmup_iters=0")
EXPERTS = ("llm@modules.language.llm=gpt_tiny_moe", "modules.language.llm.expert_ffn_hidden_size=32")
MODELS = {
    "gpt": ("gpt_tiny", "prose", "layout=language_one", "modules.language.llm.num_layers=4"),
    "vlm": ("vlm_digits", "digits", "layout=one_process", "modules.images.freeze=[projector]"),
    "moe": ("gpt_tiny", "prose", "layout=language_one", *EXPERTS),
}
"""Config, demo, and overrides."""


def norms_of_a_step(cfg) -> dict:
    """What the functions say on this rank: gradients of a first step, and parameters before and after it."""
    from mimo_train.bridge.training.utils.train_utils import calc_params_l2_norm, report_l2_norm_grad

    steps, found = Steps(cfg), {}
    reduce_norms = steps.optimizer.reduce_norms

    def note_and_reduce(values):
        found["grads"] = report_l2_norm_grad(steps.model)
        found["params"] = calc_params_l2_norm(steps.model, None)
        if steps.state.layout.world_size == 1:
            found["read grads"], found["read params"] = read_directly(steps.model)
        return reduce_norms(values)

    steps.optimizer.reduce_norms = note_and_reduce
    ((_, found["grad_norm"]),) = steps.train()
    found["params after"] = calc_params_l2_norm(steps.model, None)
    return found


def read_directly(model) -> tuple[dict[str, float], float]:
    """Norms of every gradient and of all parameters of a model that stands on one process, in float64."""
    from mimo_train.models.parameters import modules_of

    grads, squares = {}, 0.0
    for name, (chunk,) in modules_of(model).items():
        for key, parameter in chunk.module.named_parameters():
            squares += parameter.double().square().sum().item()
            if parameter.requires_grad:
                grads[f"l2_norm/grad/{name}.{key}"] = parameter.main_grad.double().norm().item()
    return grads, squares**0.5


def on_one_process(cfg) -> dict:
    """The norms of one process, which must be those that are read directly."""
    (found,) = run_ranks(norms_of_a_step, 1, cfg)
    layers = {key: value for key, value in found["grads"].items() if key != "l2_norm/grad/global"}
    assert layers == pytest.approx(found["read grads"], rel=1e-5) and all(layers.values())
    everything = math.sqrt(sum(value**2 for value in found["read grads"].values()))
    assert found["grads"]["l2_norm/grad/global"] == pytest.approx(everything, rel=1e-5)
    assert found["grads"]["l2_norm/grad/global"] == pytest.approx(found["grad_norm"], rel=1e-5)
    assert found["params"] == pytest.approx(found["read params"], rel=1e-6)
    assert abs(found["params after"] / found["params"] - 1) > 1e-5
    return found


@pytest.fixture(scope="module")
def one_process(request, tmp_path_factory):
    """Returns the norms of a model on one process, made once; a part of the vision-language model is frozen."""

    @functools.cache
    def made(model: str) -> dict:
        name, demo, *own = MODELS[model]
        folder = tmp_path_factory.mktemp("one")
        return on_one_process(config(name, folder, request.getfixturevalue(demo), *QUICK, *own))

    return made


@pytest.mark.parametrize(("model", "layout"), [(model, layout) for model in LAYOUTS for layout in LAYOUTS[model]])
def test_norms_are_those_of_one_process(model, layout, one_process, request, tmp_path):
    one, (name, demo, *own) = one_process(model), MODELS[model]
    assert any(
        {"moe": ".local_experts.3.", "vlm": "images.encoders.images."}.get(model, "") in key for key in one["grads"]
    )
    assert not any("projection" in key for key in one["grads"])
    cfg = config(name, tmp_path, request.getfixturevalue(demo), *QUICK, *own, *LAYOUTS[model][layout])
    for found in run_ranks(norms_of_a_step, resolve(cfg).layout.world_size, cfg):
        assert found["grads"] == pytest.approx(one["grads"], rel=1e-4, abs=1e-7)
        assert found["grads"]["l2_norm/grad/global"] == pytest.approx(one["grads"]["l2_norm/grad/global"], rel=1e-5)
        assert found["params"] == pytest.approx(one["params"], rel=1e-6)
        assert found["params after"] == pytest.approx(one["params after"], rel=1e-6)


def _norms_of_16_bits(cfg) -> dict:
    from mimo_train.bridge.training.utils.train_utils import calc_params_l2_norm

    steps = Steps(cfg)
    steps.train()
    own = [parameter for chunk in steps.model for parameter in chunk.parameters()]
    masters = [parameter.main_param for parameter in own if parameter.main_param is not None]
    assert all(parameter.main_param_sharded for parameter in own)
    return {
        "masters": calc_params_l2_norm(steps.model, steps.model[0].config),
        "own part of masters": sum(master.double().square().sum().item() for master in masters),
        "parameters": calc_params_l2_norm(steps.model, steps.model[0].config, force_create_fp32_copy=True),
        "read parameters": sum(parameter.double().square().sum().item() for parameter in own) ** 0.5,
    }


def test_16_bit_parameters_count_by_their_master_copies(prose, tmp_path):
    cfg = config("gpt_tiny", tmp_path, prose, "layout=language_dp2", "train.precision=bf16", *QUICK)
    ranks = run_ranks(_norms_of_16_bits, 2, cfg)
    masters = math.sqrt(sum(rank["own part of masters"] for rank in ranks))
    for rank in ranks:
        assert rank["masters"] == pytest.approx(masters, rel=1e-6)
        assert rank["parameters"] == pytest.approx(rank["read parameters"], rel=1e-6)
        assert rank["masters"] != pytest.approx(rank["parameters"], rel=1e-6)


def _dtensor_norms() -> list[float]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    from mimo_train.bridge.training.utils.train_utils import calc_dtensor_params_l2_norm, calc_params_l2_norm
    from mimo_train.parallel import device

    device.install("cpu")
    device.init_process_group("cpu", 1)
    mesh = init_device_mesh("cpu", (2, 2))
    cut = distribute_tensor(torch.arange(1.0, 4.0), mesh, [Shard(0), Replicate()])
    both = distribute_tensor(torch.full((4, 2), 2.0), mesh, [Shard(0), Shard(1)])
    whole = distribute_tensor(torch.tensor([5.0]), mesh, [Replicate(), Replicate()])
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(cut)
    partial = torch.distributed.tensor.DTensor.from_local(torch.ones(1), mesh, [Partial(), Replicate()])
    for wrong in ([partial], [torch.ones(1)]):
        with pytest.raises(ValueError, match="a norm"):
            calc_dtensor_params_l2_norm(wrong)
    params = [cut, both, whole, cut]
    return [
        calc_dtensor_params_l2_norm(params),
        calc_params_l2_norm(module, None, True),
        calc_dtensor_params_l2_norm([]),
    ]


def test_norms_of_dtensors():
    cut, both, whole = 1 + 4 + 9, 8 * 4, 25
    for norms in run_ranks(_dtensor_norms, 4):
        assert norms == pytest.approx([math.sqrt(2 * cut + both + whole), math.sqrt(cut), 0.0], rel=1e-6)


def _reduced(values: list) -> dict:
    import os

    import torch.distributed as dist

    from mimo_train.bridge.training.utils.train_utils import (
        logical_and_across_model_parallel_group,
        reduce_max_memory_across_pp_group,
        reduce_max_stat_across_model_parallel_group,
    )
    from mimo_train.parallel import device

    device.install("cpu")
    device.init_process_group("cpu", 1)
    rank, world = int(os.environ["RANK"]), dist.group.WORLD
    alone = [dist.new_group([each]) for each in range(2)][rank]
    report = {"peak_allocated_mem": 1.5 - rank, "alloc_retries": 3 + rank}
    reduced = reduce_max_memory_across_pp_group(report, world)
    assert report == {"peak_allocated_mem": 1.5 - rank, "alloc_retries": 3 + rank}, "the report was changed"
    assert reduce_max_memory_across_pp_group(report, alone) is report
    assert reduce_max_memory_across_pp_group({}, world) == {}
    return {
        "max": [reduce_max_stat_across_model_parallel_group(pair[rank], world) for pair in values],
        "and": [
            logical_and_across_model_parallel_group(pair[rank], world)
            for pair in ((True, True), (True, False), (False, True), (False, False))
        ],
        "memory": reduced,
        "types": [type(value) for value in reduced.values()],
    }


def test_ranks_agree_on_a_maximum_a_conjunction_and_memory():
    values = [(1.5, -2.0), (None, -1.0), (-7.25, None), (None, None), (math.nan, 3.0), (-math.inf, None)]
    for reduced in run_ranks(_reduced, 2, values):
        assert reduced["max"] == pytest.approx([1.5, -1.0, -7.25, None, math.nan, -math.inf], nan_ok=True)
        assert reduced["and"] == [True, False, False, False]
        assert reduced["memory"] == {"peak_allocated_mem": 1.5, "alloc_retries": 4}
        assert reduced["types"] == [float, int]


def _written_by_megatron_core() -> list:
    import os
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import track_moe_metrics

    from mimo_train.bridge.training.utils.train_utils import _build_moe_metric_writer
    from mimo_train.parallel import device

    device.install("cpu")
    device.init_process_group("cpu", 1)
    written = []

    class Comet:
        def log_metrics(self, values, step):
            written.extend(("comet", name, value, step) for name, value in values.items())

    class Mlflow:
        def log_metric(self, run_id, name, value, step):
            written.append((run_id, name, value, step))

    rank = int(os.environ["RANK"])
    for layer, loss in ((1, 0.5), (2, 1.5 + rank)):
        get_moe_metrics_tracker().record("load_balancing_loss", torch.tensor(loss), layer, num_layers=2)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    track_moe_metrics(
        loss_scale=0.5,
        iteration=7,
        writer=_build_moe_metric_writer(None, Comet(), (Mlflow(), "run")),
        per_layer_logging=True,
        num_layers=2,
        pg_collection=SimpleNamespace(pp=alone, dp_cp_gtp_remat=dist.group.WORLD),
    )
    return written


def test_metrics_that_megatron_core_writes_reach_every_tracker():
    # Half of the mean over ranks: 0.5 and 2 become 0.25 and 1.
    values = {
        "load_balancing_loss": 0.625,
        "moe/load_balancing_loss_layer_0": 0.25,
        "moe/load_balancing_loss_layer_1": 1.0,
    }
    for written in run_ranks(_written_by_megatron_core, 2):
        expected = [(target, name, value, 7) for name, value in values.items() for target in ("comet", "run")]
        assert written == expected and all(type(value) is float for _, _, value, _ in written)

"""Settings of single modules, precisions, and reductions that overlap with computation."""

from pathlib import Path

import pytest

from data.demo.make import make_demo
from mimo_train.config.errors import UserError
from mimo_train.layout.run import resolve
from tests.dist.ranks import run_ranks
from tests.dist.runs import RATE, TOLERANCE, config, curve, largest_difference, train_on_ranks
from tests.dist.steps import Steps, whole

PEAK, LOWEST, PROJECTOR = RATE / 2, RATE / 40, RATE * 5 / 4
"""Rates of the encoder's module, and the peak of its projector."""
OWN = (
    f"modules.images.optim.lr={PEAK}",
    f"modules.images.optim.min_lr={LOWEST}",
    "modules.images.optim.warmup_iters=4",
    "modules.images.optim.decay=linear",
    "modules.images.optim.weight_decay=0.1",
    f"modules.images.optim.projector_lr={PROJECTOR}",
    "modules.language.optim.decay=constant",
    # A tensor of the last stage in one group and of both in another; a vector that decays.
    f"modules.language.optim.groups={{'*final*': {{lr: {RATE / 4}}}, '*layers.1*norm*': {{weight_decay: 0.3}}}}",
)


def _curve(cfg, steps: int = 6) -> list[tuple]:
    return Steps(cfg).train(steps)


def _rates_of_groups(cfg) -> dict[str, set[tuple[float, float]]]:
    """(learning rate, weight decay) of the optimizer's groups after 5 steps, by module."""
    run = Steps(cfg)
    run.train(5)
    return {
        name: {
            (group["lr"], group["weight_decay"]) for part in run.optimizer.inner(info) for group in part.param_groups
        }
        for name, info in run.optimizer.module_infos.items()
        if info.optimizer is not None
    }


def test_groups_follow_the_settings_of_their_module(digits, tmp_path):
    cfg = config("vlm_digits", tmp_path, digits, "layout=two_processes", "train.iters=20", *OWN)
    found = {name: rates for rank in run_ranks(_rates_of_groups, 2, cfg) for name, rates in rank.items()}
    # Linear from the end of warm-up at step 4 to step 20, one step in; the projector with its own peak.
    encoder, projector = (LOWEST + (peak - LOWEST) * 15 / 16 for peak in (PEAK, PROJECTOR))
    assert sorted(found["images"]) == [
        (pytest.approx(encoder), 0),
        (pytest.approx(encoder), pytest.approx(0.1)),
        (pytest.approx(projector), 0),
        (pytest.approx(projector), pytest.approx(0.1)),
    ]
    assert sorted(found["language"]) == [
        (RATE / 4, 0),
        (RATE, 0),
        (RATE, pytest.approx(0.01)),
        (RATE, pytest.approx(0.3)),
    ]


def _message(cfg) -> str:
    with pytest.raises(UserError) as raised:
        Steps(cfg)
    return str(raised.value)


def test_a_group_of_weights_that_adapters_freeze_is_an_error(digits, tmp_path):
    groups = "modules.language.optim.groups={'decoder.layers.0.*linear_qkv.weight': {lr: 1e-3}}"
    cfg = config("vlm_digits", tmp_path, digits, "layout=one_process", "modules.language.lora.rank=2", groups)
    assert "linear_qkv.weight' matches no parameter that is trained" in run_ranks(_message, 1, cfg)[0]


def test_settings_of_modules_give_the_numbers_of_one_process_and_are_logged(digits, tmp_path):
    curves = {}
    for layout in ("one_process", "images_tp2_language_pp2"):
        overrides = (f"layout={layout}", "train.iters=6", *OWN, "modules.images.optim.clip_grad=0.1")
        lines = train_on_ranks(config("vlm_digits", tmp_path / layout, digits, *overrides))
        curves[layout] = curve(lines)
        last = [line for line in lines if "lm loss" in line][-1]
        # The rate of the last step, which follows 5 steps: linear from step 4 to step 6.
        assert last["learning_rate/images"] == pytest.approx((PEAK + LOWEST) / 2)
        assert last["learning_rate/images.projector"] == pytest.approx((PROJECTOR + LOWEST) / 2)
        assert last["learning_rate/language"] == pytest.approx(RATE)
    assert max(largest_difference(curves["one_process"], curves["images_tp2_language_pp2"])) < TOLERANCE


def _curve_from(cfg, weights: list[dict] | None, steps: int = 6) -> tuple[list[tuple], dict]:
    """Curve of a run from `weights` of each rank, or from its initial ones; and the weights it began with."""
    import torch
    import torch.distributed as dist

    from mimo_train.models.parameters import modules_of

    run = Steps(cfg)
    if weights is not None:
        for module, chunks in modules_of(run.model).items():
            for name, parameter in chunks[0].named_parameters():
                with torch.no_grad():
                    parameter.copy_(torch.from_numpy(weights[dist.get_rank()][f"{module}.0.{name}"]))
        run.optimizer.reload_model_params()
    began_with = {name: parameter.float().cpu().numpy() for name, parameter in run.parameters().items()}
    return run.train(steps), began_with


@pytest.mark.parametrize("layout", ["one_process", "images_dp2_language_dp2"])
def test_half_precisions_follow_fp32(layout, digits, tmp_path):
    """From equal weights: random numbers that are drawn in half precision are others."""
    world = {"one_process": 1, "images_dp2_language_dp2": 4}[layout]

    def run(precision: str, weights: list[dict] | None = None) -> tuple[list[tuple], list[dict]]:
        overrides = (f"layout={layout}", "train.iters=20", f"train.precision={precision}")
        cfg = config("vlm_digits", tmp_path, digits, *overrides, "optim.initial_loss_scale=8")
        curves, weights = zip(*run_ranks(_curve_from, world, cfg, weights), strict=True)
        return whole(curves), weights

    exact, initial = run("fp32")
    for precision, tolerance in (("fp16", 2e-3), ("bf16", 1e-2)):
        loss, norm = largest_difference(exact, run(precision, initial)[0])
        assert 1e-7 < loss < tolerance and norm < 5 * tolerance, f"{precision}: loss {loss:.1e}, norm {norm:.1e}"


def _scales(cfg, steps: int, save: bool) -> list[float]:
    run, scales = Steps(cfg), []
    for _ in range(steps):
        scales.append(float(run.optimizer.get_loss_scale()))
        run.train(1)
    if save:
        run.save()
    return scales


def test_the_loss_scale_grows_is_the_same_on_all_ranks_and_is_resumed(digits, tmp_path):
    overrides = ("layout=two_processes", "train.iters=20", "train.precision=fp16")
    growing = ("optim.initial_loss_scale=64", "optim.loss_scale_window=3")
    cfg = config("vlm_digits", tmp_path, digits, *overrides, *growing)
    assert run_ranks(_scales, 2, cfg, 5, True) == [[64, 64, 64, 128, 128]] * 2
    assert run_ranks(_scales, 2, cfg, 3, False) == [[128, 256, 256]] * 2


ORDER = 1e-6
"""Gradients are summed in another order where they are reduced beside the backward pass, and where layers are
Megatron-Core's, as with weights that are gathered beside the forward pass."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_overlapped_reductions_give_the_same_numbers(precision, prose, tmp_path):
    def run(name: str, *overrides: str) -> list[tuple]:
        cfg = config(
            "gpt_tiny", tmp_path / name, prose, "layout=language_dp2", "train.iters=6", f"train.precision={precision}",
            "train.micro_batch_size=4", f"data.validation_shards={prose}/held_out", "train.eval_samples=8",
            "checkpoint.save_interval=4", "train.eval_interval=3", *overrides,
        )  # fmt: skip
        lines = train_on_ranks(cfg)
        return curve(lines) + [(line["step"], line["eval/loss"], 1.0) for line in lines if "eval/loss" in line]

    plain = run("plain")
    both = run("both", "optim.overlap_grad_reduce=true", "optim.overlap_param_gather=true")
    assert max(largest_difference(both, run("one", "optim.overlap_grad_reduce=true"))) < ORDER
    assert max(largest_difference(plain, both)) < ORDER


OVERLAP = {
    "apart": ("layout=images_dp2_language_dp2", "train.micro_batch_size=2"),
    "together, cp": (
        "layout=one_process",
        "modules.images.layout.dp=2",
        "modules.language.layout.cp=2",
        "train.micro_batch_size=4",
    ),
    "packed, in stages, frozen at first": (
        "layout=images_tp2_language_pp2",
        "modules.images.layout={tp: 1, pp: 2, dp: 2}",
        "modules.images.encoder.num_layers=2",
        "modules.images.freeze_until={encoder: 2, projector: 1}",
        "train.micro_batch_size=4",
        "data.pack=true",
    ),
    "interleaved, recomputed": (
        "layout=images_tp2_language_pp2",
        "modules.images.layout={tp: 1, dp: 2}",
        "modules.language.llm.num_layers=4",
        "modules.language.layout.vpp=2",
        "train.recompute=full",
        "train.micro_batch_size=4",
    ),
}


@pytest.fixture(scope="module")
def some_text(tmp_path_factory) -> dict[bool, Path]:
    """The digits demo with text-only samples: 3 of 10, and for packed rows, which have more samples, 7 of 10."""
    sizes = {"train_samples": 96, "held_out_samples": 4, "shards": 1}
    return {
        packed: make_demo(tmp_path_factory.mktemp("text"), **sizes, text_only_fraction=0.7 if packed else 0.3)
        for packed in (False, True)
    }


def _overlapped(cfg) -> tuple[list[tuple], list[int]]:
    """Curve of a run with small buckets, and the buckets of the encoder whose reduction each step began in backward."""
    from functools import partial

    from mimo_train.models import build
    from mimo_train.models.parameters import modules_of

    build.DistributedDataParallelConfig = partial(build.DistributedDataParallelConfig, bucket_size=3000)
    run = Steps(cfg)
    groups = [group for chunk in modules_of(run.model).get("images", []) for group in chunk.bucket_groups]
    config, started = run.model[0].config, []
    finalize = config.finalize_model_grads_func

    def count_and_finalize(*args, **kwargs) -> None:
        started.append(sum(group.grad_reduce_handle is not None for group in groups))
        finalize(*args, **kwargs)

    config.finalize_model_grads_func = count_and_finalize
    return run.train(cfg.train.iters), started if groups else []


@pytest.mark.parametrize("case", OVERLAP)
def test_overlap_beside_an_encoder_gives_the_same_numbers(case, some_text, tmp_path):
    """Some ranks lack gradients of the encoder in the last microbatch or the whole step."""
    demo = some_text["data.pack=true" in OVERLAP[case]]

    def run(name: str, *overrides: str) -> tuple[list[tuple], list[tuple[int, ...]]]:
        cfg = config(
            "vlm_digits", tmp_path / name, demo, *OVERLAP[case], "train.iters=12", "train.global_batch_size=8",
            *overrides,
        )  # fmt: skip
        curves, started = zip(*run_ranks(_overlapped, resolve(cfg).layout.world_size, cfg), strict=True)
        return whole(curves), [*zip(*filter(None, started), strict=True)]

    plain, never = run("plain")
    overlapped, started = run("overlapped", "optim.overlap_grad_reduce=true")
    assert max(largest_difference(plain, overlapped)) < ORDER
    assert not any(map(any, never))
    assert any(map(all, started)), "no step begins to reduce on all ranks in backward"
    assert any(0 in step and any(step) for step in started), "every rank has a gradient whenever another one has"


def _zeros(cfg) -> tuple[int | None, int, int]:
    """Zeros that a step counts whose encoder module has no gradient; this rank's parameters of that module, and those
    of the rows that pad its embedding, which have none either."""
    from mimo_train.models.parameters import global_names, modules_of

    run = Steps(cfg)
    encoders, config = modules_of(run.model).get("images", []), run.model[0].config
    finalize, found = config.finalize_model_grads_func, []

    def without_gradients_of_the_encoder(*args, **kwargs):
        finalize(*args, **kwargs)
        for chunk in encoders:
            chunk.scale_gradients(0.0)

    config.finalize_model_grads_func = without_gradients_of_the_encoder
    update = run.optimizer.update
    run.optimizer.update = lambda norms: found.append(norms.num_zeros) or update(norms)
    run.train(1)
    padding = 0
    for chunk in modules_of(run.model).get("language", []):
        rows = global_names(chunk)["embedding.word_embeddings.weight"]
        padding += (len(rows) - run.session.parts.tokenizer.vocab_size) * rows.shape[1]
    return found[0], sum(parameter.numel() for chunk in encoders for parameter in chunk.parameters()), padding


def test_zeros_in_the_gradient_are_counted_once_at_any_layout(digits, tmp_path):
    for layout, world in (("one_process", 1), ("images_dp2_language_dp1", 3)):
        overrides = (f"layout={layout}", "train.iters=20", "log.metrics=[num_zeros_in_grad]")
        ranks = run_ranks(_zeros, world, config("vlm_digits", tmp_path, digits, *overrides))
        # A few of the language model's are zero by chance.
        without = max(size for _, size, _ in ranks) + max(padding for *_, padding in ranks)
        assert all(without <= zeros < without + 10 for zeros, *_ in ranks), f"{layout}: {ranks}"
    overrides = ("layout=one_process", "train.iters=20")
    assert run_ranks(_zeros, 1, config("vlm_digits", tmp_path, digits, *overrides))[0][0] is None


def _resumed_rates(cfg, save: bool) -> tuple[list[tuple], set[float]]:
    """Curve of 2 steps, then the learning rates of the images' groups."""
    run = Steps(cfg)
    numbers = run.train(2)
    if save:
        run.save()
    inner = run.optimizer.inner(run.optimizer.module_infos["images"])
    return numbers, {round(group["lr"], 9) for part in inner for group in part.param_groups}


def test_a_run_may_continue_with_other_rates_and_a_rate_for_the_projector(digits, tmp_path):
    overrides = ("layout=one_process", "train.iters=20", "optim.decay=constant", "optim.warmup_iters=1")
    run_ranks(_resumed_rates, 1, config("vlm_digits", tmp_path, digits, *overrides), True)
    changed = (f"modules.images.optim.lr={RATE / 2}", f"modules.images.optim.projector_lr={RATE / 4}")
    ((curve_after, rates),) = run_ranks(
        _resumed_rates, 1, config("vlm_digits", tmp_path, digits, *overrides, *changed), False
    )
    assert rates == {RATE / 2, RATE / 4}
    assert all(norm > 0 for _, norm in curve_after)

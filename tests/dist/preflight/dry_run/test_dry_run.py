"""Ranks of any layout as on GPUs, without one: they train and evaluate, and a fault that only a GPU would show is
named with its line."""

import inspect
import os

import pytest

from mimo_train.config.errors import UserError
from mimo_train.layout.run import resolve
from tests.dist.commands import command
from tests.dist.ranks import run_ranks
from tests.dist.runs import config
from tests.dist.stretched import stretch_images

LANGUAGE, IMAGES = "modules.language.layout.", "modules.images.layout."
HALF, FEW = "train.precision=bf16", "train.global_batch_size=32"
EVALUATED = "data.validation_shards={demo}/held_out"
TP2_PP2 = (f"{LANGUAGE}tp=2", f"{LANGUAGE}pp=2", f"{IMAGES}dp=2")
CHUNKS = (f"{LANGUAGE}pp=2", f"{LANGUAGE}vpp=2", "modules.language.llm.num_layers=4", HALF)
RUNS = {
    "cp, tp, packed": ("gpt_tiny", 0, (f"{LANGUAGE}cp=2", f"{LANGUAGE}tp=2", "data.pack=true", HALF)),
    "cp": ("gpt_tiny", 1, (f"{LANGUAGE}cp=2", HALF, EVALUATED)),
    "experts": ("gpt_tiny", 0, ("llm@modules.language.llm=gpt_tiny_moe", f"{LANGUAGE}dp=4", f"{LANGUAGE}ep=2",
                                HALF, FEW)),
    "experts, etp": ("gpt_tiny", 1, ("llm@modules.language.llm=gpt_tiny_moe", f"{LANGUAGE}tp=2", f"{LANGUAGE}etp=2",
                                     f"{LANGUAGE}sp=true", HALF)),
    "interleaved": ("gpt_tiny", 1, ("layout=language_pp2_vpp2", "modules.language.llm.num_layers=4", HALF)),
    "interleaved, shared encoder": ("vlm_digits", 0, (*CHUNKS, "placement.mode=shared",
                                                      EVALUATED)),
    "interleaved, encoder": ("vlm_digits", 0, (*CHUNKS, EVALUATED)),
    "interleaved behind an encoder": ("vlm_digits", 1, (*CHUNKS, EVALUATED)),
    "shared, fp16": ("vlm_digits", 1, ("placement.mode=shared", f"{IMAGES}dp=4", f"{LANGUAGE}tp=2", f"{LANGUAGE}dp=2",
                                       "train.precision=fp16", EVALUATED)),
    "disjoint, first stage": ("vlm_digits", 2, (*TP2_PP2, HALF, EVALUATED)),
    "disjoint, last stage": ("vlm_digits", 4, (*TP2_PP2, HALF, EVALUATED)),
    "encoder": ("vlm_digits", 0, (*TP2_PP2, HALF, EVALUATED)),
    "frozen encoder": ("vlm_digits", 0, ("modules.images.freeze=[encoder]", "modules.images.prefetch_microbatches=2",
                                         f"{IMAGES}dp=2", f"{LANGUAGE}dp=2", HALF)),
    "behind a frozen encoder": ("vlm_digits", 2, ("modules.images.freeze=[encoder,projector]", f"{IMAGES}dp=2",
                                                  f"{LANGUAGE}dp=2", HALF)),
    "adapters": ("vlm_digits", 1, ("modules.language.lora.rank=4", f"{LANGUAGE}tp=2", HALF)),
    "packed": ("vlm_digits", 1, ("layout=two_processes", "data.pack=true", HALF, EVALUATED)),
    "pairs": ("vlm_digits", 1, ("layout=two_processes", "train.task=dpo", "data.pack=true", HALF,
                                "data.validation_shards={demo}/train")),
    "fp16": ("gpt_tiny", 0, (f"{LANGUAGE}dp=2", "train.precision=fp16")),
    "fp32": ("gpt_tiny", 0, (f"{LANGUAGE}dp=2",)),
    "overlap, recompute": ("gpt_tiny", 0, (f"{LANGUAGE}dp=4", FEW, "train.recompute=full", HALF,
                                           "log.metrics=[grad_norms]",
                                           "optim.overlap_grad_reduce=true", "optim.overlap_param_gather=true")),
    "replicated optimizer": ("gpt_tiny", 0, (f"{LANGUAGE}dp=2", "optim.distributed_optimizer=false", HALF)),
    "rerun": ("gpt_tiny", 0, (f"{LANGUAGE}dp=2", "train.rerun=validate_results")),
    "native images in stages": ("vlm_digits", 2, ("encoder@modules.images.encoder=vit_tiny_native", f"{IMAGES}dp=2",
                                                    f"{IMAGES}pp=2", "modules.images.encoder.num_layers=2",
                                                    f"{LANGUAGE}dp=2", HALF)),
    "sequence parallel": ("gpt_tiny", 1, (f"{LANGUAGE}tp=2", f"{LANGUAGE}sp=true", HALF)),
    "a family's options": ("gpt_tiny", 0, ("modules.language.llm.scale_embeddings=true",
                                           "modules.language.llm.logit_softcap=10", HALF,
                                           "modules.language.llm.post_norms=true",
                                           "modules.language.llm.zero_centered_norms=true")),
}  # fmt: skip
"""Every one was tried; these by default, and all with MIMO_ALL_LAYOUTS=1."""
MEANT = ("mimo_train/optim/module_optimizer.py", "mimo_train/logging/stopwatch.py", "mimo_train/training/interval.py",
         "mimo_train/training/log.py")  # fmt: skip
"""Where the host waits for the device in a step that is logged: gradient norms; times; the numbers of the log, and the
loss scale of fp16."""
DEFAULT = ("cp, tp, packed", "experts", "interleaved behind an encoder", "shared, fp16", "a family's options", "pairs")
DEMOS = {"vlm_digits": "digits", "gpt_tiny": "prose"}


def _dry(run, rank: int, fault: str = ""):
    """The dry run of a rank, with a fault put into the program; what it found, or what it failed with."""
    import warnings

    from mimo_train.preflight.dry_run.observation import RankFailure, selected_kinds
    from mimo_train.preflight.dry_run.one_rank import run_rank

    warnings.filterwarnings("ignore")
    if fault:
        FAULTS[fault]()
    (kind,) = selected_kinds(run.layout, str(rank))
    try:
        return run_rank(run, kind)
    except Exception as error:
        return RankFailure.of(kind, error)


@pytest.mark.parametrize("name", RUNS if os.environ.get("MIMO_ALL_LAYOUTS") else DEFAULT)
def test_a_rank_trains_and_evaluates_as_on_a_gpu(name, request, tmp_path):
    config_name, rank, overrides = RUNS[name]
    demo = request.getfixturevalue(name if name == "pairs" else DEMOS[config_name])
    run = resolve(config(config_name, tmp_path, demo, *(each.format(demo=demo) for each in overrides)))
    (found,) = run_ranks(_dry, 1, run, rank)
    assert not hasattr(found, "what"), found.what + found.trace
    assert found.device == "cuda" and found.flops
    assert found.evaluated == any("validation_shards" in each for each in overrides)
    assert sum(found.categories.values()) == found.peak > 0
    # `train.rerun` looks at every loss.
    assert name == "rerun" or not found.waits_inside, found.waits_inside
    others = {wait for wait in found.waits if not any(f" at {line}:" in wait for line in MEANT)}
    assert name in ("rerun", "overlap, recompute") or not others, others
    assert not list(tmp_path.iterdir()), "nothing is left where the run would write"


def test_attention_inside_documents_and_images_is_counted_by_kernel_as_one_by_one(digits, tmp_path):
    """Two types of numbers of the same run: a kernel takes all documents at once, or each is a call."""
    native = ("encoder@modules.images.encoder=vit_tiny_native", "layout=one_process", "data.pack=true")
    images, flops = stretch_images(digits, tmp_path / "images"), []
    for precision in ("bf16", "fp32"):
        run = resolve(config("vlm_digits", tmp_path / "run", images, *native, f"train.precision={precision}"))
        (found,) = run_ranks(_dry, 1, run, 0)
        assert not hasattr(found, "what"), found.what + found.trace
        flops.append(found.flops)
    assert flops[0] == flops[1] > 0


def _mixed_devices() -> None:
    from mimo_train.training.tasks import sft

    original = sft.masked_token_loss
    sft.masked_token_loss = lambda mask, *args, **kwargs: original(mask.cpu(), *args, **kwargs)


def _mixed_dtypes() -> None:
    from mimo_train.models.attention import SdpaAttention

    original = SdpaAttention._attend
    SdpaAttention._attend = lambda self, *args: original(self, *args).float()


def _wait() -> None:
    from mimo_train.training.step import losses

    original = losses._pair

    def pair(value, *counts):
        value[0].item() if isinstance(value, tuple) else value.sum().item()
        return original(value, *counts)

    losses._pair = pair


def _wait_late() -> None:
    from mimo_train.optim.schedules import ModuleSchedulers

    original = ModuleSchedulers.step

    def step(self, increment):
        import torch

        torch.ones(1, device="cuda").item()
        original(self, increment)

    ModuleSchedulers.step = step


FAULTS = {"devices": _mixed_devices, "dtypes": _mixed_dtypes, "wait": _wait, "late wait": _wait_late}


@pytest.fixture
def tiny(prose, tmp_path):
    """A run of one stage."""
    return resolve(config("gpt_tiny", tmp_path, prose, f"{LANGUAGE}dp=2", HALF))


def test_a_wait_behind_the_microbatches_is_found_too(tiny):
    (found,) = run_ranks(_dry, 1, tiny, 0, "late wait")
    assert not found.waits_inside
    assert any(" at mimo_train/training/train_step.py:" in wait for wait in found.waits), found.waits


def _line_of(function, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(at for at, line in enumerate(lines) if text in line)


def test_a_tensor_on_the_wrong_device_is_named_with_its_line(tiny):
    from mimo_train.training.tasks.sft import masked_token_loss

    (found,) = run_ranks(_dry, 1, tiny, 0, "devices")
    assert "a tensor on the CPU meets one on the device" in found.what and "cuda:0" in found.what
    file, line = found.line.split(":")
    lines, first = inspect.getsourcelines(masked_token_loss)
    assert file == "mimo_train/training/tasks/sft.py" and first <= int(line) < first + len(lines), found.line


def test_two_dtypes_in_a_product_are_named_with_their_line(tiny):
    """Fake tensors let them pass."""
    (found,) = run_ranks(_dry, 1, tiny, 0, "dtypes")
    assert "MixedDtypes" in found.what and "torch.bfloat16 and torch.float32" in found.what
    assert "mimo_train/models/" in found.trace, "the layer that gets it"


def test_a_wait_inside_of_microbatches_is_named_with_its_line(tiny):
    (found,) = run_ranks(_dry, 1, tiny, 0, "wait")
    (what,) = found.waits_inside
    assert what.startswith("a value at mimo_train/training/step/losses.py:"), what


def test_ranks_of_a_large_world():
    """2,176 of them; the set-up is that of one."""
    from mimo_train.config.compose import load
    from mimo_train.preflight.dry_run.observation import selected_kinds

    sizes = {"tp": 8, "pp": 8, "dp": 32}
    overrides = [f"{LANGUAGE}{axis}={size}" for axis, size in sizes.items()]
    overrides += [
        f"{IMAGES}tp=2",
        f"{IMAGES}dp=64",
        "train.global_batch_size=512",
        "modules.language.llm.num_layers=16",
    ]
    overrides += [f"modules.language.llm.num_{each}=8" for each in ("attention_heads", "query_groups")]
    overrides += ["train.micro_batch_size=2"]
    layout = resolve(load("vlm_digits", overrides)).layout
    kinds = selected_kinds(layout, "all-kinds")
    assert [kind.name for kind in kinds] == ["images", *(f"language, stage {stage} of 8" for stage in range(1, 9))]
    assert [kind.number for kind in kinds] == [128, *[256] * 8] and kinds[3].rank == 128 + 2 * 256
    assert [kind.rank for kind in selected_kinds(layout, "0,700")] == [0, 700]
    for wrong in ("2176", "first", "-1", ""):
        with pytest.raises(UserError, match="--ranks: .* is not one of the ranks 0 to 2175, nor all-kinds"):
            selected_kinds(layout, wrong)


def test_the_command_says_what_a_rank_does(prose, tmp_path):
    overrides = [f"{LANGUAGE}tp=2", HALF, f"data.shards={prose}/train", "data.validation_shards=", "data.demo="]
    ((code, said),) = run_ranks(
        command, 1, ["check", "gpt_tiny", *overrides, f"run.dir={tmp_path}", "--without-data", "--dry-run", "--ranks=1"]
    )
    assert code == 0, said
    assert "Dry run of 1 of 2 ranks, as on CUDA, of which none is touched" in said
    assert "rank 1: language (one of 2 such ranks)" in said and "no faults" in said
    for words in ("memory of tensors at the peak", "of the estimate of", "process groups: ", "language tp 2",
                  "floating point operations", "x allreduce over 2", "the host waits for the device in a step: ",
                  "mimo_train/optim/module_optimizer.py:", "trained in "):  # fmt: skip
        assert words in said, words


def test_the_steps_are_those_at_the_end_of_a_run(tmp_path):
    from mimo_train.config.compose import load
    from mimo_train.preflight.dry_run.one_rank import trial_run

    until = "modules.images.freeze_until={encoder: 1000, projector: 99999}"
    keys = ("train.iters=2000", "train.rampup_batch_size=[8,8,6400]", until)
    tried = trial_run(resolve(load("vlm_digits", keys)), tmp_path)
    assert tried.cfg.modules["images"].freeze_until == {"encoder": 1, "projector": 99999}
    assert tried.cfg.train.iters == 3 and tried.batch.size_at(0) == tried.cfg.train.global_batch_size > 8


def test_an_error_of_the_user_is_said_without_a_trace(tmp_path):
    keys = ("data.demo=", f"data.shards={tmp_path}/nowhere", "data.validation_shards=", f"run.dir={tmp_path}/run")
    ((code, said),) = run_ranks(command, 1, ["check", "gpt_tiny", *keys, "--without-data", "--dry-run", "--ranks=0"])
    assert code == 1 and "FAILS: data.shards: no such file or folder: " in said and "Traceback" not in said

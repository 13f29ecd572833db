"""What a dry run says of a rank is what the rank does: processes over gloo, counted by the same mode."""

import os

import pytest

from mimo_train.layout.run import resolve
from tests.dist.ranks import run_ranks
from tests.dist.runs import config

DEMOS = {"vlm_digits": "digits", "gpt_tiny": "prose"}
RUNS = {
    "a bridge, evaluation": ("vlm_digits", "layout=two_processes", "data.validation_shards={demo}/held_out"),
    "tensor parallel, packed": ("gpt_tiny", "layout=language_tp2", "modules.language.layout.sp=true", "data.pack=true"),
    "shared ranks": ("vlm_digits", "placement.mode=shared", "modules.images.layout.dp=2",
                     "modules.language.layout.tp=2"),
    "windows": ("gpt_tiny", "layout=language_tp2", "modules.language.llm.window=40",
                "modules.language.llm.full_attention_layers=[1]", "train.recompute=selective"),
    "three kinds of ranks": ("vlm_digits", "layout=images_tp2_language_pp2"),
}  # fmt: skip
"""Every one was tried; these by default, and all with MIMO_ALL_LAYOUTS=1."""
DEFAULT = ("a bridge, evaluation", "tensor parallel, packed")


def _dry(run, rank: int):
    """The dry run of a rank."""
    from mimo_train.preflight.dry_run.observation import selected_kinds
    from mimo_train.preflight.dry_run.one_rank import run_rank

    return run_rank(run, *selected_kinds(run.layout, str(rank)))


def _real(run):
    """The same run on this rank, whose tensors are real and whose messages arrive."""
    from mimo_train.parallel import device
    from mimo_train.preflight.dry_run.counts import Counts
    from mimo_train.preflight.dry_run.one_rank import observe

    device.install("cpu")
    counts = Counts(lambda tensor: tensor.device.type == "cpu")
    with counts:
        return observe(run, counts)


@pytest.mark.parametrize("name", RUNS if os.environ.get("MIMO_ALL_LAYOUTS") else DEFAULT)
def test_memory_messages_and_flops_are_those_of_a_real_run(name, request, tmp_path):
    config_name, *overrides = RUNS[name]
    demo = request.getfixturevalue(DEMOS[config_name])
    cfg = config(config_name, tmp_path, demo, "run.device=cpu", *(each.format(demo=demo) for each in overrides))
    from mimo_train.preflight.dry_run.one_rank import trial_run

    run = resolve(cfg)
    for rank, real in enumerate(run_ranks(_real, run.layout.world_size, trial_run(run, tmp_path))):
        (dry,) = run_ranks(_dry, 1, run, rank)
        assert dry.messages == real["messages"] and dry.messages
        assert dry.flops == real["flops"] > 0
        assert dry.peak == pytest.approx(real["peak"], rel=0.05)
        assert sum(dry.categories.values()) == dry.peak
        for category in ("weights", "gradients", "optimizer"):
            assert dry.categories[category] == real["categories"][category] > 0, category
        assert dry.evaluated == real["evaluated"] == ("evaluation" in name)

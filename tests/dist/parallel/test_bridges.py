"""Megatron-Core's own bridges and ours give the same numbers; what theirs cannot carry is refused with its numbers."""

import pytest

from data.demo.make import make_demo
from mimo_train.config.compose import load
from mimo_train.config.fault import ConfigError
from mimo_train.plan.run import resolve
from tests.dist.ranks import RankFailure
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks

STEPS = "train.iters=4"

SAME_RANKS = ("layout=one_process",)
LAYOUTS = {
    "apart, one to two": ("layout=images_dp1_language_dp2",),
    "apart, two to two, tp": ("layout=images_dp2_language_dp2", "modules.images.layout.tp=2"),
    "apart, before two stages": ("layout=images_tp2_language_pp2",),
    "same ranks, equal dp": (*SAME_RANKS, "modules.images.layout.dp=2", "modules.language.layout.dp=2"),
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return make_demo(tmp_path_factory.mktemp("digits"), train_samples=240, held_out_samples=20, shards=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_cores_bridge_gives_our_numbers(digits, tmp_path, layout):
    ours, theirs = (
        curve(train_on_ranks(config("vlm_digits", tmp_path / bridge, digits, *LAYOUTS[layout], *changes(bridge))))
        for bridge in ("native", "megatron")
    )
    assert max(largest_difference(ours, theirs)) < TOLERANCE


@pytest.mark.parametrize(
    "layout",
    [("layout=images_dp2_language_dp1",), (*SAME_RANKS, "modules.images.layout.tp=2", "modules.language.layout.dp=2")],
    ids=["apart", "same ranks"],
)
def test_uneven_counts_that_it_cannot_carry_are_refused_on_every_rank(digits, tmp_path, layout):
    cfg = config("vlm_digits", tmp_path, digits, *layout, *changes("megatron"))
    with pytest.raises(
        RankFailure, match="placement.bridge: Megatron-Core's bridge cannot carry images, whose samples"
    ):
        train_on_ranks(cfg)
    assert (tmp_path / "metrics.jsonl").read_text().count("lm loss") < 4


def test_a_layout_that_it_cannot_carry_is_refused_before_start():
    cfg = load("vlm_digits", ("placement.bridge=megatron", "placement.mode=shared", "modules.language.layout.pp=2"))
    with pytest.raises(ConfigError, match="needs pp 1, language has pp 2"):
        resolve(cfg)


def changes(bridge: str) -> tuple[str, ...]:
    """What makes a short run over a bridge."""
    return STEPS, f"placement.bridge={bridge}"

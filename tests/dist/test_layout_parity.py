"""The layout never changes the numbers: losses and gradient norms of 20 steps against those of one process."""

from pathlib import Path

import pytest

from tests.dist.runs import config, curve, largest_difference, train_on_ranks

TOLERANCE = 1e-5
STEPS = 20

VLM_LAYOUTS = {
    "vision 1 + language 1": ("layout=two_processes",),
    "vision dp2 + language dp2": ("layout=images_dp2_language_dp2",),
    "vision dp1 + language dp2": ("layout=images_dp1_language_dp2",),
    "vision dp2 + language dp1": ("layout=images_dp2_language_dp1",),
    "vision tp2 + language pp2": ("layout=images_tp2_language_pp2",),
    "vision 1 + language tp2": ("layout=images_dp1_language_tp2",),
    "vision 1 + language tp2, sequence parallel": (
        "layout=images_dp1_language_tp2",
        "modules.language.layout.sp=true",
    ),
    "vision dp4 + language dp2": ("modules.images.layout.dp=4", "modules.language.layout.dp=2"),
    "language first": ("layout=two_processes", "placement.first_rank={images: 1, language: 0}"),
    "both dp2 on the same ranks": (
        "layout=one_process",
        "modules.images.layout.dp=2",
        "modules.language.layout.dp=2",
    ),
    "both tp2 on the same ranks": (
        "layout=one_process",
        "modules.images.layout.tp=2",
        "modules.language.layout.tp=2",
    ),
}

GPT_LAYOUTS = {
    "tp2": ("layout=language_tp2",),
    "tp2, sequence parallel": ("layout=language_tp2", "modules.language.layout.sp=true"),
    "pp2": ("layout=language_pp2",),
    "dp2": ("layout=language_dp2",),
    "tp2 pp2": ("layout=language_tp2", "modules.language.layout.pp=2"),
    "full recompute": ("layout=language_one", "train.recompute=full"),
}


@pytest.fixture(scope="module")
def one_process_vlm(digits, tmp_path_factory) -> list[tuple]:
    """Curve of the vision-language run with all modules on one process."""
    return run("vlm_digits", digits, tmp_path_factory.mktemp("one"), "layout=one_process")


@pytest.fixture(scope="module")
def one_process_gpt(prose, tmp_path_factory) -> list[tuple]:
    """Curve of the plain GPT on one process."""
    return run("gpt_tiny", prose, tmp_path_factory.mktemp("one"), "layout=language_one")


def run(name: str, demo: Path, run_dir: Path, *overrides: str) -> list[tuple]:
    """Curve of one run of 20 steps."""
    return curve(train_on_ranks(config(name, run_dir, demo, f"train.iters={STEPS}", *overrides)))


def require_equal(one: list[tuple], other: list[tuple]) -> None:
    """Fails unless losses and gradient norms agree and training moved them."""
    loss, grad_norm = largest_difference(one, other)
    assert loss < TOLERANCE and grad_norm < TOLERANCE, f"relative difference: loss {loss:.2e}, norm {grad_norm:.2e}"
    assert one[-1][1] < one[0][1] - 0.1, "the run does not learn, so that parity would say nothing"


@pytest.mark.parametrize("overrides", VLM_LAYOUTS.values(), ids=VLM_LAYOUTS.keys())
def test_vlm_layout_gives_the_numbers_of_one_process(overrides, one_process_vlm, digits, tmp_path):
    require_equal(one_process_vlm, run("vlm_digits", digits, tmp_path, *overrides))


@pytest.mark.parametrize("overrides", GPT_LAYOUTS.values(), ids=GPT_LAYOUTS.keys())
def test_gpt_layout_gives_the_numbers_of_one_process(overrides, one_process_gpt, prose, tmp_path):
    require_equal(one_process_gpt, run("gpt_tiny", prose, tmp_path, *overrides))


def test_stages_of_unequal_depth_give_the_numbers_of_one_process(prose, tmp_path):
    three = "modules.language.llm.num_layers=3"
    one = run("gpt_tiny", prose, tmp_path / "one", "layout=language_one", three)
    require_equal(one, run("gpt_tiny", prose, tmp_path / "two", "layout=language_pp2", three))


def test_other_seed_gives_other_numbers(one_process_vlm, digits, tmp_path):
    other = run("vlm_digits", digits, tmp_path, "layout=one_process", "run.seed=7")
    assert largest_difference(one_process_vlm, other)[0] > TOLERANCE

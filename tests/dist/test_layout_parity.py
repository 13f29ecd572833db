"""The layout never changes the numbers: losses and gradient norms of 20 steps against those of one process."""

import functools
from collections.abc import Callable
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

ON_THE_SAME_RANKS = {
    "vision dp2, language tp2": (("images", "dp", 2), ("language", "tp", 2)),
    "vision tp2, language dp2": (("images", "tp", 2), ("language", "dp", 2)),
    "vision tp2, language tp2 sp pp2": (("images", "tp", 2), ("language", "tp", 2), ("language", "pp", 2)),
    "vision dp4, language tp2 dp2": (("images", "dp", 4), ("language", "tp", 2), ("language", "dp", 2)),
    "vision dp2, language dp2 pp2": (("images", "dp", 2), ("language", "dp", 2), ("language", "pp", 2)),
}
VLM_LAYOUTS |= {
    f"{name}, same ranks": ("layout=one_process", *(f"modules.{m}.layout.{axis}={size}" for m, axis, size in sizes))
    for name, sizes in ON_THE_SAME_RANKS.items()
}

SEQUENCE_PARALLEL = ("layout=language_tp2", "modules.language.layout.sp=true")

GPT_LAYOUTS = {
    "tp2": ("layout=language_tp2",),
    "tp2, sequence parallel": SEQUENCE_PARALLEL,
    "pp2": ("layout=language_pp2",),
    "pp2, two chunks a stage": ("layout=language_pp2_vpp2",),
    "dp2": ("layout=language_dp2",),
    "tp2 pp2": ("layout=language_tp2", "modules.language.layout.pp=2"),
    "tp2 pp2, two chunks a stage": ("layout=language_pp2_vpp2", "modules.language.layout.tp=2"),
    "full recompute": ("layout=language_one", "train.recompute=full"),
}

EXPERT_LAYOUTS = {
    "dp2": ("layout=language_dp2",),
    "ep2 of dp2": ("layout=language_ep2",),
    "ep2 of dp2, pp2": ("layout=language_ep2", "modules.language.layout.pp=2"),
    "pp2, two chunks a stage": ("layout=language_pp2_vpp2",),
    "tp2": SEQUENCE_PARALLEL,
    "tp2 etp2": (*SEQUENCE_PARALLEL, "modules.language.layout.etp=2"),
    "tp2, ep2 of tp2": (*SEQUENCE_PARALLEL, "modules.language.layout.ep=2"),
    "tp2 dp2, ep2 etp2": (
        *SEQUENCE_PARALLEL,
        "modules.language.layout.dp=2",
        "modules.language.layout.ep=2",
        "modules.language.layout.etp=2",
    ),
    "full recompute": ("layout=language_one", "train.recompute=full"),
}

VLM_EXPERT_LAYOUTS = {
    "vision 1 + language ep2 of dp2": ("layout=images_dp1_language_dp2", "modules.language.layout.ep=2"),
    "vision 1 + language tp2, ep2 of tp2": (
        "layout=images_dp1_language_tp2",
        "modules.language.layout.sp=true",
        "modules.language.layout.ep=2",
    ),
}

FOUR_LAYERS = ("modules.language.llm.num_layers=4", "train.micro_batch_size=4")
EXPERTS = (
    "llm@modules.language.llm=gpt_tiny_moe",
    "modules.language.llm.expert_ffn_hidden_size=48",
    "modules.language.llm.shared_expert_ffn_hidden_size=32",
    "modules.language.llm.shared_expert_gate=true",
)
MODELS = {
    "vlm_digits": ("vlm_digits", ("layout=one_process",), VLM_LAYOUTS),
    "gpt_tiny": ("gpt_tiny", ("layout=language_one", *FOUR_LAYERS), GPT_LAYOUTS),
    "gpt_tiny_moe": ("gpt_tiny", ("layout=language_one", *FOUR_LAYERS, *EXPERTS), EXPERT_LAYOUTS),
    "vlm_digits, experts": ("vlm_digits", ("layout=one_process", *EXPERTS), VLM_EXPERT_LAYOUTS),
}
"""By name of a model: the config, what one process runs, and the layouts that must give its numbers."""

CASES = [(model, title) for model, (_, _, layouts) in MODELS.items() for title in layouts]


@pytest.fixture(scope="module")
def one_process(digits, prose, tmp_path_factory) -> Callable[[str], list[tuple]]:
    """Gives the curve of a model on one process, which is trained once."""

    @functools.cache
    def trained(model: str) -> list[tuple]:
        return run_model(model, {"digits": digits, "prose": prose}, tmp_path_factory.mktemp("one"))

    return trained


def run(name: str, demo: Path, run_dir: Path, *overrides: str) -> list[tuple]:
    """Curve of one run of 20 steps."""
    return curve(train_on_ranks(config(name, run_dir, demo, f"train.iters={STEPS}", *overrides)))


def run_model(model: str, demos: dict[str, Path], run_dir: Path, title: str | None = None) -> list[tuple]:
    """Curve of a model of `MODELS`, at the layout of this title or on one process."""
    name, overrides, layouts = MODELS[model]
    demo = demos["digits" if name.startswith("vlm") else "prose"]
    # The last pick of a layout counts.
    layout = () if title is None else layouts[title]
    picked = [override for override in overrides if not (layout and override.startswith("layout="))]
    return run(name, demo, run_dir, *picked, *layout)


def require_equal(one: list[tuple], other: list[tuple]) -> None:
    """Fails unless losses and gradient norms agree and training moved them."""
    loss, grad_norm = largest_difference(one, other)
    assert loss < TOLERANCE and grad_norm < TOLERANCE, f"relative difference: loss {loss:.2e}, norm {grad_norm:.2e}"
    assert one[-1][1] < one[0][1] - 0.1, "the run does not learn, so that parity would say nothing"


@pytest.mark.parametrize(("model", "title"), CASES, ids=[f"{model}: {title}" for model, title in CASES])
def test_layout_gives_the_numbers_of_one_process(model, title, one_process, digits, prose, tmp_path):
    require_equal(one_process(model), run_model(model, {"digits": digits, "prose": prose}, tmp_path, title))


def test_stages_of_unequal_depth_give_the_numbers_of_one_process(prose, tmp_path):
    three = "modules.language.llm.num_layers=3"
    one = run("gpt_tiny", prose, tmp_path / "one", "layout=language_one", three)
    require_equal(one, run("gpt_tiny", prose, tmp_path / "two", "layout=language_pp2", three))


def test_other_seed_gives_other_numbers(one_process, digits, tmp_path):
    other = run("vlm_digits", digits, tmp_path, "layout=one_process", "run.seed=7")
    assert largest_difference(one_process("vlm_digits"), other)[0] > TOLERANCE

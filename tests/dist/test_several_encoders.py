"""Several encoders, wherever each stands: losses and gradient norms of 20 steps against those of one process."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.runs import config, curve, largest_difference, train_on_ranks

TOLERANCE = 1e-5
STEPS = 20

TWO_VISION = (
    "encoder@modules.details.encoder=vit_tiny",
    "projector@modules.details.projector=linear",
    "modules.details.encoder.patch_size=24",
    "modules.details.encoder.num_layers=2",
    "modules.details.encoder.hidden_size=48",
    "modules.details.encoder.ffn_hidden_size=96",
)
"""A second module that reads pictures: other patches, other sizes, another projector."""


def ranks(**first: int) -> str:
    """The override that gives modules these first ranks."""
    return "placement.first_rank={" + ", ".join(f"{name}: {rank}" for name, rank in first.items()) + "}"


TWO_VISION_LAYOUTS = {
    "images 1 + details 1 + language 1": (ranks(images=0, details=1, language=2),),
    "images and details on one rank, language apart": (ranks(images=0, details=0, language=1),),
    "images apart, details on language's rank": (ranks(images=0, details=1, language=1),),
    "images dp2 and details tp2 on the same ranks, language 1": (
        ranks(images=0, details=0, language=2),
        "modules.images.layout.dp=2",
        "modules.details.layout.tp=2",
    ),
    "images dp2 + details 1, on language's dp2": (
        ranks(images=0, details=2, language=2),
        "modules.images.layout.dp=2",
        "modules.details.layout.tp=2",
        "modules.language.layout.dp=2",
    ),
    "images and details on language's pp2": (
        ranks(images=0, details=0, language=0),
        "modules.language.layout.pp=2",
    ),
}

MODELS = {"two vision encoders": ("vlm_digits", "digits", TWO_VISION, TWO_VISION_LAYOUTS)}
"""By name of a model: the config, its demo, what makes it of it, and the layouts that must give its numbers."""

CASES = [(model, title) for model, (*_, layouts) in MODELS.items() for title in layouts]


def run_model(model: str, demos: dict[str, Path], run_dir: Path, title: str | None = None) -> list[tuple]:
    """Curve of 20 steps at the layout of this title, or on one process."""
    name, demo, parts, layouts = MODELS[model]
    layout = ("placement.mode=shared",) if title is None else ("placement.mode=disjoint", *layouts[title])
    return curve(train_on_ranks(config(name, run_dir, demos[demo], f"train.iters={STEPS}", *parts, *layout)))


@pytest.fixture(scope="module")
def one_process(digits, tmp_path_factory) -> Callable[[str], list[tuple]]:
    """Gives the curve of a model on one process, which is trained once."""

    @functools.cache
    def trained(model: str) -> list[tuple]:
        return run_model(model, {"digits": digits}, tmp_path_factory.mktemp("one"))

    return trained


@pytest.mark.parametrize(("model", "title"), CASES, ids=[f"{model}: {title}" for model, title in CASES])
def test_layout_gives_the_numbers_of_one_process(model, title, one_process, digits, tmp_path):
    one, other = one_process(model), run_model(model, {"digits": digits}, tmp_path, title)
    loss, grad_norm = largest_difference(one, other)
    assert loss < TOLERANCE and grad_norm < TOLERANCE, f"relative difference: loss {loss:.2e}, norm {grad_norm:.2e}"
    assert one[-1][1] < one[0][1] - 0.1, "the run does not learn, so that parity would say nothing"


def _projector_leaves_its_bias_in_parts() -> bool:
    import inspect

    from megatron.core.models.vision.multimodal_projector import MultimodalProjector

    return "skip_bias_add=True" in inspect.getsource(MultimodalProjector.__init__)


def test_linear_projectors_still_need_a_layer_of_ours():
    assert run_ranks(_projector_leaves_its_bias_in_parts, 1) == [True], "see mimo_train.model.layers._gathered_linear"

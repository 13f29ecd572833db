"""Encoders in several pipeline stages and with sequence parallelism: the numbers of one process, and checkpoints that
move between numbers of stages."""

import pytest

from mimo_train.checkpoint import folders
from tests.dist.ranks import run_ranks
from tests.dist.runs import STEPS, config, curve, largest_difference, require_equal, run, train_on_ranks
from tests.dist.steps import Steps

VISION, LANGUAGE = "modules.images.layout", "modules.language.layout"

THREE_LAYERS = "modules.images.encoder.num_layers=3"

ALL_TEXT = ("train.micro_batch_size=1", "train.global_batch_size=8")
"""Microbatches of a sample or two, of which some are all text."""

LAYOUTS = {
    "vision pp2 + language 1": (f"{VISION}.pp=2",),
    "vision tp2 pp2 + language dp2": (f"{VISION}.tp=2", f"{VISION}.pp=2", f"{LANGUAGE}.dp=2"),
    "vision pp2 + language pp2": (f"{VISION}.pp=2", f"{LANGUAGE}.pp=2"),
    "vision pp2 dp2 + language 1": (f"{VISION}.pp=2", f"{VISION}.dp=2"),
    "vision pp3 + language tp2": (f"{VISION}.pp=3", f"{LANGUAGE}.tp=2"),
}


@pytest.fixture(scope="module")
def one_process(digits, tmp_path_factory):
    """Curve of one process."""
    return run("vlm_digits", digits, tmp_path_factory.mktemp("one"), "layout=one_process", THREE_LAYERS)


@pytest.mark.parametrize("title", LAYOUTS)
def test_stages_give_the_numbers_of_one_process(title, one_process, digits, tmp_path):
    layout = ("layout=two_processes", *LAYOUTS[title])
    require_equal(one_process, run("vlm_digits", digits, tmp_path, THREE_LAYERS, *layout))


@pytest.fixture(scope="module")
def one_process_small(digits, tmp_path_factory):
    """Curve of one process with microbatches of a single sample."""
    return run("vlm_digits", digits, tmp_path_factory.mktemp("small"), "layout=one_process", THREE_LAYERS, *ALL_TEXT)


@pytest.mark.parametrize("title", ["vision pp2 + language 1", "vision pp2 + language pp2"])
def test_microbatches_without_pictures_pass_through_stages(title, one_process_small, digits, tmp_path):
    layout = ("layout=two_processes", *LAYOUTS[title], *ALL_TEXT)
    require_equal(one_process_small, run("vlm_digits", digits, tmp_path, THREE_LAYERS, *layout))


SEQUENCE_PARALLEL = {
    "vision tp2 sp + language 1": (f"{VISION}.tp=2",),
    "vision tp2 sp pp2 + language tp2 sp": (
        f"{VISION}.tp=2",
        f"{VISION}.pp=2",
        f"{LANGUAGE}.tp=2",
        f"{LANGUAGE}.sp=true",
    ),
    "vision tp2 sp, language dp2, same ranks": ("placement.mode=shared", f"{VISION}.tp=2", f"{LANGUAGE}.dp=2"),
}

CLASS_TOKEN = ("modules.images.encoder.class_token=true",)
"""Makes the 9 patches 10 tokens, which two ranks share."""


@pytest.fixture(scope="module")
def one_process_with_class_token(digits, tmp_path_factory):
    """Curve of one process whose encoder has a class token."""
    return run("vlm_digits", digits, tmp_path_factory.mktemp("token"), "layout=one_process", THREE_LAYERS, *CLASS_TOKEN)


@pytest.mark.parametrize("title", SEQUENCE_PARALLEL)
def test_sequence_parallel_encoders_give_the_numbers_of_one_process(
    title, one_process_with_class_token, digits, tmp_path
):
    layout = ("layout=two_processes", f"{VISION}.sp=true", *CLASS_TOKEN, *SEQUENCE_PARALLEL[title])
    require_equal(one_process_with_class_token, run("vlm_digits", digits, tmp_path, THREE_LAYERS, *layout))


def test_checkpoints_move_between_numbers_of_stages(one_process, digits, tmp_path):
    """Two stages, then one, then two again, each from the checkpoint before."""
    resume = ()
    lines = []
    for part, (stages, last) in enumerate([(2, 6), (1, 12), (2, STEPS)]):
        folder = tmp_path / str(part)
        overrides = ("layout=two_processes", f"{VISION}.pp={stages}", THREE_LAYERS, "optim.decay=constant", *resume)
        stop = (f"train.iters={last}", f"checkpoint.save_interval={last}")
        lines += curve(train_on_ranks(config("vlm_digits", folder, digits, *overrides, *stop)))
        resume = (f"checkpoint.resume={folders.newest(folder)}",)
    whole = run("vlm_digits", digits, tmp_path / "whole", "layout=one_process", THREE_LAYERS, "optim.decay=constant")
    require_equal(whole, lines)


@pytest.mark.parametrize("frozen", ["[encoder]", "[encoder,projector]", '["*.mlp.*"]'])
def test_frozen_parts_in_stages_give_the_numbers_of_one_process(frozen, digits, tmp_path):
    """Also a first stage without anything to train; norms by name of the parameter."""
    overrides = (THREE_LAYERS, f"modules.images.freeze={frozen}", "log.params_norm=true", "log.grad_norms=true")
    one, two = (
        train_on_ranks(config("vlm_digits", tmp_path / f"{len(layout)}", digits, "train.iters=4", *overrides, *layout))
        for layout in (("layout=one_process",), ("layout=two_processes", f"{VISION}.pp=2"))
    )
    assert max(largest_difference(curve(one), curve(two))) < 1e-5
    norms = [name for name in one[-1] if "norm" in name]
    assert any("images.encoders.images.layers.layers.1." in name for name in norms) == frozen.startswith('["')
    for before, after in zip(one, two, strict=True):
        assert {name: before[name] for name in norms} == pytest.approx({name: after[name] for name in norms}, rel=1e-4)


def test_patterns_name_layers_by_their_place_in_the_whole_encoder(digits, tmp_path):
    frozen = 'modules.images.freeze=["encoders.images.layers.layers.2.*"]'
    one, two = (
        run_ranks(trained_names, ranks, config("vlm_digits", tmp_path, digits, THREE_LAYERS, frozen, *layout))
        for ranks, layout in ((1, ("layout=one_process",)), (3, ("layout=two_processes", f"{VISION}.pp=2")))
    )
    (all_names,) = one
    assert set.union(*two) == all_names and two[0] and two[1]
    assert any(".layers.1." in name for name in all_names)
    assert not any(".layers.2." in name for name in all_names if name.startswith("images"))


def trained_names(cfg) -> set[str]:
    """Names of the parameters that this rank trains."""
    from mimo_train.model.build import modules_of
    from mimo_train.model.freeze import global_names

    modules = modules_of(Steps(cfg).model).items()
    named = ((module, global_names(chunk)) for module, chunks in modules for chunk in chunks)
    return {
        f"{module}.{name}" for module, names in named for name, parameter in names.items() if parameter.requires_grad
    }

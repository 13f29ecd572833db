"""Encoders in several pipeline stages: frozen parts, names of layers, and checkpoints that move between numbers of
stages. `test_layout_parity` has their numbers."""

import pytest

from mimo_train.checkpoint import folders
from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks
from tests.dist.steps import Steps

VISION = "modules.images.layout"

THREE_LAYERS = "modules.images.encoder.num_layers=3"


def test_checkpoints_move_between_numbers_of_stages(digits, tmp_path):
    """Two stages, then one, then two again, each from the checkpoint before."""

    def train(folder, iters: int, *overrides: str) -> list[tuple]:
        stop = (f"train.iters={iters}", f"checkpoint.save_interval={iters}", "optim.decay=constant")
        return curve(train_on_ranks(config("vlm_digits", folder, digits, THREE_LAYERS, *stop, *overrides)))

    resume, points = (), []
    for part, (stages, last) in enumerate([(2, 2), (1, 4), (2, 6)]):
        layout = ("layout=two_processes", f"{VISION}.pp={stages}")
        points += train(tmp_path / str(part), last, *layout, *resume)
        resume = (f"checkpoint.resume={folders.newest(tmp_path / str(part))}",)
    assert max(largest_difference(train(tmp_path / "whole", 6, "layout=one_process"), points)) < TOLERANCE


@pytest.mark.parametrize("frozen", ["[encoder]", "[encoder,projector]", '["*.mlp.*"]'])
def test_frozen_parts_in_stages_give_the_numbers_of_one_process(frozen, digits, tmp_path):
    """Also a first stage without anything to train; norms by name of the parameter."""
    overrides = (THREE_LAYERS, f"modules.images.freeze={frozen}", "log.metrics=[params_norm,grad_norms]")
    one, two = (
        train_on_ranks(config("vlm_digits", tmp_path / f"{len(layout)}", digits, "train.iters=4", *overrides, *layout))
        for layout in (("layout=one_process",), ("layout=two_processes", f"{VISION}.pp=2"))
    )
    assert max(largest_difference(curve(one), curve(two))) < TOLERANCE
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
    from mimo_train.models.parameters import global_names, modules_of

    modules = modules_of(Steps(cfg).model).items()
    named = ((module, global_names(chunk)) for module, chunks in modules for chunk in chunks)
    return {
        f"{module}.{name}" for module, names in named for name, parameter in names.items() if parameter.requires_grad
    }

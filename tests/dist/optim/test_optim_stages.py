"""Parameters that are frozen, for ever or until a step: still until then, right from then on, at every layout, also
resumed."""

import pytest

from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TOLERANCE, config, largest_difference
from tests.dist.steps import Steps, whole

WORLD = {
    "one_process": 1,
    "two_processes": 2,
    "images_dp2_language_dp1": 3,
    "images_dp2_language_dp2": 4,
    "images_tp2_language_pp2": 4,
    "language_one": 1,
    "language_pp2": 2,
}
PROJECTOR_FIRST = ("modules.images.freeze_until={encoder: 3}", "modules.language.freeze_until={llm: 3}")
STEPS = 6


def vlm(digits, run_dir, layout: str, *overrides: str):
    return config("vlm_digits", run_dir, digits, f"layout={layout}", "train.iters=20", *overrides)


def _curve(cfg, steps: int = STEPS) -> list[tuple]:
    return Steps(cfg).train(steps)


def _moved(cfg, steps: int = STEPS) -> list[set[str]]:
    """Names of this rank's parameters that each step has changed."""
    import torch

    run, moved = Steps(cfg), []
    for _ in range(steps):
        before = run.parameters()
        run.train(1)
        after = run.parameters()
        moved.append({name for name in before if not torch.equal(before[name], after[name])})
    return moved


def parts(names: set[str]) -> set[str]:
    known = ("encoders", "input_projections", "language")
    return {next(part for part in known if part in name) for name in names}


@pytest.mark.parametrize("layout", ["one_process", "two_processes"])
def test_frozen_parts_are_bitwise_the_same_until_their_step(layout, digits, tmp_path):
    ranks = run_ranks(_moved, WORLD[layout], vlm(digits, tmp_path, layout, *PROJECTOR_FIRST))
    moved = [parts(set().union(*step)) for step in zip(*ranks, strict=True)]
    # The first step has the rate 0 of the warm-up.
    assert moved[:3] == [set(), {"input_projections"}, {"input_projections"}]
    assert moved[3:] == [{"encoders", "input_projections", "language"}] * 3


@pytest.mark.parametrize(
    ("keys", "moving"),
    [
        (("modules.images.freeze=[encoder]",), {"input_projections", "language"}),
        (("modules.language.freeze=[llm]",), {"encoders", "input_projections"}),
        (("modules.images.freeze=[encoder]", "modules.language.freeze=[llm]"), {"input_projections"}),
        (("modules.images.freeze=[encoder, projector]",), {"language"}),
    ],
)
@pytest.mark.parametrize("layout", ["one_process", "two_processes"])
def test_frozen_parts_do_not_move_and_the_others_do(layout, keys, moving, digits, tmp_path):
    ranks = run_ranks(_moved, WORLD[layout], vlm(digits, tmp_path, layout, *keys), 3)
    assert parts({name for steps in ranks for moved in steps for name in moved}) == moving


def test_adapters_are_frozen_until_their_step_and_the_weights_beside_them_for_ever(digits, tmp_path):
    own = ("modules.language.lora.rank=2", "modules.language.freeze_until={llm: 3}")
    (steps,) = run_ranks(_moved, 1, vlm(digits, tmp_path, "one_process", *own), 5)
    language = [{name for name in step if "input_projections" not in name and "encoders" not in name} for step in steps]
    assert language[:3] == [set()] * 3 and steps[2]
    assert language[4] and all("lora_" in name for name in language[3] | language[4])


@pytest.mark.parametrize(
    "until",
    [
        PROJECTOR_FIRST,
        ("modules.images.freeze_until={encoder: 2, projector: 4}",),
        ("modules.images.freeze=[encoder]", "modules.images.freeze_until={projector: 3}"),
        ("modules.language.freeze_until={'decoder.layers.1.*': 2, 'embedding*': 4}",),
    ],
    ids=["projector first", "encoder module", "frozen encoder", "patterns"],
)
def test_stages_give_the_numbers_of_one_process_at_any_layout(until, digits, tmp_path):
    one = whole(run_ranks(_curve, 1, vlm(digits, tmp_path, "one_process", *until)))
    for layout in ("two_processes", "images_tp2_language_pp2"):
        other = whole(run_ranks(_curve, WORLD[layout], vlm(digits, tmp_path, layout, *until)))
        assert max(largest_difference(one, other)) < TOLERANCE, layout


def test_a_stage_is_a_frozen_run_until_its_step_and_differs_afterwards(digits, tmp_path):
    frozen = whole(
        run_ranks(_curve, 2, vlm(digits, tmp_path, "two_processes", "modules.images.freeze=[encoder, projector]"))
    )
    staged = whole(
        run_ranks(
            _curve, 2, vlm(digits, tmp_path, "two_processes", "modules.images.freeze_until={encoder: 3, projector: 3}")
        )
    )
    assert max(largest_difference(frozen[:3], staged[:3])) < TOLERANCE
    assert staged[3][2] > frozen[3][2] * (1 + 1e-5), "from its step on the encoder has a gradient"


ADAM = ("optim.eps=1e-15", "optim.lr=1e-3")
"""With which Adam's steps have the size of its rate."""


def _first_update(cfg, steps: int) -> dict[str, float]:
    """Largest change of each parameter that the last of `steps` steps has made, over its learning rate."""
    run = Steps(cfg)
    run.train(steps - 1)
    before, rate = run.parameters(), run.scheduler.learning_rates()["images"]
    run.train(1)
    after = run.parameters()
    return {name: float((after[name] - before[name]).abs().max()) / rate for name in before if "encoders" in name}


def test_the_first_update_of_a_released_part_has_the_size_that_adam_gives_a_first_update(digits, tmp_path):
    """With its bias corrected from 0, Adam's first update has the size of the learning rate, whatever the gradient."""
    until = ("modules.images.freeze_until={encoder: 4}", "optim.weight_decay=0", *ADAM)
    changes = run_ranks(_first_update, 1, vlm(digits, tmp_path, "one_process", *until), 5)[0]
    assert changes and all(change == pytest.approx(1, rel=1e-3) for change in changes.values() if change)
    assert sum(change > 0 for change in changes.values()) > len(changes) / 2


def _train_and_save(cfg, before: int) -> list[tuple]:
    run = Steps(cfg)
    numbers = run.train(before)
    run.save()
    return numbers


@pytest.fixture(scope="module")
def uninterrupted(digits, tmp_path_factory) -> list[tuple]:
    """Curve of 8 steps with the encoder released after 3, on one process."""
    until = "modules.images.freeze_until={encoder: 3}"
    return whole(run_ranks(_curve, 1, vlm(digits, tmp_path_factory.mktemp("whole"), "one_process", until), 8))


@pytest.mark.parametrize(
    ("saved_at", "layouts"),
    [
        (2, ("two_processes", "images_dp2_language_dp1")),
        (3, ("two_processes", "two_processes")),
        (5, ("images_dp2_language_dp1", "two_processes")),
    ],
    ids=["before the release", "at the release", "after the release"],
)
def test_a_resumed_run_keeps_its_stages(saved_at, layouts, uninterrupted, digits, tmp_path):
    first, then = (vlm(digits, tmp_path, layout, "modules.images.freeze_until={encoder: 3}") for layout in layouts)
    run_ranks(_train_and_save, WORLD[layouts[0]], first, saved_at)
    resumed = whole(run_ranks(_curve, WORLD[layouts[1]], then, 8 - saved_at))
    resumed = [(step + saved_at, loss, norm) for step, loss, norm in resumed]
    assert max(largest_difference(uninterrupted[saved_at:], resumed)) < TOLERANCE


def test_an_entry_that_matches_nothing_is_named(digits, tmp_path):
    cfg = vlm(digits, tmp_path, "two_processes", "modules.images.freeze_until={'encoder.blocks.*': 3}")
    with pytest.raises(RankFailure, match=r"modules\.images\.freeze_until: 'encoder\.blocks\.\*' matches no"):
        run_ranks(_curve, 2, cfg)


@pytest.mark.parametrize(
    "key", ["freeze=['decoder.layers.1.*', 'embedding*']", "freeze_until={'decoder.layers.1.*': 9}"]
)
def test_a_pattern_means_the_same_layers_at_every_pipeline_layout(key, prose, tmp_path):
    """Layers are counted over the whole model, and a stage may hold nothing of what a pattern names."""

    def curve(layout: str) -> list[tuple]:
        cfg = config("gpt_tiny", tmp_path, prose, f"layout={layout}", "train.iters=20", f"modules.language.{key}")
        return whole(run_ranks(_curve, WORLD[layout], cfg, 4))

    assert max(largest_difference(curve("language_one"), curve("language_pp2"))) < TOLERANCE

"""Samples of two answers give the losses and gradients of two samples, at any padding and layout, and their media are
encoded once."""

from pathlib import Path

import pytest

from tests.dist.layout_tables import MODELS, PACKED, WHOLE_ROWS, Row, alone, apart, same
from tests.dist.pairs import write_pairs
from tests.dist.parity import config_of, make_demos
from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, largest_difference
from tests.dist.steps import Steps, whole

STEPS = 3
AXES = ("modules.language.llm.mrope_section=[2,1,1]",)
ANY_SIZE, TWO, MIXED = "vlm, images of any size", "two vision encoders", "images and sound"
ON_ONE = {
    "gpt": [(), PACKED],
    ANY_SIZE: [AXES, (*AXES, *PACKED), (*AXES, WHOLE_ROWS)],
    TWO: [()],
    MIXED: [PACKED],
}
"""Model -> what else a run on one process sets; the first is compared with others of the model."""
ON_TWO = {
    "gpt": [alone("tp2"), alone("cp2", *PACKED), alone("pp2"), alone("dp2")],
    ANY_SIZE: [
        apart("one", "one", *AXES, *PACKED),
        same("dp2", "dp2", *AXES),
        same("dp2", "cp2", *AXES),
        same("dp2", "tp2", *AXES, *PACKED),
    ],
}


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> dict[str, dict[str, Path]]:
    """The demo of each model, as pairs and as twice as many samples."""
    folder = tmp_path_factory.mktemp("demos")
    made = make_demos(folder)
    return {model: write_pairs(made[MODELS[model].demo], folder / f"{at} pairs") for at, model in enumerate(ON_ONE)}


def run(demos, folder: Path, model: str, form: str, row: Row | None = None, *changes: str):
    """A config; global batches are of the same answers in both forms."""
    demo = MODELS[model].demo
    overrides = [
        "data.shuffle=false",
        f"train.global_batch_size={8 if form == 'pairs' else 16}",
        "optim.warmup_iters=0",
    ]
    return config_of(model, {demo: demos[model][form]}, folder, row, *overrides, *changes)


def trained(cfgs: dict[tuple, tuple[str, object]]) -> dict[tuple, tuple[list[tuple], int]]:
    """Curve of each run on this rank, and the items that its encoders were given."""
    from mimo_train.config.tasks import TASKS, TaskTraits

    found = {}
    for key, (form, cfg) in cfgs.items():
        # Cross entropy of all answers, which is the same for one sample with two and two samples.
        TASKS["sft"] = TaskTraits(form="turns" if form == "twice" else form)
        run = Steps(cfg)
        curve, items = [], 0
        for _ in range(STEPS):
            curve += run.train(1)
            for batch in run.session.data.current.microbatches:
                inputs = [value[name] for name, value in batch.get("modality_inputs", {}).items() if value]
                items += sum(len(next(iter(each.values()))) for each in inputs)
        found[key] = curve, items
        run.session.close()
    return found


def test_two_answers_of_a_sample_are_two_samples_at_any_layout(demos, tmp_path):
    cfgs, on_two = {}, {}
    for model, variants in ON_ONE.items():
        for at, changes in enumerate(variants):
            cfgs[model, at] = "pairs", run(demos, tmp_path / f"{len(cfgs)}", model, "pairs", None, *changes)
        cfgs[model, "twice"] = "twice", run(demos, tmp_path / f"{len(cfgs)}", model, "twice", None, *variants[0])
    for model, rows in ON_TWO.items():
        for row in rows:
            on_two[model, str(row)] = "pairs", run(demos, tmp_path / f"two {len(on_two)}", model, "pairs", row)
    (one,) = run_ranks(trained, 1, cfgs)
    for (model, at), (curve, items) in one.items():
        expected, of_expected = one[model, "twice"]
        assert max(largest_difference(whole([expected]), whole([curve]))) < TOLERANCE, (model, at)
        assert 2 * items == of_expected or at == "twice"
    ranks = run_ranks(trained, 2, on_two)
    for model, row in on_two:
        curve = whole([of_rank[model, row][0] for of_rank in ranks])
        assert max(largest_difference(whole([one[model, "twice"][0]]), curve)) < TOLERANCE, (model, row)

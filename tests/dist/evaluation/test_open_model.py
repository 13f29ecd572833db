"""A trained model on other layouts: its numbers are those of the evaluation in training."""

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.runs import config, train_rank

LAYOUTS = {"": 1, "tp=2": 2, "run": 2, "images_dp1_language_dp2": 3}
"""Number of processes by layout."""


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """(folder, last line of metrics.jsonl) of a run with adapters on two processes."""
    from mimo_train.logging.sinks.jsonl import read_metrics

    folder = tmp_path_factory.mktemp("run")
    cfg = config(
        "vlm_digits",
        folder,
        digits,
        "layout=two_processes",
        "modules.language.lora.rank=4",
        "modules.language.llm.init_std=0.3",
        "train.iters=2",
        "train.eval_samples=37",
        f"data.validation_shards={digits}/held_out",
        "data.sequence_length=120",
    )
    run_ranks(train_rank, 2, cfg)
    return folder, read_metrics(folder / "metrics.jsonl")[-1]


def _evaluated(folder: str, options: dict) -> dict[str, float]:
    from mimo_train.evaluation.held_out import open_held_out
    from mimo_train.evaluation.open_model import open_model

    model = open_model(folder, micro_batch_size=0, merge=False, **options)
    model.run.cfg.run.dir = f"{folder}/again"
    (held_out,) = open_held_out(model.run, model.pipeline, model.tokenizer)
    return held_out.evaluate()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_of_training(layout, trained):
    folder, line = trained
    options = {"layout": layout} if layout else {"processes": 1}
    values = next(filter(None, run_ranks(_evaluated, LAYOUTS[layout], str(folder), options)))
    exact = layout in ("", "run")
    assert values["eval/loss"] == (line["eval/loss"] if exact else pytest.approx(line["eval/loss"], rel=1e-6))
    assert values["eval/exact_match"] == line["eval/exact_match"] and values["eval/samples"] == 37


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("language_tp", "--layout: no file .*Did you mean language_tp2"),
        ("tp=two", "--layout: expected NAME=NUMBER, such as tp=2 or images.dp=4, got 'tp=two'"),
        ("tpp=2", "modules.language.layout.tpp: "),
        ("audio.tp=2", "modules.audio: --layout names it, but the modules of this model are images, language"),
        ("language_tp2", "modules.images.layout: missing in --layout language_tp2"),
    ],
)
def test_a_wrong_layout_is_named(layout, message):
    from mimo_train.config.errors import UserError
    from mimo_train.evaluation.layouts import with_layout
    from tests.unit.configs import load

    with pytest.raises(UserError, match=message):
        with_layout(load("vlm_digits"), layout)

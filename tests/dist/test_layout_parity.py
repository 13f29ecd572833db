"""The layout never changes the numbers: losses and gradient norms of 20 steps, and the parameters after them, against
those of one process, for the rows of `layout_tables`: every third of each model, or all with MIMO_ALL_LAYOUTS=1."""

import functools
import os
from collections.abc import Callable

import pytest

from mimo_train.plan.run import resolve
from tests.dist.layout_tables import CASES, MODELS
from tests.dist.parity import PARAMETERS, STEPS, Trained, config_of, difference, make_demos, trained, within

TRIED = [(name, row) for name, model in MODELS.items() for row in model.rows[::3]]
if os.environ.get("MIMO_ALL_LAYOUTS"):
    TRIED = CASES


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """The samples of all models."""
    return make_demos(tmp_path_factory.mktemp("demos"))


@pytest.fixture(scope="module")
def one_process(demos, tmp_path_factory) -> Callable[[str], Trained]:
    """Gives a model trained on one process, once."""
    return functools.cache(lambda model: trained(model, demos, tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize(("model", "row"), TRIED, ids=[f"{model}: {row}" for model, row in TRIED])
def test_layout_gives_the_numbers_of_one_process(model, row, one_process, demos, tmp_path):
    one = one_process(model)
    found = difference(one, trained(model, demos, tmp_path, row))
    assert within(model, found), found
    assert one.points[-1][1] < one.points[0][1] - 0.1, "the run does not learn, so that parity would say nothing"


def test_other_seed_gives_other_numbers(one_process, demos, tmp_path):
    other = trained("vlm", demos, tmp_path, None, "run.seed=7")
    found = difference(one_process("vlm"), other)
    assert min(found.loss, found.norm, found.parameter) > 100 * MODELS["vlm"].tolerance


def test_a_rate_of_one_module_that_is_a_hundredth_off_shows_in_its_parameters(one_process, demos, tmp_path):
    other = trained("vlm", demos, tmp_path, None, "modules.images.optim.lr=0.00101")
    found = difference(one_process("vlm"), other)
    assert found.parameter > 10 * PARAMETERS * MODELS["vlm"].tolerance and ".images." in found.name


def test_the_table_meets_every_kind_of_microbatch(demos, tmp_path):
    """Uneven counts between replicas in both directions, and microbatches of text alone on one or on all ranks of an
    encoder; counted from the plan of the samples that these rows train on."""
    from data.pipeline import Batching, StepLoader
    from mimo_train.plan.inputs import build_dataset, tokenizer_of

    for row in MODELS["vlm, few pictures"].rows:
        cfg = config_of("vlm, few pictures", demos, tmp_path, row)
        run = resolve(cfg)
        batching = Batching(run.batch.global_batch_size, run.batch.microbatch_samples)
        with StepLoader(build_dataset(cfg, tokenizer_of(cfg)), batching, [], workers=0, limit=STEPS) as steps:
            microbatches = [counts for step in steps for counts in step.token_counts["images"]]
        assert 0 < sum(not any(counts) for counts in microbatches) < len(microbatches), "all of it text, on all ranks"
        for module in run.layout.modules.values():
            if module.dp > 1:
                part = run.batch.microbatch_samples // module.dp
                sums = [[sum(counts[first : first + part]) for first in range(0, len(counts), part)]
                        for counts in microbatches]  # fmt: skip
                assert any(any(each) and not all(each) for each in sums), "text alone, on some ranks"
                assert any(all(each) and len(set(each)) > 1 for each in sums) or module.dp > 2, "uneven pictures"
    directions = {row.size("images", "dp") > row.size("language", "dp") for row in MODELS["vlm, few pictures"].rows}
    assert directions == {True, False}

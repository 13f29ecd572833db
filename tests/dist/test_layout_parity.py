"""The layout never changes the numbers: losses and gradient norms of 8 steps, and the parameters after them, against
those of one process, for the rows of `layout_tables` that `layout_cover` picks. With MIMO_ALL_LAYOUTS=1, 20 steps of
all rows, as in the record."""

import functools
import os
from collections.abc import Callable

import pytest

from mimo_train.layout.run import resolve
from tests.dist.layout_cover import DEFAULT, FAMILIES, cases_of
from tests.dist.layout_tables import CASES, MODELS, apart
from tests.dist.parity import Trained, config_of, difference, make_demos, trained, within
from tests.dist.runs import BOUNDS, BOUNDS_BF16, RATE, STEPS, USUAL_ADAM

TRIED, ITERS = (CASES, STEPS) if os.environ.get("MIMO_ALL_LAYOUTS") else (DEFAULT, 8)
SO_LONG = f"train.iters={ITERS}"
"""A layout that is wrong is so from its first update on; differences by rounding grow with the steps."""


KERNEL_ROWS = [("vlm", None), ("vlm", MODELS["vlm"].rows[0]), ("gpt", MODELS["gpt"].rows[0])]
"""Layouts that are trained with `run.cpu_kernels` too."""


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """The samples of all models."""
    return make_demos(tmp_path_factory.mktemp("demos"))


@pytest.fixture(scope="module")
def one_process(demos, tmp_path_factory) -> Callable[[str], Trained]:
    """Gives a model trained on one process, once."""
    return functools.cache(lambda model: trained(model, demos, tmp_path_factory.mktemp("one"), None, SO_LONG))


@pytest.mark.parametrize(("model", "row"), TRIED, ids=[f"{model}: {row}" for model, row in TRIED])
def test_layout_gives_the_numbers_of_one_process(model, row, one_process, demos, tmp_path):
    one = one_process(model)
    found = difference(one, trained(model, demos, tmp_path, row, SO_LONG))
    assert within(model, found), found
    assert one.points[-1][1] < one.points[0][1] - 0.1, "the run does not learn, so that parity would say nothing"


@pytest.mark.parametrize(("model", "row"), KERNEL_ROWS, ids=[f"{model}: {row}" for model, row in KERNEL_ROWS])
def test_cpu_kernels_give_the_numbers_of_one_process_without_them(model, row, one_process, demos, tmp_path):
    difference_from_one = difference(
        one_process(model), trained(model, demos, tmp_path, row, SO_LONG, "run.cpu_kernels=true")
    )
    assert within(model, difference_from_one), difference_from_one


def test_other_seed_gives_other_numbers(one_process, demos, tmp_path):
    found = difference(one_process("vlm"), trained("vlm", demos, tmp_path, None, SO_LONG, "run.seed=7"))
    assert found.loss > 1000 * BOUNDS.loss and found.norm > 1000 * BOUNDS.norm
    assert found.parameter > 1000 * BOUNDS.parameter


def test_a_rate_of_one_module_that_is_a_hundredth_off_shows(one_process, demos, tmp_path):
    other = trained("vlm", demos, tmp_path, None, SO_LONG, f"modules.images.optim.lr={RATE * 1.01}")
    found = difference(one_process("vlm"), other)
    assert found.loss > 10 * BOUNDS.loss and found.norm > 10 * BOUNDS.norm
    assert found.parameter > 100 * BOUNDS.parameter and found.name.startswith("images.")


def test_layouts_stay_near_each_other_with_adam_as_users_have_it(demos, tmp_path):
    """Where Adam makes whole steps of gradients that are nothing but rounding no bound is tight; this one shows another
    decay of the second moment, which the table does not."""
    one = trained("vlm", demos, tmp_path / "one", None, *USUAL_ADAM)
    row = difference(one, trained("vlm", demos, tmp_path / "row", apart("tp2", "pp2"), *USUAL_ADAM))
    assert row.loss < NEAR, row
    other = trained("vlm", demos, tmp_path / "other", None, *USUAL_ADAM, "optim.beta2=0.9")
    assert difference(one, other).loss > 10 * NEAR


NEAR = 2e-4
"""Relative difference of losses; 2.5e-5 was met on one machine, in other runs at three times the rate."""


def test_the_default_rows_have_what_any_row_has():
    tried = set()
    for family in FAMILIES:
        cases = cases_of(family)
        of = set().union(*(features for model, row, features in cases if (model, row) in DEFAULT))
        assert of == set().union(*(features for *_, features in cases)), family
        tried |= of
    axes = {f"language {axis}" for axis in ("tp", "sp", "pp", "vpp", "cp", "dp", "ep", "etp")}
    axes |= {f"images {axis}" for axis in ("tp", "sp", "pp", "dp")}
    ways = {f"uneven, {way}, {fan}" for way in ("apart", "same ranks") for fan in ("fan-in", "fan-out")}
    places = {"disjoint", "shared", "first ranks", "placement.allow_idle=true"}
    axes |= {f"packed, {axis}" for axis in ("one", "tp", "sp", "pp", "vpp", "cp", "dp", "ep")}
    changes = {"optim.distributed_optimizer=false", "train.recompute=full", "images.balance=images"}
    assert axes | ways | places | changes | MODELS.keys() <= tried
    assert {MODELS[model].bounds for model, _ in DEFAULT} == {BOUNDS, BOUNDS_BF16}
    assert len(DEFAULT) < len(CASES) / 2, "few of them"


def test_the_table_meets_every_kind_of_microbatch(demos, tmp_path):
    """Uneven counts between replicas in both directions, and microbatches of text alone on one or on all ranks of an
    encoder; counted from the plan of the samples that these rows train on."""
    from data.loader import StepLoader
    from data.order.step import Batching
    from data.samples.text_lengths import TextLengths
    from mimo_train.inputs.datasets import build_dataset, tokenizer_of
    from mimo_train.inputs.padding import padding_of

    for row in MODELS["vlm, few images"].rows:
        cfg = config_of("vlm, few images", demos, tmp_path, row)
        run = resolve(cfg)
        sizes = (run.batch.global_batch_size, run.batch.microbatch_samples)
        batching = Batching(*sizes, None, run.batch.replicas, padding_of(cfg))
        dataset = build_dataset(cfg, tokenizer_of(cfg))
        list(TextLengths(dataset).build())
        TextLengths(dataset).serve()
        with StepLoader(dataset, batching, [], workers=0, limit=STEPS) as steps:
            microbatches = [counts for step in steps for counts in step.token_counts["images"]]
        assert 0 < sum(not any(counts) for counts in microbatches) < len(microbatches), "all of it text, on all ranks"
        for module in run.layout.modules.values():
            if module.dp > 1:
                part = run.batch.microbatch_samples // module.dp
                sums = [[sum(counts[first : first + part]) for first in range(0, len(counts), part)]
                        for counts in microbatches]  # fmt: skip
                assert any(any(each) and not all(each) for each in sums), "text alone, on some ranks"
                assert any(all(each) and len(set(each)) > 1 for each in sums) or module.dp > 2, "uneven images"
    directions = {row.size("images", "dp") > row.size("language", "dp") for row in MODELS["vlm, few images"].rows}
    assert directions == {True, False}

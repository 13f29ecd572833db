"""Weights of a run over its samples, new ones after a resume, and lengths in epochs."""

import re

import pytest

from mimo_train.config import compose
from mimo_train.config.errors import ConfigError
from mimo_train.inputs.mixture import Mixing
from mimo_train.layout.batch import Batch
from mimo_train.layout.run import config_faults, resolve, steps_of_epochs
from tests.unit.configs import load

MIX = ("data.demo=", "data.shards=", "data.mix=[{shards: x/a, weight: 3}, {shards: 'x/b/*.tar', weight: 0.5}]")


def mixing(*overrides):
    cfg = load("vlm_digits", *MIX, "train.global_batch_size=8", *overrides)
    return Mixing(cfg, Batch.of(cfg), [100, 50])


def record(of, step, consumed):
    return {"step": step, "train_state": {"consumed_train_samples": consumed}, **of.record()}


def test_schedules_begin_after_their_steps_also_while_the_batch_grows():
    schedule = "data.mix_schedule=[{after_step: 3, weights: {b: 0}}, {after_step: 10, weights: {b: 6}}]"
    assert mixing(schedule).phases == [(0, (6, 1)), (24, (1, 0)), (80, (1, 2))]
    ramp = ("train.rampup_batch_size=[2, 2, 9]", "train.micro_batch_size=2")
    grown = mixing(schedule, *ramp)
    assert grown.phases[1][0] == grown.batch.samples_of(3) and grown.batch.samples_of(3) < 24


def test_a_continued_run_keeps_its_weights_and_new_ones_begin_where_it_goes_on():
    first = mixing("data.mix_schedule=[{after_step: 4, weights: {b: 3}}]")
    saved = record(first, 6, 48)
    same = mixing("data.mix_schedule=[{after_step: 4, weights: {b: 3}}, {after_step: 9, weights: {a: 0}}]")
    same.continue_from(saved)
    assert same.phases == [(0, (6, 1)), (32, (1, 1)), (72, (0, 1))]
    # Sixteen samples a step from here on: step 9 is three steps later.
    larger = mixing(
        "data.mix_schedule=[{after_step: 4, weights: {b: 3}}, {after_step: 9, weights: {a: 0}}]",
        "train.global_batch_size=16",
    )
    larger.continue_from(saved)
    assert larger.phases[1:] == [(32, (1, 1)), (48 + 3 * 16, (0, 1))]
    other = mixing()
    other.continue_from(saved)
    assert other.phases == [(0, (6, 1)), (32, (1, 1)), (48, (6, 1))]
    again = mixing()
    again.continue_from(record(other, 8, 64))
    assert again.phases == other.phases


def test_weights_are_the_sizes_where_none_are_given_and_a_run_without_a_mixture_has_none():
    cfg = load("vlm_digits", *MIX[:2], "data.mix=[{shards: a}, {shards: b}]")
    assert Mixing(cfg, Batch.of(cfg), [100, 50]).phases == [(0, (2, 1))]
    plain = Mixing(load("vlm_digits"), Batch.of(cfg), [100])
    assert plain.phases == [(0, (1,))] and plain.record() == {}


@pytest.mark.parametrize(("first", "samples"), [(0, 0), (2, 25), (4, 9)])
def test_steps_of_samples(first, samples):
    batch = Batch(8, 2, 1, first, 2, samples) if first else Batch(8, 2, 1)
    ends = [batch.samples_of(steps) for steps in range(12)]
    for wanted in range(1, ends[-1]):
        assert batch.steps_of(wanted) == sum(end < wanted for end in ends)
        assert batch.steps_within(wanted) == sum(0 < end <= wanted for end in ends)
    assert batch.steps_within(ends[7], ends[3]) == 4 and batch.samples_of(4, ends[3]) == ends[7] - ends[3]


def test_epochs_take_the_place_of_iters():
    run = resolve(load("vlm_digits", "train.iters=0", "train.epochs=0.1", "train.global_batch_size=8"))
    assert [steps_of_epochs(run, samples) for samples in (1, 80, 81, 240)] == [1, 1, 2, 3]
    assert compose.from_dict(compose.to_dict(run.cfg)).train.iters == 0
    plain = compose.to_dict(load("vlm_digits"))
    del plain["train"]["iters"]
    plain["train"]["epochs"] = 2
    assert compose.from_dict(plain).train.iters == 0
    for overrides, key in ((("train.epochs=2",), "train.epochs"), (("train.iters=0",), "train.iters")):
        assert key in {fault.key for fault in config_faults(load("vlm_digits", *overrides))}


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (("data.shards=x",), "data.shards", "data.mix is given too"),
        (("data.mix[1].name=a",), "data.mix[1].name", r"'a' is the name of data.mix\[0\] too"),
        (("data.mix[1].weight=null",), "data.mix[1].weight", "for every source, or for none"),
        (("data.mix[0].weight=0", "data.mix[1].weight=0"), "data.mix", "every weight is 0"),
        (("data.mix[1].weight=-1",), "data.mix[1].weight", "at least 0"),
        (("data.mix[0].shards=",), "data.mix[0].shards", "is empty"),
        (("data.mix_schedule=[{after_step: 2, weights: {c: 1}}]",), "data.mix_schedule[0].weights", "no source 'c'"),
        (("data.mix_schedule=[{after_step: 0, weights: {a: 1}}]",), "data.mix_schedule[0].after_step", "at least 1"),
        (("data.validation={loss: {shards: x}}",), "data.validation", "one is 'loss'"),
        (("data.validation={a: {}}",), "data.validation.a.shards", "is empty"),
        (("data.validation_fraction=0.1",), "data.validation_fraction", "set one of them to 0 or empty"),
    ],
)
def test_faults_of_mixtures_and_held_out_sets_name_their_keys(overrides, key, said):
    found = {fault.key: fault.message for fault in config_faults(load("vlm_digits", *MIX, *overrides))}
    assert key in found and re.search(said, found[key]), found


@pytest.mark.parametrize("key", ["data.mix[2].weight", "data.mix.2.weight"])
def test_an_entry_that_a_list_does_not_have_is_a_fault(key):
    with pytest.raises(ConfigError) as raised:
        load("vlm_digits", *MIX, f"{key}=2")
    assert str(raised.value) == f"{key}: data.mix has no entry 2: it has 2, counted from 0"


def test_unknown_keys_in_lists_are_faults():
    with pytest.raises(ConfigError, match=r"data\.mix\[1\]\.wieght: unknown key. Did you mean weight"):
        load("vlm_digits", *MIX, "data.mix[1].wieght=2")

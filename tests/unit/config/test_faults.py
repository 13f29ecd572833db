"""Faults of values, alone and between keys."""

import dataclasses
import math

import pytest

from data.demo.make import DEMOS
from data.samples.media_spec import SAMPLING
from mimo_train.config.errors import ConfigError
from mimo_train.config.keys import rules_of
from mimo_train.config.schema_data import DataConfig
from mimo_train.config.schema_optim import GroupConfig
from mimo_train.layout.run import config_faults, resolve
from tests.unit.configs import changed, load


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("optim.beta1", 1.0, "at least 0 and below 1, is 1"),
        ("optim.min_lr", 1.0, "at most optim.lr 0.001, is 1.0"),
        ("optim.lr", math.inf, "must be finite, is inf"),
        ("train.loss_weights", {"lm loss": math.nan}, "must be finite, has nan"),
        ("run.dir", " ", "is empty. Set it to the folder that the run writes into"),
        ("run.timeout_minutes", 1e12, "at least 0.001 and below 525600, is 1e+12"),
        ("modules.images.encoder.dropout", 1.5, "at least 0 and below 1, is 1.5"),
        ("modules.images.encoder.pixel_std", [0.5, 0, 0.5], "must be above 0 and at most 1e+06, has 0"),
        ("modules.language.llm.shared_expert_ffn_hidden_size", 8, "requires experts, but"),
        ("modules.language.llm.experts_per_token", 0, "modules.language.llm.num_experts is 0. Remove it"),
        ("data.tokenizer", "gpt2", "no folder gpt2: give bytes, a folder"),
        ("data.shards", "", "data.demo=digits needs a folder"),
        ("modules.language.llm.head_size", 3, "even width, it is 3: change it"),
        ("modules.language.llm.num_query_groups", -1, "at least 0 and at most 4194304 (0: as many as query heads)"),
        ("modules.images.freeze", ["llm"], "'llm' is no part of this module, it has encoder and projector"),
        (
            "modules.images.freeze",
            ["encodr"],
            "'encodr' is neither a part of this module, which has encoder and projector, nor a pattern of parameter "
            "names. Did you mean encoder?",
        ),
        ("modules.images.optim.groups", {"encodr": GroupConfig()}, "Did you mean encoder?"),
        ("train.callbacks", "my.module:Class", "must be a list, is 'my.module:Class'. Write ['my.module:Class']"),
        ("modules.images.freeze_until", {"projectr": 3}, "Did you mean projector?"),
        (
            "modules.images.freeze",
            ["encoder.*"],
            "'encoder.*' matches no parameter: names of this module begin with encoders.images. or "
            "input_projections.0.",
        ),
    ],
)
def test_values_out_of_range_are_faults_of_their_key(key, value, said):
    messages = [fault.message for fault in config_faults(changed({key: value})) if fault.key == key]
    assert any(said in message for message in messages), messages
    assert len(messages) == 1 or "must be a list" not in said, messages


_SHARE = {"modules.images.optim.wsd_decay_fraction": 0.2}


def test_a_key_that_no_optimizer_uses_is_a_fault():
    lion = {"optim.name": "lion", "optim.eps": 1e-6}
    (fault,) = config_faults(changed(lion))
    assert str(fault) == "optim.eps: is 1e-06, but lion cannot use it. Remove it, or set optim.name=adamw"
    assert not config_faults(changed(lion | {"modules.images.optim.name": "muon", "optim.momentum": 0.9}))
    (fault,) = config_faults(changed({"optim.name": "adafactor", "optim.moments": "bf16"}))
    assert fault.key == "optim.moments"
    (fault,) = config_faults(changed({"optim.name": "adafactor", "modules.images.optim.moments": "8bit"}))
    assert fault.key == "modules.images.optim.moments"


def test_a_share_of_a_schedule_that_no_module_has_is_a_fault():
    (fault,) = config_faults(changed({"optim.wsd_decay_fraction": 0.2}))
    assert fault.key == "optim.wsd_decay_fraction" and "requires optim.decay=wsd" in fault.message
    (fault,) = config_faults(changed({"optim.decay": "wsd", "modules.images.optim.decay": "linear"} | _SHARE))
    assert fault.key == "modules.images.optim.wsd_decay_fraction"
    both = {"optim.wsd_decay_fraction": 1.0, "modules.images.optim.decay": "wsd"} | _SHARE
    assert not config_faults(changed(both))


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"lr": 1e-6}, "a rate of 1e-06 would rise to optim.min_lr 1e-05"),
        ({"min_lr": 2.0}, "a rate of 0.001 would rise to modules.images.optim.groups.encoder.min_lr 2"),
        ({"lr": 1e-6, "min_lr": 0.0}, ""),
        ({"weight_decay": 0.0}, ""),
    ],
)
def test_a_group_s_rate_may_not_rise(group, said):
    faults = config_faults(changed({"modules.images.optim.groups": {"encoder": GroupConfig(**group)}}))
    assert [fault.key for fault in faults] == ["modules.images.optim.groups.encoder"] * bool(said)
    assert all(said in fault.message for fault in faults)


def test_the_demos_of_the_config_are_those_that_can_be_made():
    (field,) = (field for field in dataclasses.fields(DataConfig) if field.name == "demo")
    assert rules_of(field).choices == ("", *DEMOS)


def test_videos_are_sampled_by_default_as_the_data_package_does():
    video = DataConfig().video
    assert (video.frames_per_second, video.max_frames) == (SAMPLING.frames_per_second, SAMPLING.max_frames)


def test_a_run_with_everything_frozen_has_nothing_to_train():
    frozen = {"modules.images.freeze": ["encoder", "projector"], "modules.language.freeze": ["llm"]}
    assert [fault.key for fault in config_faults(changed(frozen))] == ["modules.language.freeze"]
    one = {"modules.images.freeze": frozen["modules.images.freeze"]}
    assert config_faults(changed(one)) == []
    (fault,) = config_faults(changed(one | {"modules.images.optim.ema": 0.9}))
    assert fault.key == "modules.images.optim" and "every part of the module is frozen" in fault.message


def test_what_a_module_computes_again_is_one_of_the_runs_choices():
    (found,) = config_faults(load("vlm_digits", "modules.images.recompute=all"))
    assert str(found) == (
        "modules.images.recompute: must be none, selective, full, or parts of attention, mlp, experts, norms joined by "
        "+, is 'all'"
    )


def test_gathering_parameters_needs_the_distributed_optimizer():
    overlap = ("optim.overlap_grad_reduce=true", "optim.overlap_param_gather=true")
    assert not config_faults(load("gpt_tiny", *overlap))
    (found,) = config_faults(load("gpt_tiny", *overlap, "optim.distributed_optimizer=false"))
    assert found.key == "optim.overlap_param_gather" and "optim.distributed_optimizer" in found.message


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("checkpoint.dir=runs/x", r"checkpoint\.dir: is 'runs/x', no URL: give one of s3://, gs://, az://"),
        ("checkpoint.dir=https://host/run", r"checkpoint\.dir: is https://host/run: checkpoints are written to s3://"),
        ("checkpoint.dir=hf://host/run", r"checkpoint\.dir: .* not to hf://"),
        ("checkpoint.dir=s3://key:secret@bucket/run", r"checkpoint\.dir: s3://\.\.\.@bucket/run: has credentials"),
        ("checkpoint.resume=s3://bucket/a//b", r"checkpoint\.resume: .* has an empty part"),
        ("checkpoint.weights=s3:///a", r"checkpoint\.weights: .* is no URL such as"),
        ("run.dir=s3://bucket/run", r"run\.dir: is the URL .*: give the URL as checkpoint\.dir"),
        ("data.shards=s3://bucket/x", r"data\.shards: is the URL .*: the demo is made there"),
    ],
)
def test_what_is_no_place_is_a_fault(override, fault):
    with pytest.raises(ConfigError, match=fault) as raised:
        resolve(load("vlm_digits", override))
    assert "secret" not in str(raised.value)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr("mimo_train.config.paths.is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"requires the extra `remote` \(obstore is not installed\): run `pip"):
        resolve(load("vlm_digits", "checkpoint.dir=s3://bucket/run"))


def test_places_that_can_be():
    for override in ("checkpoint.dir=s3://bucket/run", "checkpoint.resume=https://host/step_00000004"):
        assert resolve(load("vlm_digits", override))
    run = resolve(load("vlm_digits", "checkpoint.dir=s3://bucket/run/"))
    assert str(run.checkpoints) == "s3://bucket/run" and str(run.dir) == run.cfg.run.dir
    assert resolve(load("vlm_digits")).checkpoints == run.dir

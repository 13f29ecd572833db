"""Which keys a run that continues from a checkpoint may have otherwise, and what it says of them: every key has its
place in a table."""

import copy
import dataclasses
from functools import partial
from pathlib import Path

import pytest

from data.order.sources import fingerprint_of
from mimo_train.checkpoint.resume.config_diff import (
    BY_CONTENT,
    BY_MODULE,
    FREE,
    FREE_OF_SPECS,
    MAY_CHANGE,
    REFUSED,
    SPECS,
)
from mimo_train.checkpoint.resume.same_run import config_changes, resume_faults, unread_weights
from mimo_train.config import compose
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_data import DataConfig
from mimo_train.config.schema_distill import DistillConfig
from mimo_train.config.schema_mix import SourceConfig
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.config.schema_optim import OptimConfig
from mimo_train.config.schema_train import TrainConfig
from mimo_train.config.tasks import PreferenceConfig
from mimo_train.inputs.datasets import tokenizer_of
from tests.unit.configs import changed, load
from tests.unit.data.text.chat_templates import CHATML, GEMMA, save_tokenizer, unmarked

SECTIONS = {"data": DataConfig, "modules": ModuleConfig, "train": TrainConfig, "optim": OptimConfig}
SECTIONS |= {"distill": DistillConfig, "preference": PreferenceConfig}
SAID = {
    "data": {
        *("sequence_length", "bounds", "exhausted", "mix_schedule"),
        *("validation_shards", "validation", "test_shards", "test", "split"),
    },
    "modules": {"freeze", "implementation", "optim"},
    "train": {
        *(
            "task",
            "iters",
            "epochs",
            "global_batch_size",
            "rampup_batch_size",
            "skip_iters",
            "loss_weights",
            "precision",
        ),
        *("eval_samples", "callbacks", "forward_step", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    },
    "optim": {
        *("lr", "min_lr", "warmup_iters", "decay", "weight_decay", "beta1", "beta2", "eps", "clip_grad"),
        *("momentum", "moments", "ema", "wsd_decay_fraction", "loss_scale", "initial_loss_scale", "loss_scale_window"),
    },
    "distill": {"teacher", "sequence_length", "weight", "temperature", "top_k"},
    "preference": {
        *("beta", "gamma", "label_smoothing", "sft_weight", "desirable_weight", "undesirable_weight", "center_rewards")
    },
}
"""Keys by section that change numbers, and are said. A key of no table is a decision that was not made."""

OTHER = {"fields": {"caption": "other.txt"}, "freeze_until": {"encoder": 9}, "video": {"max_frames": 3}}
OTHER |= {"bounds": {"pixels": 7}, "optim": {"lr": 7.0}, "mix": [{"shards": "a", "fields": {}}]}
"""Another value where a word is none."""


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_a_place(section):
    kinds = [table.get(section, set()) for table in (REFUSED, BY_CONTENT, FREE, BY_MODULE, SAID)]
    kinds.append({*SPECS, "lora"} if section == "modules" else set())  # key by key below
    known = [key for kind in kinds for key in kind]
    assert sorted(known) == sorted(field.name for field in dataclasses.fields(SECTIONS[section]))


def record_of(cfg: ConfigContainer, section: str, key: str) -> dict:
    """Of a run with another value of a key of a section, or of all its modules."""
    config = copy.deepcopy(compose.to_dict(cfg))
    for inside in config["modules"].values() if section == "modules" else (config[section],):
        inside[key] = OTHER.get(key, "another")
    return {"config": config, "data_fingerprint": "same", "step": 4}


@pytest.mark.parametrize("section", SECTIONS)
def test_another_value_is_refused_or_said_or_changes_nothing(section):
    cfg, folder = load("vlm_digits"), Path("checkpoint")
    for field in dataclasses.fields(SECTIONS[section]):
        if field.name in {*SPECS, "lora", "fp8"}:
            continue
        record = record_of(cfg, section, field.name)
        faults = resume_faults(folder, record, cfg, data_fingerprint="same", text_fingerprint=None)
        refused = {fault.key.rpartition(".")[2] for fault in faults}
        assert refused == ({field.name} & REFUSED.get(section, set())), field.name
        said = config_changes(folder, record, cfg)
        keys = [f"modules.{name}.{field.name}" for name in cfg.modules] if section == "modules" else []
        for key in keys or [f"{section}.{field.name}"]:
            assert (f"{key} was " in said or f"{key}." in said) == (field.name in SAID[section]), field.name


def test_fp8_is_said_by_the_module_that_has_it():
    cfg = load("vlm_digits")
    record = {"config": compose.to_dict(cfg), "data_fingerprint": "same"}
    said = partial(config_changes, Path("a"), record)
    assert said(changed({"modules.images.fp8": "none", "modules.language.compile": "none"})) == ""
    assert said(changed({"modules.images.fp8": "tensorwise"})) == "modules.images.fp8 was none, is tensorwise"
    both = "modules.images.fp8 was none, is blockwise; modules.language.fp8 was none, is blockwise"
    assert said(changed({"train.fp8": "blockwise"})) == both


def test_experts_that_balance_a_microbatch_mind_what_is_in_one():
    cfg = changed({"modules.language.llm.num_experts": 4})
    record = {"config": compose.to_dict(cfg), "data_fingerprint": "same"}
    others = {"modules.language.llm.num_experts": 4, "train.micro_batch_size": 2, "data.pack": True}
    assert config_changes(Path("a"), record, changed(others)) == "", "the loss of a sequence is the same in each"
    balanced = {"modules.language.llm.router_balancing": "aux_loss"}
    record["config"]["modules"]["language"]["llm"]["router_balancing"] = "aux_loss"
    said = config_changes(Path("a"), record, changed(others | balanced))
    assert said == "data.pack was False, is True; train.micro_batch_size was 8, is 2"


def test_the_kl_term_of_kto_minds_what_is_in_a_microbatch():
    for task, said in (("kto", "train.micro_batch_size was 8, is 2"), ("dpo", "")):
        record = {"config": compose.to_dict(changed({"train.task": task})), "data_fingerprint": "same"}
        assert config_changes(Path("a"), record, changed({"train.task": task, "train.micro_batch_size": 2})) == said


def test_new_weights_of_a_mixture_are_said():
    sources = [SourceConfig(shards="a", weight=3.0), SourceConfig(shards="b", weight=1.0)]
    record = {"config": compose.to_dict(changed({"data.mix": sources})), "data_fingerprint": "same"}
    now = changed({"data.mix": [sources[0], SourceConfig(shards="b", weight=7.0)]})
    assert config_changes(Path("a"), record, now) == "data.mix[1].weight was 1.0, is 7.0"


def test_weights_that_a_run_does_not_begin_with_are_said():
    """It continues with its own; they would be read if its folder were empty."""
    record = {"config": compose.to_dict(load("vlm_digits")), "data_fingerprint": "same"}
    said = partial(unread_weights, Path("a"), record)
    same, other = load("vlm_digits"), load("vlm_digits", "checkpoint.weights=runs/b")
    assert said(same) == ""
    assert said(other) == (
        "checkpoint.weights=runs/b: not read, since this run continues with its own weights; in another run.dir a run "
        "begins with them"
    )
    assert unread_weights(Path("a"), record | {"config": compose.to_dict(other)}, other) == "", "the same command"
    assert said(changed({"modules.images.pretrained": "b"})).startswith("modules.images.pretrained=b: not read")
    adapter = changed({"modules.language.lora.adapter": "b", "checkpoint.dir": "s3://a/b"})
    assert said(adapter).startswith("modules.language.lora.adapter=b: not read")
    assert "in another checkpoint.dir" in said(adapter)
    modules = load("vlm_digits", "checkpoint.load_modules={language: {path: runs/gpt}}")
    assert said(modules).startswith("checkpoint.load_modules.language.path=runs/gpt: not read")
    record["config"]["checkpoint"]["trained_only"] = True
    assert said(other) == "", "frozen weights are read from there, and compared"


def test_a_key_of_a_model_is_refused_unless_it_changes_no_weight():
    cfg = changed({"modules.images.lora.rank": 4})
    parts = [("images", part) for part in ("encoder", "projector", "lora")] + [("language", "llm")]
    keys = [(name, part, key) for name, part in parts for key in vars(getattr(cfg.modules[name], part))]
    for module, part, key in keys:
        record = {"config": compose.to_dict(cfg), "data_fingerprint": "same"}
        name = f"modules.{module}.{part}.{key}"
        record["config"]["modules"][module][part][key] = "another" if key != "rank" else 5
        faults = resume_faults(Path("a"), record, cfg, data_fingerprint="same", text_fingerprint=None)
        assert bool(faults) == (key not in MAY_CHANGE | {"adapter"}) and all(name in one.message for one in faults), key
        if not faults:
            free = key in FREE_OF_SPECS | {"adapter"}
            assert (f"{name} was another" in config_changes(Path("a"), record, cfg)) == (not free), key


@pytest.mark.parametrize(
    "was, now, faults",
    [
        (["encoder"], [], ["modules.images.freeze"]),
        (["encoder", "projector"], ["projector"], ["modules.images.freeze"]),
        ([], ["encoder"], []),
        (["encoder"], ["encoder", "projector"], []),
        (["encoder"], ["encoders.*"], []),  # what a pattern leaves is known when the model is built
    ],
)
def test_a_part_that_a_run_has_not_trained_is_not_released_in_it(was, now, faults):
    cfg = changed({"modules.images.freeze": now})
    record = {"config": compose.to_dict(cfg), "data_fingerprint": "same"}
    record["config"]["modules"]["images"]["freeze"] = was
    found = resume_faults(Path("a"), record, cfg, data_fingerprint="same", text_fingerprint=None)
    assert [fault.key for fault in found] == faults
    assert all("no optimizer states of encoder: " in fault.message for fault in found)


def test_what_is_compared_by_content(tmp_path):
    """Each of `BY_CONTENT` is in a fingerprint, but for the weights of `data.mix`, which are compared with a record."""
    template = tmp_path / "template.jinja"
    template.write_text("{#- another -#}" + unmarked(CHATML))
    ours = {"data.tokenizer": str(save_tokenizer(tmp_path / "ours", CHATML))}
    others = [
        {"data.tokenizer": str(save_tokenizer(tmp_path / "other", GEMMA))},
        {"data.chat_template": str(template)},
        {"data.template_variables": {"date": "today"}},
        {"modules.images.placeholder.start": "<begin>"},
    ]
    found = {tokenizer_of(changed(ours | other)).fingerprint for other in ({}, *others)}
    assert len(found) == 1 + len(others)
    shards = [("a.tar", 10, "content", 4)]
    assert fingerprint_of(shards, [1], 0.0) != fingerprint_of(shards, [1], 0.25)

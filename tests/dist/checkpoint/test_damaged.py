"""A checkpoint of another run ends every rank with an error that names its folder, the reason and a remedy.

Of damage is `test_fallback`.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from mimo_train.checkpoint import folders
from mimo_train.config import compose
from mimo_train.launch.run_lock import RunLock
from tests.dist.commands import command
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, train_on_ranks, train_rank
from tests.records import flip, write_record

LAYOUT = "layout=two_processes"
MODEL = (LAYOUT, "modules.language.lora.rank=2", "modules.language.llm.tie_embeddings=false")


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory) -> Path:
    """A run with a checkpoint of its second step."""
    run_dir = tmp_path_factory.mktemp("whole")
    train_on_ranks(config("vlm_digits", run_dir, digits, *MODEL, "train.iters=2"))
    return run_dir


def _refused(cfgs: list) -> list[tuple[str, str]]:
    """What each of several starts, one after the other in these processes, raises."""
    raised = []
    for cfg in cfgs:
        try:
            train_rank(cfg)
            raised.append(("", ""))
        except Exception as error:
            raised.append((type(error).__name__, str(error)))
    return raised


def refused(*cfgs) -> list[str]:
    """What every rank of each run raises at its start, in the same words; one of them at least as an error of its
    own."""
    messages = []
    for ranks in zip(*run_ranks(_refused, 2, cfgs), strict=True):
        kinds, (one, other) = zip(*ranks, strict=True)
        assert one == other and set(kinds) <= {"UserError", "ConfigError", "DamagedCheckpoint", "PeersError"}, ranks
        assert set(kinds) != {"PeersError"}, ranks
        messages.append(one)
    return messages


OTHERS = {
    ("checkpoint.resume", "modules.images.encoder.hidden_size=48"): "modules.images.encoder.hidden_size was 32, is 48",
    ("checkpoint.weights", "modules.images.encoder.activation=relu"): "activation was gelu, is relu",
}
"""By the key that names the checkpoint and what differs from its config, what a start says."""

TENSORS = {
    "modules.images.encoder.hidden_size=48": ("images", "has shape"),
    "modules.language.llm.ffn_hidden_size=48": ("language", "has shape", "(128, 32) there and (96, 32) here"),
    "modules.language.llm.num_layers=3": ("language decoder.layers.2.", "is not in it", "and 11 more"),
    "modules.language.llm.tie_embeddings=true": ("language", "output_layer.weight has no place in this one"),
    "modules.images.lora.rank=2": (
        "lora_a is not in it",
        "an earlier version had no adapters there",
        "checkpoint.weights=",
    ),
    "modules.language.lora.rank=0": ("lora_a has no place in this one", "and 13 more", "modules.*.lora"),
}
"""Where the config is the same, and the tensors are not: a changed model (`pre_wrap_hook`), another version."""

TYPES = {
    "train_state": ({"step": "2"}, "TypeError: step is '2'"),
    "schedulers": ({"num_steps": 2.5}, "TypeError: num_steps is 2.5"),
    "optimizer": ({"freeze_until": {}, "updates": [2], "updates_before": []}, "TypeError: updates is [2]"),
}
"""Values that no run writes, in a record whose marker is right."""

LOCKED = "another run"
WEIGHTS = "damaged weights"


@pytest.fixture(scope="module")
def other_models(whole, digits, tmp_path_factory) -> dict:
    """What a start of another model says."""
    runs = tmp_path_factory.mktemp("other")
    folder = folders.newest(whole)

    def start(name: str, *overrides: str):
        return config("vlm_digits", runs / name, digits, *MODEL, "train.iters=4", *overrides)

    cfgs = {case: start("run", case[1], f"{case[0]}={folder}") for case in OTHERS}
    for number, case in enumerate(TENSORS):
        shutil.copytree(whole, runs / str(number))
        cfgs[case] = start(str(number), case)
        copy = folders.newest(runs / str(number))
        record = folders.read_record(copy) | {"config": compose.to_dict(cfgs[case])}
        write_record(copy, record)
    for name, (value, _) in TYPES.items():
        shutil.copytree(whole, runs / name)
        cfgs[name] = start(name)
        copy = folders.newest(runs / name)
        write_record(copy, folders.read_record(copy) | {name: value})
    shutil.copytree(whole, runs / WEIGHTS)
    flip(next(folders.newest(runs / WEIGHTS).glob("rank_00001.*")))
    cfgs[WEIGHTS] = start("new", f"checkpoint.weights={runs / WEIGHTS}")
    (runs / LOCKED).mkdir()
    cfgs[LOCKED] = start(LOCKED)
    lock = RunLock(runs / LOCKED)
    said = refused(*cfgs.values())
    lock.close()
    return dict(zip(cfgs, said, strict=True))


@pytest.mark.parametrize(("key", "override"), OTHERS)
def test_a_checkpoint_of_another_model_is_named(key, override, whole, other_models):
    """With the keys that differ, before a file of it is read."""
    message = other_models[key, override]
    assert message.startswith(f"{key}: checkpoint {folders.newest(whole)} is of another model: ")
    assert OTHERS[key, override] in message
    assert "give the config that it was saved with" in message


@pytest.mark.parametrize("override", TENSORS)
def test_tensors_that_do_not_fit_are_named(override, other_models):
    """Also where they are those of one module only, so that the ranks of the other have no fault of their own; and
    those of a checkpoint that would be dropped."""
    message = other_models[override]
    assert message.startswith("checkpoint ") and " is of another model: " in message
    assert [word for word in TENSORS[override] if word not in message] == [], message
    assert "give the config that it was saved with" in message or "begin a new run with its weights" in message


@pytest.mark.parametrize("name", TYPES)
def test_values_of_other_types_are_damage(name, other_models):
    assert f"is damaged: {folders.RECORD} holds other values than a run writes ({TYPES[name][1]})" in other_models[name]


def test_damaged_weights_of_another_run_are_named(other_models):
    """On all ranks, with file, tensors and reason; nothing is set aside, since they were chosen."""
    said = other_models[WEIGHTS]
    assert re.search(r"step_00000002 is damaged: rank_00001\.safetensors .*between bytes \d+ and \d+: .*language", said)
    (folder,) = (Path(said.split("checkpoint ")[1].split(" is damaged")[0]).parent).iterdir()
    assert folder.name == "step_00000002"


def test_a_second_run_in_a_folder_is_named(other_models):
    assert (
        other_models[LOCKED].startswith("run.dir: ") and f"in use by process {os.getpid()} on " in other_models[LOCKED]
    )


def test_what_was_frozen_has_no_moments(whole, digits, tmp_path):
    """Of a pattern it shows when the model is built; a part is refused by its key before."""
    overrides = ("train.iters=2", "modules.images.freeze=['encoders.*']")
    train_on_ranks(config("vlm_digits", tmp_path, digits, LAYOUT, *overrides))
    (message,) = refused(config("vlm_digits", tmp_path, digits, LAYOUT, "train.iters=4"))
    assert "trained other parameters, or with another optim.name: " in message and "has no exp_avg in it" in message
    assert "checkpoint.weights=" in message


def test_export_names_damaged_tensors_and_leaves_nothing(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    folder = folders.newest(tmp_path / "run")
    for file in folder.glob("rank_*.safetensors"):
        flip(file)
    out = tmp_path / "out"
    ((code, said),) = run_ranks(command, 1, ["export", str(folder), "--merge", "--to", str(out)])
    assert code == 1 and not out.exists()
    assert f"\nerror: checkpoint {folder} is damaged: rank_0000" in said

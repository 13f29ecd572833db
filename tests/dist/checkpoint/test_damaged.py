"""A checkpoint that cannot be loaded ends every rank with an error that names its folder, the reason and a remedy."""

import json
import os
import shutil
from pathlib import Path

import pytest

from mimo_train.checkpoint import folders
from mimo_train.config import compose
from mimo_train.launch.run_lock import RunLock
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, train_on_ranks, train_rank

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
        assert one == other and set(kinds) <= {"UserError", "ConfigError", "PeersError"}, ranks
        assert set(kinds) != {"PeersError"}, ranks
        messages.append(one)
    return messages


def missing(name: str):
    def spoil(folder: Path) -> str:
        (folder / name).unlink()
        return name

    return spoil


def written(name: str, text: str):
    def spoil(folder: Path) -> str:
        (folder / name).write_text(text)
        return name

    return spoil


def without_step(folder: Path) -> str:
    record = folders.read_record(folder)
    del record["layout"]
    folders.write_record(folder, record)
    return f"{folders.RECORD} has no layout"


def of_a_rank(change):
    """Changes the tensors that one rank has written."""

    def spoil(folder: Path) -> str:
        file = sorted(folder.glob("*.distcp"))[-1]
        change(file)
        return file.name

    return spoil


def truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "no metadata.json": missing("metadata.json"),
    "broken metadata.json": written("metadata.json", "{"),
    "no .metadata": missing(".metadata"),
    "broken .metadata": written(".metadata", "no pickle"),
    "no tensors": of_a_rank(Path.unlink),
    "truncated tensors": of_a_rank(truncate),
    "one bit": of_a_rank(flip),
    "no hashes": missing("integrity.json"),
    "broken hashes": written("integrity.json", "["),
    "other hashes": written("integrity.json", "[]"),
    "broken record": written(folders.RECORD, "{"),
    "other record": written(folders.RECORD, "[]"),
    "short record": without_step,
}


@pytest.fixture(scope="module")
def starts(whole, digits, tmp_path_factory) -> dict[str, tuple[Path, str, str]]:
    """Of each damage the checkpoint, what is damaged in it, and what a start says."""
    runs = tmp_path_factory.mktemp("damaged")
    found = {}
    for damage, spoil in DAMAGES.items():
        shutil.copytree(whole, runs / damage)
        folder = folders.newest(runs / damage)
        found[damage] = folder, spoil(folder)
    said = refused(*(config("vlm_digits", runs / damage, digits, *MODEL, "train.iters=4") for damage in DAMAGES))
    return {damage: (*found[damage], message) for damage, message in zip(DAMAGES, said, strict=True)}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named(damage, starts):
    folder, named, message = starts[damage]
    assert f"checkpoint {folder} is damaged: " in message
    assert named in message
    assert "remove this folder" in message and "checkpoint.resume" in message
    assert folder.is_dir(), "nothing is removed by itself"


OTHERS = {
    ("checkpoint.resume", "modules.images.encoder.hidden_size=48"): "modules.images.encoder.hidden_size was 32, is 48",
    ("checkpoint.resume", "modules.language.llm.num_attention_heads=2"): "num_attention_heads was 4, is 2",
    ("checkpoint.resume", "modules.language.lora.alpha=100"): "modules.language.lora.alpha was 16.0, is 100.0",
    ("checkpoint.weights", "modules.language.lora.rank=0"): "rank was 2, is 0, so that its adapters would be lost",
    ("checkpoint.weights", "modules.images.encoder.activation=relu"): "activation was gelu, is relu",
}
"""By the key that names the checkpoint and what differs from its config, what a start says."""

TENSORS = {
    "modules.images.encoder.hidden_size=48": ("images", "has shape"),
    "modules.language.llm.ffn_hidden_size=48": ("language", "has shape", "(2, 128, 32) there and (2, 96, 32) here"),
    "modules.language.llm.num_layers=3": ("language", "has shape (2, ", "and (3, "),
    "modules.images.encoder.class_token=true": ("images", "class_token is not in it"),
    "modules.language.llm.tie_embeddings=true": ("language_model", "output_layer.weight has no place in this one"),
    "modules.language.lora.rank=0": ("lora_a has no place in this one", "and 13 more", "modules.*.lora"),
}
"""Where the config is the same, and the tensors are not: a changed model (`pre_wrap_hook`), another version."""

TEXT = "another tokenizer"
LOCKED = "another run"


@pytest.fixture(scope="module")
def other_models(whole, digits, tmp_path_factory) -> dict:
    """What a start of another model says."""
    runs = tmp_path_factory.mktemp("other")
    folder = folders.newest(whole)

    def start(name: str, *overrides: str):
        return config("vlm_digits", runs / name, digits, *MODEL, "train.iters=4", *overrides)

    cfgs = {case: start("run", case[1], f"{case[0]}={folder}") for case in OTHERS}
    for number, case in enumerate((*TENSORS, TEXT)):
        shutil.copytree(whole, runs / str(number))
        cfgs[case] = start(str(number), *([case] if case in TENSORS else []))
        copy = folders.newest(runs / str(number))
        record = folders.read_record(copy) | {"config": compose.to_dict(cfgs[case])}
        folders.write_record(copy, record | ({"text_fingerprint": "0123"} if case == TEXT else {}))
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
    assert "give the config that it was saved with" in message


def test_a_checkpoint_of_another_tokenizer_is_named(other_models):
    assert other_models[TEXT].startswith(
        "data.tokenizer: tokenizer, chat template or placeholders are not those of checkpoint "
    )
    assert "was 0123" in other_models[TEXT]


def test_a_second_run_in_a_folder_is_named(other_models):
    assert (
        other_models[LOCKED].startswith("run.dir: ") and f"in use by process {os.getpid()} on " in other_models[LOCKED]
    )


def test_what_was_frozen_has_no_moments(whole, digits, tmp_path):
    """Another run than the one that the optimizer's state is of."""
    overrides = ("train.iters=2", "modules.images.freeze=[encoder]")
    train_on_ranks(config("vlm_digits", tmp_path, digits, LAYOUT, *overrides))
    (message,) = refused(config("vlm_digits", tmp_path, digits, LAYOUT, "train.iters=4"))
    assert "trained other parameters: " in message and "is not in it" in message
    assert "checkpoint.weights=" in message


def test_generate_names_a_damaged_checkpoint(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    folder = folders.newest(tmp_path / "run")
    (folder / folders.RECORD).write_text(json.dumps({"step": 2}))
    ((code, said),) = run_ranks(_generate, 1, str(folder))
    assert code == 1
    assert said.startswith(f"error: checkpoint {folder} is damaged: {folders.RECORD} has no config")


def _generate(folder: str) -> tuple[int, str]:
    import contextlib
    import io

    from mimo_train.cli import main

    with contextlib.redirect_stderr(io.StringIO()) as said:
        return main(["generate", folder, "--prompt", "Hello"]), said.getvalue()

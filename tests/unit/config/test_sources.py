"""YAML of a run is data: nothing in it is imported, called or taken from the environment, and its size is bounded."""

import os
import sys

import pytest

from mimo_train.config import compose
from mimo_train.config.errors import ConfigError

BOMB = "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def faults(config, *overrides):
    with pytest.raises(ConfigError) as raised:
        compose.load(str(config), overrides)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "more than 100000 values, aliases written out"),
        ("run: {dir: " + "[" * 3000 + "]" * 3000 + "}\n", "more than 50 mappings and lists inside each other"),
        ("run: &a {dir: [*a]}\n", "the alias *a stands inside of what it stands for"),
        ("run: {dir: '${oc.env:HOME}'}\n", "run.dir: is '${oc.env:HOME}', and a config calls nothing"),
        ("data: {shards: 'x-${oc.env:SECRET,none}.tar'}\n", "data.shards: is"),
        ("data: {shards: '${oc.${run.dir}:HOME}'}\nrun: {dir: env}\n", "data.shards: is"),
        ("data: {shards: '${${run.dir}:HOME}'}\nrun: {dir: oc.env}\n", "data.shards: is"),
        ("hydra: {searchpath: ['pkg://hostile_package']}\n", "hydra: keys of Hydra itself"),
        ("run: !!python/object/apply:os.system ['touch ran']\n", "could not determine a constructor"),
    ],
)
def test_a_file_that_is_more_than_data_is_a_fault(tmp_path, monkeypatch, text, said):
    (tmp_path / "hostile_package.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SECRET", "hidden")
    (tmp_path / "run.yaml").write_text("defaults: [vlm_digits, _self_]\n" + text)
    found = faults("run.yaml")
    assert said in found and "hidden" not in found and os.environ["HOME"] not in found.replace(str(tmp_path), "")
    assert not (tmp_path / "ran").exists() and "hostile_package" not in sys.modules


def test_a_file_of_a_group_is_looked_at_too(tmp_path):
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "bomb.yaml").write_text(BOMB)
    (tmp_path / "run.yaml").write_text("defaults: [vlm_digits, {override optim: bomb}, _self_]\n")
    assert "bomb.yaml: has more than" in faults(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text("defaults: [vlm_digits, _self_]\n")
    assert "bomb.yaml: has more than" in faults(tmp_path / "run.yaml", "optim=bomb")


def test_overrides_are_looked_at_too():
    found = faults("vlm_digits", "run.dir=" + "[" * 3000, "data.shards=[&a [1], *b]", "hydra.searchpath=[pkg://x]")
    assert "run.dir: has more than 50" in found and "data.shards: the alias *b" in found and "hydra.searchpath" in found
    assert "run.dir: is '${oc.env:HOME}'" in faults("vlm_digits", "run.dir=${oc.env:HOME}")


def test_names_of_keys_may_still_be_interpolated():
    assert compose.load("vlm_digits", ["run.dir=runs/${run.seed}"]).run.dir == "runs/1234"

"""YAML of a run is data: nothing in it is imported, called or taken from the environment."""

import os
import sys

import pytest

from mimo_train.config import compose
from mimo_train.config.errors import ConfigError


def faults(config, *overrides):
    with pytest.raises(ConfigError) as raised:
        compose.load(str(config), overrides)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: {dir: '${oc.env:HOME}'}\n", "run.dir: is '${oc.env:HOME}', but a config cannot call anything"),
        ("data: {shards: 'x-${oc.env:SECRET,none}.tar'}\n", "data.shards: is"),
        ("data: {shards: '${oc.${run.dir}:HOME}'}\nrun: {dir: env}\n", "data.shards: is"),
        ("data: {shards: '${${run.dir}:HOME}'}\nrun: {dir: oc.env}\n", "data.shards: is"),
        ("hydra: {searchpath: ['pkg://hostile_package']}\n", "run.yaml: a run cannot set keys of Hydra"),
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


def test_overrides_are_looked_at_too():
    assert "run.dir: is '${oc.env:HOME}'" in faults("vlm_digits", "run.dir=${oc.env:HOME}")
    assert "hydra: unknown key" in faults("vlm_digits", "hydra.searchpath=[pkg://x]")


def test_names_of_keys_may_still_be_interpolated():
    assert compose.load("vlm_digits", ["run.dir=runs/${run.seed}"]).run.dir == "runs/1234"

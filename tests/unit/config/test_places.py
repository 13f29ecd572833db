"""Keys with paths: URLs only where they can be read or written, and no URL that is taken for a folder."""

import pytest

from mimo_train.config.compose import load
from mimo_train.config.errors import ConfigError
from mimo_train.layout.run import resolve


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
        resolve(load("vlm_digits", (override,)))
    assert "secret" not in str(raised.value)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr("mimo_train.config.paths.is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"requires the extra `remote` \(obstore is not installed\): run `pip"):
        resolve(load("vlm_digits", ("checkpoint.dir=s3://bucket/run",)))


def test_places_that_can_be():
    for override in ("checkpoint.dir=s3://bucket/run", "checkpoint.resume=https://host/step_00000004"):
        assert resolve(load("vlm_digits", (override,)))
    run = resolve(load("vlm_digits", ("checkpoint.dir=s3://bucket/run/",)))
    assert str(run.checkpoints) == "s3://bucket/run" and str(run.dir) == run.cfg.run.dir
    assert resolve(load("vlm_digits")).checkpoints == run.dir

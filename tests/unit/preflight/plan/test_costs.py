"""A profile is read as it was written, and other files are rejected by name."""

import pytest

from mimo_train.config.errors import UserError
from mimo_train.preflight.plan.costs import LayerCost, Profile, read_profile

COSTS = [
    LayerCost("language", 1, 512, 1e9, 2e9, 0.5, 1.0),
    LayerCost("language", 8, 512, 1e9, 2e9, 1.0, 4.0),
    LayerCost("images", 1, 72, 1e8, 2e8, 0.1, 0.2),
]
PROFILE = Profile("cpu", "fp32", COSTS)


def test_a_profile_is_read_as_it_was_written(tmp_path):
    PROFILE.write(tmp_path / "costs.json")
    assert read_profile(tmp_path / "costs.json", ["images", "language"], "fp32") == PROFILE


def test_a_profile_that_cannot_be_written_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="--profile: cannot write .*: give another name"):
        PROFILE.write(tmp_path / "none" / "costs.json")


def test_the_nearest_measured_tp_counts():
    assert PROFILE.rates("language", 1) == PROFILE.rates("language", 2) == (2e9, 2e9)
    assert PROFILE.rates("language", 4) == PROFILE.rates("language", 8) == (1e9, 0.5e9)


@pytest.mark.parametrize(
    ("change", "modules", "precision", "words"),
    [
        (lambda text: text, ["audio"], "fp32", "has no costs of audio"),
        (lambda text: text, ["images"], "bf16", "was measured in fp32, and train.precision is bf16"),
        (lambda text: text[:-9], ["images"], "fp32", "is no profile"),
        (
            lambda text: text.replace('"version": 1', '"version": 2'),
            ["images"],
            "fp32",
            "expected an object with version 1",
        ),
        (
            lambda text: text.replace("0.5", "-0.5"),
            ["images"],
            "fp32",
            "forward_seconds of language must be above 0, is -0.5",
        ),
        (lambda text: text.replace('"tokens"', '"token"', 1), ["images"], "fp32", "layers[0].token: unknown key"),
        (lambda text: text.replace('"device"', '"devices"'), ["images"], "fp32", "profile.devices: unknown key"),
        (lambda text: f"[{text}]", ["images"], "fp32", "expected an object with version 1"),
        (
            lambda text: text.replace('"layers": [', '"layers": [3, '),
            ["images"],
            "fp32",
            "layers[0]: must be a mapping",
        ),
        (lambda text: '{"version": 1, "device": "", "precision": "", "layers": {}}', [], "", "layers: must be a list"),
    ],
)
def test_what_is_no_profile_of_this_run_is_refused(tmp_path, change, modules, precision, words):
    file = tmp_path / "costs.json"
    PROFILE.write(file)
    file.write_text(change(file.read_text()))
    with pytest.raises(UserError) as error:
        read_profile(file, modules, precision)
    assert words in str(error.value) and "--measure" in str(error.value)


def test_a_profile_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read .*: make it with --measure"):
        read_profile(tmp_path / "none.json", ["language"], "fp32")

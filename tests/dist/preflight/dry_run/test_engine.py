"""Layers of Transformer Engine, by a stand-in: every keyword that Megatron-Core gives is one that they have, shapes
fit, and the ranks of several layouts train and save."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.preflight.dry_run.engine_runs import DEFAULT, RUNS, WITHIN_OTHERS
from tests.hang import HANG_SECONDS

ROOT = str(Path(__file__).resolve().parents[4])
NAMES = tuple(RUNS) if os.environ.get("MIMO_ALL_LAYOUTS") else DEFAULT


@pytest.fixture(scope="module")
def found(digits, prose, tmp_path_factory):
    """What each run found; by a process of its own: Megatron-Core looks for Transformer Engine as it is imported."""
    command = [
        sys.executable,
        "-m",
        "tests.dist.preflight.dry_run.engine_runs",
        digits,
        prose,
        tmp_path_factory.mktemp("engine"),
    ]
    done = subprocess.run(
        [*map(str, command), *NAMES],
        env=os.environ | {"PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_ranks_with_layers_of_transformer_engine_train_and_save(found, name):
    one = found[name]
    assert not one["failed"], one["failed"]
    assert one["flops"] > 0 and one["saved"] > 0
    if name not in WITHIN_OTHERS:
        assert any("extensions/transformer_engine.py" in line for line in one["lines"]), one["lines"]


def test_a_keyword_that_a_layer_does_not_have_is_refused():
    from mimo_train.preflight.dry_run import fake_engine

    with pytest.raises(TypeError, match="unknown_option"):
        fake_engine.DotProductAttention(4, 8, unknown_option=True)
    with pytest.raises(TypeError, match="unknown_option"):
        fake_engine.LayerNormLinear(4, 8, device="cpu", unknown_option=True)

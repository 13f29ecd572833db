"""Steps with fp8, by the stand-in for Transformer Engine, which rounds nothing: what is around its products (rows that
are added, copies of weights, recomputation) changes no number."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hang import HANG_SECONDS

ROOT = str(Path(__file__).resolve().parents[4])


@pytest.fixture(scope="module")
def curves(digits, tmp_path_factory):
    """Loss and gradient norm of every step, and losses of evaluations, of each run."""
    command = [
        sys.executable,
        "-m",
        "tests.dist.preflight.dry_run.engine_curves",
        digits,
        tmp_path_factory.mktemp("fp8"),
    ]
    done = subprocess.run(
        [*map(str, command)],
        env=os.environ | {"PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(found.values()), done.stderr
    return {name: [number for line in lines for number in line] for name, lines in found.items()}


@pytest.mark.parametrize(
    ("name", "plain"),
    [("both", "none"), ("images", "none"), ("both, packed, recomputed", "none, packed")],
)
def test_steps_with_fp8_that_rounds_nothing_are_those_without(curves, name, plain):
    assert len(curves[name]) == 10, "four steps and two evaluations"
    assert curves[name] == pytest.approx(curves[plain], rel=1e-5)


@pytest.mark.parametrize("name", ["images", "text"])
def test_copies_that_nobody_renews_are_seen_in_the_numbers(curves, name):
    """That the test above can fail. Megatron-Core renews those of the language model as a step begins."""
    stale = curves[f"{name}, copies of the first step"]
    same = stale == pytest.approx(curves["none"], rel=1e-5)
    assert same == (name == "text")

"""Layers of Transformer Engine, by a fake: it has every keyword that it gets, shapes fit, ranks of several layouts
train, and what surrounds fp8 matmuls (rows that are added, copies of weights, recomputation) changes no number."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tests import fake_engine
from tests.dist.models.engine_runs import DEFAULT, RANKS, WITHIN_OTHERS
from tests.hang import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[3]
NAMES = tuple(RANKS) if os.environ.get("MIMO_ALL_LAYOUTS") else DEFAULT


@pytest.fixture(scope="module")
def results(digits, prose, tmp_path_factory):
    """The output of a new process: Megatron-Core looks for Transformer Engine as it is imported."""
    arguments = [digits, prose, tmp_path_factory.mktemp("engine"), *NAMES]
    command = [sys.executable, "-m", "tests.dist.models.engine_runs", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_ranks_with_layers_of_transformer_engine_train(results, name):
    rank = results["ranks"][name]
    assert not rank["failed"], rank["failed"]
    assert rank["flops"] > 0
    if name not in WITHIN_OTHERS:
        assert any("extensions/transformer_engine.py" in line for line in rank["lines"]), rank["lines"]


@pytest.mark.parametrize(
    ("name", "plain"),
    [("both", "none"), ("images", "none"), ("both, packed, recomputed", "none, packed")],
)
def test_steps_with_fp8_that_rounds_nothing_are_those_without(results, name, plain):
    curves = results["curves"]
    assert len(curves[name]) == 10, "four steps and two evaluations"
    assert curves[name] == pytest.approx(curves[plain], rel=1e-5)


@pytest.mark.parametrize("name", ["images", "text"])
def test_stale_copies_of_weights_change_the_numbers(results, name):
    """The test above can fail. Megatron-Core renews the copies of the language model as a step begins."""
    curves = results["curves"]
    stale = curves[f"{name}, copies of the first step"]
    same = stale == pytest.approx(curves["none"], rel=1e-5)
    assert same == (name == "text")


def test_the_fake_is_as_strict_as_the_real_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (package,) = [each for each in extras["gpu"] if each.startswith("transformer-engine")]
    assert package.partition("==")[2] == fake_engine.VERSION == "2.20.2"
    for layer in (fake_engine.DotProductAttention, fake_engine.LayerNormLinear):
        with pytest.raises(TypeError, match="unknown_option"):
            layer(4, 8, device="cpu", unknown_option=True)


def _row(**changes):
    ends = torch.tensor([0, 3, 8], dtype=changes.pop("ends", torch.int32))
    part = torch.randn(8, 4, 16)
    attention = fake_engine.DotProductAttention(4, 16)
    return attention(
        part, part, part, None, **{"attn_mask_type": "padding_causal", "qkv_format": "thd"} | changes,
        cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=5, max_seqlen_kv=5,
    )  # fmt: skip


def test_a_packed_row_is_rejected_where_the_kernels_reject_it():
    assert _row().shape == (8, 64)
    for change in ({"ends": torch.int64}, {"attn_mask_type": "causal"}, {"qkv_format": "sbhd"}, {"documents": None}):
        with pytest.raises(AssertionError):
            _row(**change)


def test_experts_get_whole_units_of_rows_and_give_theirs_back():
    rows = torch.arange(10.0)[:, None].repeat(1, 16)
    padding, back = fake_engine.Fp8Padding(3), fake_engine.Fp8Unpadding(3)
    for recipe, unit in ((fake_engine.Float8CurrentScaling, 16), (fake_engine.MXFP8BlockScaling, 32)):
        with fake_engine.fp8_autocast(fp8_recipe=recipe(fp8_format="e4m3")):
            padded, splits = padding(rows, [3, 0, 7])
            assert splits == [unit, 0, unit] and padded[3:unit].abs().sum() == 0
            assert torch.equal(back(padded, [3, 0, 7]), rows)

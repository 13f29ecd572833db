"""The fake Transformer Engine takes no keyword that version 2.20.2 lacks: the real one would fail in the first step on
a GPU."""

import inspect
import tomllib
from pathlib import Path

import pytest
import torch

from mimo_train.preflight.dry_run import fake_engine, fake_fp8

ROOT = Path(__file__).resolve().parents[4]

LINEAR = """in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker
    rng_tracker_name init_method bias return_bias params_dtype parallel_mode parameters_split device ub_overlap_ag
    ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute symmetric_ar_type
    save_original_input name"""
REAL = {
    "Linear": LINEAR,
    "LayerNormLinear": LINEAR.replace("rng_tracker_name", "").replace("save_original_input", "")
    + " eps normalization return_layernorm_output return_layernorm_output_gathered zero_centered_gamma",
    "GroupedLinear": """num_gemms in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size
    get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype parallel_mode device ub_overlap_rs
    ub_overlap_ag ub_name delay_wgrad_compute save_original_input single_grouped_weight single_grouped_bias name
    use_grouped_tensor""",
    "DotProductAttention": """num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type
    window_size bottom_right_diagonal softcap sequence_parallel tp_size get_rng_state_tracker tp_group layer_number
    attention_type cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale softmax_type return_max_logit name""",
    "LayerNorm": "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma hidden_size device dtype",
    "RMSNorm": "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma hidden_size device dtype",
}
"""Keywords of its constructors, as released (transformer_engine/pytorch/module/, attention/)."""
PASS = """query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded
    cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size bottom_right_diagonal softcap
    checkpoint_core_attention core_attention_bias_type core_attention_bias alibi_slopes fast_zero_fill inference_params
    pad_between_seqs fp8_output num_splits"""
"""Keywords of a forward pass of its attention."""


def test_the_stand_in_is_of_the_version_that_is_installed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (package,) = [each for each in extras["gpu"] if each.startswith("transformer-engine")]
    assert package.partition("==")[2] == fake_engine.VERSION == "2.20.2"


@pytest.mark.parametrize("name", REAL)
def test_a_constructor_has_keywords_of_the_real_one_alone(name):
    layer = getattr(fake_engine, name)
    positional = set(inspect.signature(layer.__init__).parameters) - {"self", "options"}
    taken = positional | layer.OPTIONS.keys()
    assert len(taken) > 3 and not taken - {*REAL[name].split()}


def test_a_pass_of_attention_has_keywords_of_the_real_one_alone():
    assert {*fake_engine.PACKED} < {*PASS.split()}


def row(**changes):
    ends = torch.tensor([0, 3, 8], dtype=changes.pop("ends", torch.int32))
    part = torch.randn(8, 4, 16)
    attention = fake_engine.DotProductAttention(4, 16)
    return attention(
        part, part, part, None, **{"attn_mask_type": "padding_causal", "qkv_format": "thd"} | changes,
        cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=5, max_seqlen_kv=5,
    )  # fmt: skip


def test_a_packed_row_is_refused_where_the_kernels_refuse_it():
    assert row().shape == (8, 64)
    for change in ({"ends": torch.int64}, {"attn_mask_type": "causal"}, {"qkv_format": "sbhd"}, {"documents": None}):
        with pytest.raises(AssertionError):
            row(**change)


def test_experts_get_whole_units_of_rows_and_give_theirs_back():
    rows = torch.arange(10.0)[:, None].repeat(1, 16)
    padding, back = fake_fp8.Fp8Padding(3), fake_fp8.Fp8Unpadding(3)
    for recipe, unit in ((fake_fp8.Float8CurrentScaling, 16), (fake_fp8.MXFP8BlockScaling, 32)):
        with fake_fp8.fp8_autocast(fp8_recipe=recipe(fp8_format="e4m3")):
            padded, splits = padding(rows, [3, 0, 7])
            assert splits == [unit, 0, unit] and padded[3:unit].abs().sum() == 0
            assert torch.equal(back(padded, [3, 0, 7]), rows)

"""Directories of Qwen-VL: config.json as on the hub and as both versions of `transformers` write it."""

import json

import pytest

from mimo_train.config.compose import load
from mimo_train.config.errors import ConfigError
from mimo_train.config.pretrained.fill_in import changed_choices
from mimo_train.layout.run import config_faults

LANGUAGE = {
    "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 80,
    "num_hidden_layers": 3, "vocab_size": 411, "rope_theta": 5000.0, "use_sliding_window": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]},
}  # fmt: skip
VISION = {
    "depth": 3, "hidden_size": 48, "num_heads": 4, "intermediate_size": 60, "in_chans": 3, "patch_size": 6,
    "spatial_merge_size": 2, "window_size": 24, "fullatt_block_indexes": [1], "out_hidden_size": 48,
}  # fmt: skip
FLAT = {"model_type": "qwen2_5_vl", **LANGUAGE, "vision_config": VISION, "tie_word_embeddings": True}
ROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 2, 1]}
NESTED = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        **{key: value for key, value in LANGUAGE.items() if not key.startswith("rope")},
        "model_type": "qwen2_5_vl_text",
        "rope_parameters": ROPE,
        "tie_word_embeddings": True,
    },
    "vision_config": VISION | {"model_type": "qwen2_5_vl_vision"},
}


def composed(tmp_path, config: dict, *overrides: str, of_all: bool = True):
    (tmp_path / "vl").mkdir(exist_ok=True)
    (tmp_path / "vl" / "config.json").write_text(json.dumps(config))
    keys = ["pretrained"] if of_all else ["modules.images.pretrained"]
    own = (*(f"{key}={tmp_path / 'vl'}" for key in keys), "data.sequence_length=2000", "data.tokenizer=bytes")
    return load("vlm_digits", [*own, *overrides])


def test_all_spellings_are_one_model(tmp_path):
    flat, nested = (composed(tmp_path, config) for config in (FLAT, NESTED))
    assert flat == nested
    llm, images = flat.llm, flat.modules["images"]
    assert (llm.mrope_section, llm.tie_embeddings, llm.qkv_bias, llm.rope_base) == ([1, 2, 1], True, True, 5000)
    assert (images.encoder.family, images.encoder.window_size, images.encoder.full_attention) == ("qwen_vit", 24, [1])
    assert (images.projector.ffn_hidden_size, images.projector.merge) == (192, 2)
    assert (images.placeholder.pad, images.placeholder.start) == ("<|image_pad|>", "<|vision_start|>")


def test_placeholders_are_those_of_the_language_model(tmp_path):
    alone = composed(tmp_path, FLAT, of_all=False)
    assert alone.modules["images"].placeholder.pad == "", "another language model has other tokens"
    given = composed(tmp_path, FLAT, "modules.images.placeholder.start=<begin>")
    assert (given.modules["images"].placeholder.start, given.modules["images"].placeholder.pad) == (
        "<begin>",
        "<|image_pad|>",
    )


def test_what_the_directory_contradicts_is_a_fault(tmp_path):
    with pytest.raises(ConfigError, match=r"mrope_section: is \[2, 1, 1\], and .* makes it \[1, 2, 1\]"):
        composed(tmp_path, FLAT, "modules.language.llm.mrope_section=[2,1,1]")


QWEN3 = {
    "model_type": "qwen3_vl",
    "text_config": {
        **{key: value for key, value in LANGUAGE.items() if not key.startswith("rope")},
        "head_dim": 8,
        "rope_parameters": ROPE | {"mrope_interleaved": True},
    },
    "vision_config": {
        "depth": 3, "hidden_size": 48, "num_heads": 4, "intermediate_size": 60, "patch_size": 6, "out_hidden_size": 48,
        "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2],
    },
}  # fmt: skip


def faults(cfg) -> list[str]:
    return [fault.key for fault in config_faults(cfg)]


def test_features_for_layers_need_these_layers_on_the_first_stage(tmp_path):
    keys = ("modules.images.encoder.max_pixels=60000", "modules.images.encoder.min_pixels=100")
    whole = composed(tmp_path, QWEN3, *keys)
    encoder = whole.modules["images"].encoder
    assert (encoder.deepstack, encoder.deepstack_width, encoder.position_grid) == ([0, 2], 48, (5, 5))
    assert faults(whole) == []
    assert faults(composed(tmp_path, QWEN3, *keys, "modules.language.layout.pp=3")) == ["modules.language.layout.pp"]
    assert faults(composed(tmp_path, QWEN3, *keys, "modules.images.layout.pp=2")) == ["modules.images.layout.pp"]
    wider = QWEN3 | {"vision_config": QWEN3["vision_config"] | {"out_hidden_size": 64}}
    assert faults(composed(tmp_path, wider, *keys)) == ["modules.images.encoder.deepstack_width"]


def test_what_an_export_reads_otherwise_than_the_run_is_told(tmp_path):
    """The files of an export are those of the directory."""
    unchanged = composed(tmp_path, QWEN3)
    assert [*changed_choices(unchanged, "images")] == [*changed_choices(unchanged, "language")] == []
    most = unchanged.modules["images"].encoder.max_pixels
    (change,) = changed_choices(composed(tmp_path, QWEN3, "modules.images.encoder.max_pixels=60000"), "images")
    assert change == f"modules.images.encoder.max_pixels is 60000 in this run and {most} in the exported files"


def test_others_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="a ovis2 projects features outside of its towers, which is not supported"):
        composed(tmp_path, QWEN3 | {"model_type": "ovis2", "text_config": {}, "vision_config": {}})

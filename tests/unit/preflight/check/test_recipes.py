"""Recipes: each one can start with each layout of its modules, as far as known without data, and its sizes are those of
the models' directories."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mimo_train.config.compose import RECIPES, load, shipped_configs
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.memory import GIB, rank_memory, stage_memory
from mimo_train.estimate.parameters import module_parameters, padded_vocab_size
from mimo_train.layout.run import resolve
from mimo_train.preflight.check import check
from tests.hang import HANG_SECONDS

FOLDER = shipped_configs() / RECIPES
NAMES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
LAYOUTS = sorted(file.stem for file in (FOLDER / "layout").glob("*.yaml"))
GPUS = (8, 64, 512)
OF_A_GPU = 80 * GIB
WORKSPACE = 12 * GIB
"""Memory that the estimate leaves out: workspaces, communication buffers, the CUDA context."""


def layouts_of(name: str) -> dict[int, str]:
    """Return the layouts of the modules of a recipe, by their GPUs."""
    if name == "qwen2_5_vl_sft":  # everything is trained, which does not fit on one GPU
        return {8: "images_8_tp2", 64: "images_64_tp2", 512: "images_512"}
    kind = "images_and_sound" if "audio" in load(f"{RECIPES}/{name}").modules else "images"
    return {gpus: f"{kind}_{gpus}" for gpus in GPUS}


def test_all_are_there():
    assert len(NAMES) >= 6
    assert {layout for name in NAMES for layout in layouts_of(name).values()} == set(LAYOUTS), (
        "each layout is of some recipe"
    )


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_can_start_on_so_many_gpus(name, gpus):
    cfg = load(f"{RECIPES}/{name}", [f"layout={layouts_of(name)[gpus]}"])
    report = check(cfg, without_data=True)
    assert not report.faults and not report.warnings
    # With a tokenizer, which a check without data does not read.
    cfg.data.tokenizer = "bytes"
    run = resolve(cfg)
    assert run.layout.world_size == gpus
    vocab = padded_vocab_size(cfg.llm.vocab_size)
    memory = rank_memory([stage for part in cfg.modules for stage in stage_memory(run, part, vocab)])
    assert max(one.total for one in memory.values()) < OF_A_GPU - WORKSPACE


ALL = {"images": ("encoder", "projector"), "language": ("llm",)}
TRAINED: dict[str, tuple[dict[str, tuple[str, ...]], dict[str, dict[str, int]]]] = {
    "llava_1_5_pretrain": ({"images": ("projector",)}, {}),
    "llava_1_5_finetune": ({"images": ("projector",), "language": ("llm",)}, {}),
    "siglip2_qwen3": (ALL, {"images": {"encoder": 6000}, "language": {"llm": 2000}}),
    "qwen2_5_vl_sft": (ALL, {}),
    "qwen2_5_vl_lora": ({"language": ("adapters",)}, {}),
    "llama_whisper_clip": (
        {"images": ("projector",), "audio": ("projector",), "language": ("llm",)},
        {"language": {"llm": 1000}},
    ),
}
"""The trained parts of each recipe, as the page lists them, and the steps from which some of them are trained."""


@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained_is_what_the_page_says(name):
    cfg = load(f"{RECIPES}/{name}")
    trained, later = TRAINED[name]
    for module, config in cfg.modules.items():
        counts = module_parameters(cfg, module, padded_vocab_size(cfg.llm.vocab_size))
        assert {part for part, count in counts.items() if count.trainable} == set(trained.get(module, ())), module
        assert config.freeze_until == later.get(module, {}), module
        assert all(0 < step < cfg.train.iters for step in config.freeze_until.values())
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `recipes/{name}`"))
    assert set(LAYOUT_OF_ROW.findall(row)) == set(layouts_of(name).values()) or row.endswith("| the same |")


PAGE = Path(__file__).parents[4] / "docs" / "recipes.md"
LAYOUT_OF_ROW = re.compile(r"`(images_\w+)`")


def test_data_that_is_not_there_is_a_fault_of_a_check_with_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        assert {fault.key for fault in check(load(f"{RECIPES}/{name}")).faults} == {"data.tokenizer", "data.shards"}


def test_the_command_needs_neither_data_nor_torch(tmp_path):
    code = (
        "import sys\n"
        "from mimo_train.cli import main\n"
        "for name in sys.argv[1:]:\n"
        "    assert main(['check', f'recipes/{name}', '--without-data']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    path = {"PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run(
        [sys.executable, "-c", code, *NAMES],
        cwd=tmp_path,
        env=path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no faults, without a look at tokenizer, weights and shards\n") == len(NAMES)
    assert not list(tmp_path.iterdir())


LLAMA2 = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
LLAMA3 = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_size": 2560, "intermediate_size": 9728,
    "max_position_embeddings": 40960, "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
CLIP = {
    "model_type": "clip",
    "text_config": {"hidden_size": 768},
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14,
    },
}  # fmt: skip
CLIP_IMAGES = {
    "crop_size": 336, "do_center_crop": True, "do_normalize": True, "do_resize": True, "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD, "resample": 3, "size": 336,
}  # fmt: skip
SIGLIP2 = {
    "model_type": "siglip2",
    "vision_config": {
        "hidden_size": 1152, "intermediate_size": 4304, "model_type": "siglip2_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "num_patches": 256, "patch_size": 16,
    },
}  # fmt: skip
SIGLIP2_IMAGES = {
    "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "max_num_patches": 256, "patch_size": 16, "resample": 2, "rescale_factor": 1 / 255,
}  # fmt: skip
QWEN_VL = {
    "model_type": "qwen2_5_vl", "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "sliding_window": 32768,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
    "vision_config": {
        "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu", "hidden_size": 1280,
        "in_chans": 3, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584, "patch_size": 14,
        "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2, "window_size": 112,
    },
}  # fmt: skip
QWEN_VL_IMAGES = {
    "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "max_pixels": 12845056, "merge_size": 2, "min_pixels": 3136,
    "patch_size": 14, "temporal_patch_size": 2,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "activation_function": "gelu", "d_model": 1280, "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120, "encoder_layers": 32, "max_source_positions": 1500, "num_mel_bins": 128,
}  # fmt: skip
WHISPER_SOUND = {"feature_size": 128, "hop_length": 160, "n_fft": 400, "sampling_rate": 16000}

HUB: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "llava_1_5_pretrain": {"images": (CLIP, CLIP_IMAGES), "language": (LLAMA2, {})},
    "llava_1_5_finetune": {"images": (CLIP, CLIP_IMAGES), "language": (LLAMA2, {})},
    "siglip2_qwen3": {"images": (SIGLIP2, SIGLIP2_IMAGES), "language": (QWEN3, {})},
    "llama_whisper_clip": {
        "images": (CLIP, CLIP_IMAGES),
        "audio": (WHISPER, WHISPER_SOUND),
        "language": (LLAMA3, {}),
    },
    **dict.fromkeys(
        ("qwen2_5_vl_sft", "qwen2_5_vl_lora"),
        {"images": (QWEN_VL, QWEN_VL_IMAGES), "language": (QWEN_VL, QWEN_VL_IMAGES)},
    ),
}
"""The relevant keys of each model's config.json and preprocessor, as on the hub."""


def sizes(cfg: ConfigContainer, name: str) -> dict[str, Any]:
    module = cfg.modules[name]
    spec = module.llm if module.llm is not None else module.encoder
    plain = dataclasses.asdict(spec) | {"name": ""}
    plain |= {"projector": dataclasses.asdict(module.projector) | {"name": ""}} if module.projector is not None else {}
    if module.llm is not None:
        # Two spellings of one size, as below.
        plain |= {"num_query_groups": spec.key_heads, "head_size": spec.head_width}
        plain |= {"attention_scale_size": spec.attention_scale_size or float(spec.head_width)}
    if "shortest_edge" in plain:
        plain["shortest_edge"] = plain["shortest_edge"] or plain["image_size"]
    return plain


@pytest.mark.parametrize("name", NAMES)
def test_directories_of_the_hub_agree_with_what_is_built_in(name, tmp_path):
    overrides = []
    for module, (config, preprocessor) in HUB[name].items():
        folder = tmp_path / module
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        if preprocessor:
            (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
        overrides.append(f"modules.{module}.pretrained={folder}")
    (tmp_path / "language" / "tokenizer.json").write_text("{}")
    built_in, from_hub = load(f"{RECIPES}/{name}"), load(f"{RECIPES}/{name}", overrides)
    assert set(HUB[name]) == set(built_in.modules)
    for module in built_in.modules:
        assert sizes(from_hub, module) == sizes(built_in, module)
    assert from_hub.data.tokenizer == str(tmp_path / "language")

"""`pretrained=DIR` of a LLaVA: keys of config.json that decide tower, projector, language model and placeholder."""

import json
import subprocess
import sys

import pytest

from mimo_train.config.compose import load, to_dict, to_yaml
from mimo_train.config.errors import ConfigError
from mimo_train.config.pretrained.fill_in import pretrained_folders
from tests.unit.config.test_pretrained import LLAMA
from tests.unit.preflight.check.shards import write_weights

TOWER = {
    "model_type": "clip_vision_model", "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 4,
    "num_attention_heads": 6, "image_size": 42, "patch_size": 7,
}  # fmt: skip
LLAVA = {"model_type": "llava", "vision_config": TOWER, "text_config": LLAMA, "image_token_index": 259}
SIGLIP = {"vision_config": TOWER | {"model_type": "siglip_vision_model"}}
REGISTERS = {
    "model_type": "dinov2_with_registers", "hidden_size": 72, "num_hidden_layers": 4, "num_attention_heads": 6,
    "image_size": 42, "patch_size": 7, "num_register_tokens": 2,
}  # fmt: skip
PINPOINTS = [[42, 84], [84, 84]]
NEXT = {"model_type": "llava_next", "image_grid_pinpoints": PINPOINTS}
ONEVISION = {"model_type": "llava_onevision", "image_grid_pinpoints": PINPOINTS, **SIGLIP}
FULL = {"vision_feature_select_strategy": "full"}
TOKENS = {"added_tokens": [{"id": 259, "content": "<image>"}], "model": {"vocab": {"a": 0}}}


@pytest.fixture
def directory(tmp_path):
    """Write a LLaVA with changes; keys that are None are left out."""

    def write(changes=(), tokenizer=TOKENS, **files):
        folder = tmp_path / "my-llava"
        folder.mkdir(exist_ok=True)
        config = {key: value for key, value in {**LLAVA, **dict(changes)}.items() if value is not None}
        for name, content in {"config": config, "tokenizer": tokenizer, **files}.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return folder

    return write


def said(folder, *overrides) -> str:
    with pytest.raises(ConfigError) as error:
        load("vlm_digits", [f"pretrained={folder}", *overrides])
    return str(error.value)


def test_one_key_fills_all_modules(directory):
    folder = directory({"projector_hidden_act": "silu"})
    cfg = load("vlm_digits", [f"pretrained={folder}"])
    encoder, projector = cfg.modules["images"].encoder, cfg.modules["images"].projector
    assert (encoder.family, encoder.feature_layer, encoder.keep_class_token, encoder.final_norm) == (
        *("clip", -2, False, False),
    )
    assert (projector.kind, projector.activation, projector.ffn_hidden_size) == ("mlp", "silu", 0)
    assert (cfg.llm.hidden_size, cfg.llm.vocab_size, cfg.llm.tie_embeddings) == (48, 300, False)
    assert cfg.modules["images"].placeholder.pad == "<image>"
    assert cfg.data.tokenizer == str(folder)
    assert {module.pretrained for module in cfg.modules.values()} == {str(folder)}


@pytest.mark.parametrize(
    ("changes", "layer", "class_token"),
    [
        ({"vision_feature_layer": -1}, -1, False),
        ({"vision_feature_layer": [-3]}, -3, False),
        ({"vision_feature_layer": 4}, -1, False),
        ({"vision_feature_layer": 1, **FULL}, -4, True),
        ({**SIGLIP, **FULL}, -2, False),
    ],
)
def test_layer_and_class_token(directory, changes, layer, class_token):
    encoder = load("vlm_digits", [f"pretrained={directory(changes)}"]).modules["images"].encoder
    assert (encoder.feature_layer, encoder.keep_class_token, encoder.final_norm) == (layer, class_token, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer is [-2, -1], and only one layer can be read"),
        ({"vision_config": REGISTERS}, "the tower has 2 register tokens, which LLaVA would keep in the sequence"),
        ({"vision_feature_layer": 0}, "vision_feature_layer is 0, and the tower has 4 layers"),
        ({"vision_feature_layer": -5}, "vision_feature_layer is -5, and the tower has 4 layers"),
        ({"vision_feature_select_strategy": "cls"}, "is 'cls', must be default or full"),
        (SIGLIP, "has no class token: it would drop a patch"),
        ({"projector_hidden_act": "gelu_fast"}, "projector_hidden_act is 'gelu_fast'"),
        ({"image_token_index": 7}, "has 7 as the id of an image's tokens, and its tokenizer none"),
        ({**NEXT, **FULL}, "is 'full', which keeps the class token, and features of tiles"),
        ({**NEXT, "use_image_newline_parameter": False}, "use_image_newline_parameter is False"),
        ({**ONEVISION, "vision_aspect_ratio": "anyres"}, "is 'anyres', and only anyres_max_N can be built"),
    ],
)
def test_what_cannot_be_built_is_named(directory, changes, words):
    fault = said(directory(changes))
    assert fault.startswith("pretrained: ") and words in fault


def test_tiles(directory):
    cfg = load("vlm_digits", [f"pretrained={directory({**NEXT, 'multimodal_projector_bias': False})}"])
    encoder, projector = cfg.modules["images"].encoder, cfg.modules["images"].projector
    assert (encoder.resize, encoder.grid_pinpoints, encoder.max_tiles, encoder.cut_several, encoder.feature_layer) == (
        *("tiles", PINPOINTS, 0, True, -2),
    )
    assert (projector.newline, projector.bias) == (True, False)
    cfg = load("vlm_digits", [f"pretrained={directory({**ONEVISION, 'vision_aspect_ratio': 'anyres_max_3'})}"])
    encoder = cfg.modules["images"].encoder
    assert (encoder.max_tiles, encoder.cut_several, encoder.feature_layer, encoder.family) == (3, False, -1, "siglip")
    own = {"size": {"height": 42, "width": 42}, "image_grid_pinpoints": PINPOINTS, "do_pad": True}
    folder = directory(ONEVISION, preprocessor_config=own)
    # A preprocessor without values has those of its class.
    assert load("vlm_digits", [f"pretrained={folder}"]).modules["images"].encoder.pixel_mean[0] == 0.48145466
    folder = directory(ONEVISION, preprocessor_config=own | {"image_grid_pinpoints": [[42, 84]]})
    assert "the model would count other tokens than the processor" in said(folder)
    folder = directory(NEXT, preprocessor_config={"size": {"shortest_edge": 48}, "image_grid_pinpoints": PINPOINTS})
    assert "only tiles that are equal squares" in said(folder)


@pytest.mark.parametrize("key", ["pretrained", "modules.images.pretrained", "modules.language.pretrained"])
def test_a_model_of_several_parts_that_transformers_does_not_know_is_named(directory, key):
    folder = directory({"model_type": "internvl_chat"})
    with pytest.raises(ConfigError, match=f"^{key}: {folder}: transformers cannot read .*`internvl_chat`"):
        load("vlm_digits", [f"{key}={folder}"])
    folder = directory({"model_type": "llava", "mm_vision_tower": "openai/clip", "vision_config": None})
    with pytest.raises(ConfigError, match=f"^{key}: .* in the format of its own repository .*published conversion"):
        load("vlm_digits", [f"{key}={folder}"])


def test_images_that_are_padded_are_refused(directory):
    square = {"size": {"shortest_edge": 42}, "crop_size": {"height": 42, "width": 42}}
    folder = directory(preprocessor_config=square | {"do_pad": True})
    assert "preprocessor_config.json: do_pad is True, and images are not padded here" in said(folder)
    folder = directory(preprocessor_config=square | {"do_pad": False})
    assert load("vlm_digits", [f"pretrained={folder}"]).modules["images"].encoder.image_size == 42


def test_what_config_json_lacks_is_as_in_its_class(directory):
    cfg = load("vlm_digits", [f"pretrained={directory({'vision_config': None, 'text_config': None})}"])
    encoder = cfg.modules["images"].encoder
    assert (encoder.num_layers, encoder.hidden_size, encoder.image_size, encoder.patch_size) == (24, 1024, 336, 14)
    assert (cfg.llm.num_layers, cfg.llm.hidden_size, cfg.llm.vocab_size) == (32, 4096, 32000)
    unnamed = {key: value for key, value in TOWER.items() if key != "model_type"}
    cfg = load("vlm_digits", [f"pretrained={directory({'vision_config': unnamed, 'tie_word_embeddings': True})}"])
    assert (cfg.modules["images"].encoder.num_layers, cfg.llm.tie_embeddings) == (4, True)


def test_the_placeholder_is_the_token_of_the_id(directory):
    added = {"added_tokens_decoder": {"259": {"content": "<here>"}}}
    folder = directory(tokenizer={"model": {"vocab": {"a": 0}}}, tokenizer_config=added)
    assert load("vlm_digits", [f"pretrained={folder}"]).modules["images"].placeholder.pad == "<here>"
    folder = directory({"image_token_index": None, "image_token_id": 1}, tokenizer={"model": {"vocab": {"<a>": 1}}})
    (folder / "tokenizer_config.json").unlink()
    assert load("vlm_digits", [f"pretrained={folder}"]).modules["images"].placeholder.pad == "<a>"
    fault = said(folder, "modules.images.placeholder.pad=<b>")
    assert fault.startswith("modules.images.placeholder.pad: is '<b>', and ") and "makes it '<a>'" in fault


SCALED = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize("key", ["pretrained", "modules.images.pretrained", "modules.language.pretrained"])
def test_a_config_that_was_written_down_can_be_read_again(directory, tmp_path, key):
    folder = directory({"text_config": {**LLAMA, **SCALED}})
    cfg = load("vlm_digits", [f"{key}={folder}"])
    written = tmp_path / "written.yaml"
    written.write_text(to_yaml(cfg))
    assert to_dict(load(str(written))) == to_dict(cfg)


@pytest.mark.parametrize(
    "key", ["modules.images.projector.resampler.latents=4", "modules.language.llm.rope_scaling.factor=3.0"]
)
def test_a_key_inside_a_key_that_the_directory_contradicts_is_refused(directory, tmp_path, key):
    folder = directory({"text_config": {**LLAMA, **SCALED}})
    written = tmp_path / "written.yaml"
    written.write_text(to_yaml(load("vlm_digits", [f"pretrained={folder}"])))
    with pytest.raises(
        ConfigError, match=rf"{key.partition('=')[0].rpartition('.')[0]}: is .*config.json makes it .*remove the key"
    ):
        load(str(written), [key])


def test_one_directory_for_two_encoders_is_refused(directory, tmp_path):
    second = ("encoder@modules.details.encoder=vit_tiny", "projector@modules.details.projector=mlp")
    assert "has one encoder, and modules images, details would all get it" in said(directory(), *second)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    assert "has one encoder" not in said(tmp_path / "llama", *second)


def test_the_vocabulary_may_get_more_rows_and_not_fewer(directory):
    folder = directory()
    assert load("vlm_digits", [f"pretrained={folder}", "modules.language.llm.vocab_size=310"]).llm.vocab_size == 310
    assert "vocab_size: is 290, and " in said(folder, "modules.language.llm.vocab_size=290")


def test_rows_that_adapters_would_leave_random_are_a_fault(directory):
    folder, more, lora = directory(), "modules.language.llm.vocab_size=310", "modules.language.lora={rank: 4}"
    found = said(folder, more, lora)
    assert (
        "modules.language.llm.vocab_size: adds 10 rows to the 300 of" in found
        and "Set modules.language.lora.modules_to_save=[embed_tokens, lm_head]" in found
    )
    trained = "modules.language.lora={rank: 4, modules_to_save: [lm_head, embed_tokens]}"
    for overrides in (
        [lora],
        [more, trained],
        [more, "modules.language.lora={rank: 0}"],
        [more, "modules.images.lora={rank: 4}"],
    ):
        load("vlm_digits", [f"pretrained={folder}", *overrides])


def test_check_needs_no_torch(directory, tmp_path):
    folder = directory()
    (folder / "tokenizer.json").unlink()
    write_weights(folder, f"pretrained={folder}", "data.tokenizer=bytes")
    keys = [
        f"pretrained={folder}",
        "data.tokenizer=bytes",
        f"data.shards={tmp_path}/digits/train",
        "data.validation_shards=",
        f"run.dir={tmp_path}/run",
    ]
    program = (
        "import sys\nsys.modules['torch'] = None\nfrom mimo_train.cli import main\n"
        f"sys.exit(main({['check', 'vlm_digits', *keys]}))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "36 of" in result.stdout, "tokens of an image"


def test_one_directory_of_all_modules_is_one(directory, tmp_path):
    folder = directory()
    assert pretrained_folders(load("vlm_digits", [f"pretrained={folder}"])) == {
        "modules.images.pretrained": str(folder)
    }
    assert pretrained_folders(load("vlm_digits")) == {}


def test_a_class_that_cuts_only_single_images_into_tiles_is_refused_as_it_is(directory):
    """Its native form does so; here its processor would be called for each image of a sample."""
    text = said(directory(ONEVISION), "modules.images.implementation=transformers")
    assert "a llava_onevision cuts an image into tiles only where a sample has no other" in text

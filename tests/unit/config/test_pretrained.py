"""`modules.NAME.pretrained`: the directory's sizes replace the group's; contradicting keys are faults."""

import json

import pytest

from mimo_train.config.compose import from_dict, load, to_dict
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.config.pretrained.composites.of_transformers import of_transformers
from mimo_train.config.pretrained.config_of_directory import base_of_adapter, config_of_directory

LLAMA = {
    "model_type": "llama", "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 100, "num_hidden_layers": 3, "vocab_size": 300, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "rope_theta": 5000.0,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def composed(folder, *overrides, config="vlm_digits"):
    return load(config, [f"modules.language.pretrained={folder}", "data.tokenizer=bytes", *overrides])


def said(folder, *overrides, config="vlm_digits") -> str:
    with pytest.raises(ConfigError) as error:
        composed(folder, *overrides, config=config)
    return str(error.value)


@pytest.mark.parametrize("config", ["vlm_digits", "gpt_tiny"])
def test_one_override_takes_the_place_of_the_group(llama, config):
    cfg = composed(llama, config=config)
    llm = cfg.llm
    assert (llm.name, llm.num_layers, llm.hidden_size, llm.key_heads, llm.head_width) == ("my-llama", 3, 48, 2, 16)
    assert (llm.vocab_size, llm.tie_embeddings, llm.layernorm_epsilon, llm.rope_base) == (300, False, 1e-6, 5000)
    assert cfg.language.pretrained == str(llama)
    assert cfg.encoders.keys() == load(config).encoders.keys()


def test_a_file_whose_modules_are_all_groups(llama, tmp_path):
    """Nothing is left of `modules` in the file without the groups that the directory replaces."""
    file = tmp_path / "text.yaml"
    file.write_text("defaults: [llm@modules.language.llm: gpt_tiny, data@data: text, optim@optim: adamw, _self_]\n")
    cfg = load(str(file), [f"pretrained={llama}", "data.tokenizer=bytes"])
    assert (cfg.llm.name, cfg.language.pretrained) == ("my-llama", str(llama))


def test_what_depends_on_no_weight_may_differ(llama):
    llm = composed(llama, "modules.language.llm.dropout=0.1", "modules.language.llm.name=mine").llm
    assert (llm.dropout, llm.name, llm.num_layers) == (0.1, "mine", 3)


def test_a_key_that_the_directory_contradicts_is_a_fault_with_both_values(llama):
    faults = said(llama, "modules.language.llm.num_layers=4", "modules.language.llm.qk_norm=true").splitlines()
    assert len(faults) == 2
    assert faults[0].startswith(f"modules.language.llm.num_layers: is 4, and {llama}/config.json makes it 3: remove")
    assert faults[1].startswith("modules.language.llm.qk_norm: is True, ") and " False: " in faults[1]
    assert composed(llama, "modules.language.llm.num_layers=3").llm.num_layers == 3


def test_a_group_beside_the_directory_is_a_fault(llama):
    choice = "llm@modules.language.llm=gpt_tiny"
    assert said(llama, choice) == f"modules.language.pretrained: takes the place of {choice}: remove one of them"


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("modules.language", "4", "a mapping of keys, is 4"),
        ("modules.images", "encoder", "a mapping of keys, is 'encoder'"),
        ("modules.language.pretrained", "[a]", "a text, is ['a']"),
        ("modules.images.pretrained", "{a: b}", "a text, is {'a': 'b'}"),
        ("modules.language.llm", "gpt_mini", "a mapping of keys, is 'gpt_mini'"),
        ("modules.language.lora", "16", "a mapping of keys, is 16"),
        ("modules.language.lora.adapter", "[a]", "a text, is ['a']"),
        ("modules.images.placeholder", "<image>", "a mapping of keys, is '<image>'"),
        ("pretrained", "[a]", "a text, is ['a']"),
    ],
)
def test_a_value_of_another_type_beside_a_directory_is_a_fault(llama, tmp_path, key, value, says):
    """They are read before the general type check."""
    file = tmp_path / "run.yaml"
    file.write_text(f"defaults: [vlm_digits, _self_]\nmodules: {{language: {{pretrained: {llama}}}}}\n")
    with pytest.raises(ConfigError) as error:
        load(str(file), [f"{key}={value}"])
    assert f"{key}: must be {says}" in str(error.value).splitlines()


def test_a_file_may_name_the_directory(llama, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "defaults: [vlm_digits, _self_]\ndata: {tokenizer: bytes}\n"
        f"modules: {{language: {{pretrained: {llama}, llm: {{dropout: 0.2}}}}}}\n"
    )
    llm = load(str(file)).llm
    assert (llm.num_layers, llm.dropout) == (3, 0.2)
    file.write_text(file.read_text().replace("dropout: 0.2", "hidden_size: 64"))
    with pytest.raises(ConfigError, match="modules.language.llm.hidden_size: is 64, and .* makes it 48"):
        load(str(file))


def test_a_run_s_own_config_needs_the_directory_no_more(llama):
    cfg = composed(llama)
    written = to_dict(cfg)
    (llama / "config.json").unlink()
    assert from_dict(written) == cfg


def test_the_tokenizer_comes_with_the_language_model_unless_it_is_given(llama, tmp_path):
    """Without a tokenizer in the directory, its rows would be trained as bytes."""
    own = f"modules.language.pretrained={llama}"
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .* has no tokenizer, .*tokenizer\.json.*give the folder"):
        load("vlm_digits", [own])
    assert composed(llama).data.tokenizer == "bytes"
    (llama / "tokenizer.json").write_text("{}")
    assert load("vlm_digits", [own]).data.tokenizer == str(llama)
    assert composed(llama).data.tokenizer == "bytes"
    file = tmp_path / "run.yaml"
    file.write_text(f"defaults: [vlm_digits, _self_]\npretrained: {llama}\ndata: {{tokenizer: bytes}}\n")
    file.write_text(file.read_text().replace("pretrained:", "modules: {language: {pretrained:").replace(
        str(llama), f"{llama}}}}}"))  # fmt: skip
    assert load(str(file)).data.tokenizer == "bytes"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda folder: (folder / "config.json").unlink(),
            "is no model of transformers, there is no config.json in it",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged"),
        (lambda folder: (folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1"), "pull"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json is damaged, it holds no mapping"),
        (lambda folder: (folder / "config.json").write_text('{"a": 1}'), "its config.json has no model_type"),
    ],
)
def test_a_directory_that_cannot_be_read_is_named(llama, spoil, words):
    spoil(llama)
    fault = said(llama)
    assert fault.startswith("modules.language.pretrained: ") and words in fault


def test_a_folder_that_is_not_there_is_named(tmp_path):
    fault = said(tmp_path / "nowhere")
    assert fault.startswith(f"modules.language.pretrained: no folder {tmp_path}/nowhere: give a directory")


def test_a_language_model_is_no_encoder(llama):
    with pytest.raises(ConfigError, match="modules.images.pretrained: .* is of family 'llama', which is no encoder"):
        load("vlm_digits", [f"modules.images.pretrained={llama}"])


GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 262144,
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}  # fmt: skip
"""The 4B model's config.json on the hub."""


def test_of_a_gemma_3_with_images_the_language_model_is_read(llama):
    (llama / "config.json").write_text(json.dumps(GEMMA3))
    llm = composed(llama, config="gpt_tiny").llm
    assert (llm.num_attention_heads, llm.key_heads, llm.head_width, llm.vocab_size) == (8, 4, 256, 262208)
    assert (llm.rope_base, llm.rope_scaling.kind, llm.rope_scaling.factor) == (1e6, "linear", 8.0)
    assert (llm.local_rope_base, llm.window, llm.full_attention_layers) == (1e4, 1024, [5, 11, 17, 23, 29])
    cfg = load("gpt_tiny", [f"pretrained={llama}", "data.tokenizer=bytes"])
    assert (cfg.llm, cfg.bidirectional) == (llm, "")


def test_an_adapter_whose_model_is_not_here_is_named(llama, tmp_path):
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": "org/name"}))
    adapter = f"^CHECKPOINT: {tmp_path} holds an adapter of PEFT for"
    with pytest.raises(UserError, match=f"{adapter} 'org/name': there is no folder org/name, and"):
        config_of_directory(tmp_path)
    config.write_text(json.dumps({"base_model_name_or_path": "./name"}))
    with pytest.raises(UserError, match=f"{adapter} './name', which is no"):
        config_of_directory(tmp_path)
    config.write_text("{")
    with pytest.raises(UserError, match=f"^CHECKPOINT: {config} is damaged"):
        config_of_directory(tmp_path)
    assert base_of_adapter(llama) is None


@pytest.mark.parametrize("of_all", [{}, {"vocab_size": 32}])
def test_rows_of_a_vocabulary_are_all_that_an_export_changes(of_all, tmp_path):
    """Not what the class of several parts makes of the language model's keys."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    text = {"model_type": "cohere2", "vocab_size": 32, "logit_scale": 0.0625, **sizes}
    vision = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, **sizes}
    config = {"model_type": "aya_vision", "text_config": text, "vision_config": vision, **of_all}
    (tmp_path / "config.json").write_text(json.dumps(config))
    directory = of_transformers(tmp_path)
    assert directory.with_vocabulary(config, 32) == config
    rows = {"vocab_size": 40}
    assert directory.with_vocabulary(config, 40) == {**config, **(of_all and rows), "text_config": text | rows}


def test_a_model_with_an_encoder_and_a_decoder_of_text_is_named(tmp_path):
    config = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="BartForConditionalGeneration has an encoder and a decoder of text"):
        load("gpt_tiny", [f"modules.language.pretrained={tmp_path}", "data.tokenizer=bytes"])

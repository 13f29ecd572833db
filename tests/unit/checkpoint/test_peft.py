"""Adapters in PEFT's files: what is written, what is read back, and what is refused, without the library itself."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mimo_train.config.errors import UserError
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.adapter import BIN_WEIGHTS
from mimo_train.config.pretrained.hub import named_in_hub
from mimo_train.config.schema_modules import LoraConfig, ModuleConfig
from mimo_train.hf.peft import (
    CONFIG,
    WEIGHTS,
    Adapted,
    Place,
    read_adapter,
    write_adapters,
)
from mimo_train.layout.adapters import WHOLE, adapted_linears, linears
from mimo_train.models.lora.rows import FusedRows

SPEC = LlmSpec(num_layers=2, hidden_size=12, num_attention_heads=6, num_query_groups=2, ffn_hidden_size=10)
LINEARS = linears(LANGUAGE, ModuleConfig(llm=SPEC), 12)
PARTS = {"self_attention": "self_attn", "mlp": "mlp"}


def places() -> dict[str, dict[str, Place]]:
    """Where a Llama of transformers has our layers."""
    found = {}
    for linear in LINEARS:
        _, _, layer, part, _ = linear.name.split(".")
        found[linear.name] = {one: Place(f"model.layers.{layer}.{PARTS[part]}.{one}") for one, _ in linear.projections}
    return found


def write_adapter(folder: Path, *of, base_model: str = "") -> None:
    write_adapters(folder, [Adapted(*of)], base_model=base_model, task_type="CAUSAL_LM")


def drawn(lora: LoraConfig) -> dict[str, torch.Tensor]:
    """Random adapters of a module, whole."""
    torch.manual_seed(1)
    found = {}
    for name, one in adapted_linears(LANGUAGE, ModuleConfig(llm=SPEC, lora=lora), 12).items():
        for projection in one.projections:
            prefix, rows = f"{name}.{projection}".removesuffix("."), one.linear.rows(projection)
            found[f"{prefix}.lora_a"] = torch.randn(lora.rank, one.linear.inputs)
            found[f"{prefix}.lora_b"] = torch.randn(rows, lora.rank)
            if lora.dora:
                found[f"{prefix}.lora_magnitude"] = torch.rand(rows)
    return found


def test_a_shared_adapter_comes_back_as_one_of_each_projection(tmp_path):
    lora = LoraConfig(rank=3, targets=["linear_fc1"])
    adapters = drawn(lora)
    write_adapter(tmp_path, adapters, lora, LINEARS, places())
    read, again = read_adapter(tmp_path, LINEARS, places())
    assert read.targets == ["gate_proj", "up_proj"]
    for linear in (one for one in LINEARS if one.name.endswith("linear_fc1")):
        deltas = {
            one: again[f"{linear.name}.{one}.lora_b"] @ again[f"{linear.name}.{one}.lora_a"]
            for one, _ in linear.projections
        }
        fused = adapters[f"{linear.name}.lora_b"] @ adapters[f"{linear.name}.lora_a"]
        torch.testing.assert_close(FusedRows(linear).join(deltas, dim=0, fill=0.0), fused, rtol=1e-6, atol=1e-6)


def test_a_layer_without_a_place_is_named(tmp_path):
    lora, where = LoraConfig(rank=2, targets=["q_proj"]), places()
    del where["decoder.layers.1.self_attention.linear_qkv"]
    with pytest.raises(UserError, match=r"decoder\.layers\.1\.self_attention\.linear_qkv has an adapter of q_proj"):
        write_adapter(tmp_path, drawn(lora), lora, LINEARS, where)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"rank_pattern": {r"layers\.0\.self_attn\.q_proj": 8}}, "rank_pattern gives .* and adapters of a module"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the weights of the base"),
        ({"a_key_of_tomorrow": 1}, "a_key_of_tomorrow is 1"),
        ({"use_dora": True, "lora_dropout": 0.1}, "lora.dropout: is 0.1, and DoRA"),
        ({"use_dora": True}, "lora_magnitude_vector is missing, with use_dora true"),
        ({"r": 4}, r"shape \(3, 12\), and decoder.layers.0.self_attention.linear_qkv needs \(4, 12\)"),
    ],
)
def test_what_adapters_here_cannot_be_is_refused_by_name(changes, words, tmp_path):
    lora = LoraConfig(rank=3, targets=["q_proj"])
    write_adapter(tmp_path, drawn(lora), lora, LINEARS, places())
    file = tmp_path / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=words):
        read_adapter(tmp_path, LINEARS, places())


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("base_model.model.model.norm.weight", "norm.weight is no tensor of a linear layer's adapter"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "lora_embedding_A is no tensor"),
        (
            "base_model.model.model.layers.0.self_attn.q_prj.lora_A.weight",
            "Did you mean model.layers.0.self_attn.q_proj",
        ),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", "lora_B.weight is missing"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "does not belong there"),
    ],
)
def test_tensors_of_something_else_are_refused_by_name(key, words, tmp_path):
    lora = LoraConfig(rank=3, targets=["q_proj"])
    write_adapter(tmp_path, drawn(lora), lora, LINEARS, places())
    file = tmp_path / WEIGHTS
    save_file(load_file(file) | {key: torch.zeros(3, 12)}, file)
    with pytest.raises(UserError, match=words):
        read_adapter(tmp_path, LINEARS, places())


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(UserError, match=r"adapter_config\.json cannot be read"):
        read_adapter(tmp_path, LINEARS, places())
    lora = LoraConfig(rank=3, targets=["q_proj"])
    write_adapter(tmp_path, drawn(lora), lora, LINEARS, places())
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is damaged .*not fully covered"):
        read_adapter(tmp_path, LINEARS, places())
    (tmp_path / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is a Git-LFS pointer.*git lfs pull"):
        read_adapter(tmp_path, LINEARS, places())
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(UserError, match=f"has no {WEIGHTS} and no {BIN_WEIGHTS}"):
        read_adapter(tmp_path, LINEARS, places())


def test_an_adapter_may_be_a_file_of_torch(tmp_path):
    lora = LoraConfig(rank=3, targets=["q_proj"])
    write_adapter(tmp_path, drawn(lora), lora, LINEARS, places())
    _, expected = read_adapter(tmp_path, LINEARS, places())
    torch.save(load_file(tmp_path / WEIGHTS), tmp_path / BIN_WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    _, read = read_adapter(tmp_path, LINEARS, places())
    assert read.keys() == expected.keys() and all(torch.equal(value, read[name]) for name, value in expected.items())


def test_a_layer_that_is_fused_there_too_has_its_rows_in_another_order(tmp_path):
    """All queries, all keys, all values, as Qwen-VL's towers have them; adapters of projections have no place there."""
    lora, name = LoraConfig(rank=3, dora=True, targets=["linear_qkv"]), "decoder.layers.0.self_attention.linear_qkv"
    linear = next(one for one in LINEARS if one.name == name)
    pieces = FusedRows(linear).split(torch.arange(20), [one for one, _ in linear.projections])
    where = {name: {WHOLE: Place("blocks.0.attn.qkv", tuple(torch.cat(list(pieces.values())).tolist()))}}
    drawn_here = {one: value for one, value in drawn(lora).items() if one.startswith(name)}
    write_adapter(tmp_path, drawn_here, lora, LINEARS, where)
    tensors, before = load_file(tmp_path / WEIGHTS), "base_model.model.blocks.0.attn.qkv."
    magnitudes = FusedRows(linear).split(drawn_here[f"{name}.lora_magnitude"], ["q_proj", "k_proj", "v_proj"])
    assert torch.equal(tensors[f"{before}lora_magnitude_vector"], torch.cat(list(magnitudes.values())))
    read, again = read_adapter(tmp_path, LINEARS, where)
    assert again.keys() == drawn_here.keys() and all(torch.equal(again[one], drawn_here[one]) for one in again)
    assert read.targets == ["decoder.layers.0.self_attention.linear_qkv"]
    apart = {one: value for one, value in drawn(LoraConfig(rank=2, targets=["q_proj"])).items() if ".0." in one}
    with pytest.raises(
        UserError, match="linear_qkv has an adapter of q_proj, .* name linear_qkv in lora.targets instead"
    ):
        write_adapter(tmp_path, apart, lora, LINEARS, where)


def adapted() -> Adapted:
    lora = LoraConfig(rank=3, targets=["q_proj"])
    return Adapted(drawn(lora), lora, LINEARS, places())


def test_a_model_of_a_hubs_cache_is_named_as_in_the_hub(tmp_path):
    """By that name and revision peft finds it on another machine too."""
    revision = "0123456789abcdef" * 2 + "01234567"
    cached = tmp_path / "models--org--name-1.5" / "snapshots" / revision
    cached.mkdir(parents=True)
    assert named_in_hub(cached) == ("org/name-1.5", revision)
    assert named_in_hub(tmp_path / "models--gpt2" / "snapshots" / revision) == ("gpt2", revision)
    for other in (cached.with_name("main"), cached / "base", tmp_path):
        assert named_in_hub(other) == (str(other.resolve()), "")
    name, revision = named_in_hub(cached)
    write_adapters(tmp_path, [adapted()], base_model=name, revision=revision, task_type="CAUSAL_LM")
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/name-1.5", revision)
    read_adapter(tmp_path, LINEARS, places())

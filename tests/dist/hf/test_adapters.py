"""Adapters of PEFT into a run and out again."""

import json
from pathlib import Path

import pytest

from tests.dist.commands import command
from tests.dist.hf.models import make_llama
from tests.dist.hf.test_pretrained import UNCHANGED, pretrained, tensors
from tests.dist.models.families import made as made_of_family
from tests.dist.ranks import run_ranks
from tests.dist.runs import train_on_ranks

ROUNDING = 2e-6
"""Largest difference of merged weights, over the largest weight."""
START = "modules.language.lora.adapter"


def make_adapted_llama(base: Path, folder: Path, merged: Path) -> None:
    """A Llama, an adapter of PEFT for it in two of its three layers, and what the two are together."""
    make_llama(base)
    _make_adapted(base, folder, merged, {"target_modules": ["q_proj", "v_proj", "up_proj"]})


EXPERTS = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
TARGETS = {
    "deepseek_v3, yarn, groups": {"target_modules": ["q_b_proj", "kv_b_proj", "o_proj"]},
    "gpt_oss": {"target_modules": ["q_proj", "k_proj", "o_proj"], "target_parameters": EXPERTS},
    "mixtral": {"target_modules": ["v_proj"], "target_parameters": EXPERTS[:1]},
    "qwen3_5": {"target_modules": ["q_proj", "v_proj", "in_proj_qkv", "in_proj_a", "out_proj"]},
    "llama": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}
"""Of other mixers than plain attention heads, of experts, and next to trained embeddings."""


def make_adapted_family(name: str, base: Path, folder: Path, merged: Path) -> None:
    """The same of another family."""
    # Each of two ranks needs a key head.
    sizes = {"num_key_value_heads": 2} if name == "qwen3_5" else {}
    made_of_family(name, vocab_size=300, **sizes).save_pretrained(base)
    _make_adapted(base, folder, merged, TARGETS[name])


def _make_adapted(base: Path, folder: Path, merged: Path, options: dict) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    layers = None if "target_parameters" in options else [0, 1]
    own = LoraConfig(r=3, lora_alpha=5, layers_to_transform=layers, task_type="CAUSAL_LM", **options)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), own)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=3.0)  # so that answers differ
    model.save_pretrained(folder)
    model.merge_and_unload().save_pretrained(merged)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path, Path]:
    folders = tuple(tmp_path_factory.mktemp("peft") / name for name in ("llama", "adapter", "merged"))
    run_ranks(make_adapted_llama, 1, *folders)
    return folders


def adapter(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def export(run: Path, to: Path, *options: str) -> None:
    ((code, said),) = run_ranks(command, 1, ["export", str(run), "--to", str(to), *options])
    assert code == 0, said


def largest_difference(ours: dict, theirs: dict) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in ours)


def test_an_adapter_of_peft_starts_a_run_and_leaves_it(made, prose, tmp_path):
    """Cut over two ranks. Merged, it is what peft merges; by itself, it is bit for bit what came, for the directory."""
    llama, folder, merged = made
    own = (f"{START}={folder}", *UNCHANGED, "modules.language.layout.tp=2")
    train_on_ranks(pretrained("gpt_tiny", tmp_path / "run", prose, llama, *own))
    export(tmp_path / "run", tmp_path / "merged", "--merge")
    assert largest_difference(tensors(tmp_path / "merged"), tensors(merged)) < ROUNDING
    assert largest_difference(tensors(llama), tensors(merged)) > 0.1
    export(tmp_path / "run", tmp_path / "out")
    came, went = adapter(folder), adapter(tmp_path / "out")
    assert came.keys() == went.keys() and all(value.equal(went[name]) for name, value in came.items())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(llama.resolve())
    assert (config["r"], config["lora_alpha"]) == (3, 5)
    export(tmp_path / "run", tmp_path / "named", "--base-model", "org/name")
    config = json.loads((tmp_path / "named" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/name", None)
    merge = ["export", str(tmp_path / "run"), "--to", str(tmp_path / "no"), "--base-model", "org/name", "--merge"]
    ((code, said),) = run_ranks(command, 1, merge)
    assert code == 1 and "--base-model is org/name, which adapters name, and none are written: leave it" in said
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_of_another_mixer_starts_a_run_and_leaves_it(name, prose, tmp_path):
    base, folder, merged = (tmp_path / part for part in ("base", "adapter", "merged"))
    run_ranks(make_adapted_family, 1, name, base, folder, merged)
    own = (f"{START}={folder}", *UNCHANGED, "data.tokenizer=bytes")
    own += ("modules.language.layout.tp=2", "modules.language.layout.sp=true")
    train_on_ranks(pretrained("gpt_tiny", tmp_path / "run", prose, base, *own))
    export(tmp_path / "run", tmp_path / "whole", "--merge")
    assert largest_difference(tensors(tmp_path / "whole"), tensors(merged)) < ROUNDING
    assert largest_difference(tensors(base), tensors(merged)) > 0.1
    export(tmp_path / "run", tmp_path / "out")
    came, went = adapter(folder), adapter(tmp_path / "out")
    assert came.keys() == went.keys() and all(value.equal(went[name]) for name, value in came.items())


def test_in_a_run_with_an_encoder_it_is_one_of_llava(made, digits, prose, tmp_path):
    """Its names are those of a LLaVA, which is its base; and from these a run starts again."""
    llama, folder, merged = made
    own = (f"{START}={folder}", *UNCHANGED, "layout=one_process", "data.sequence_length=200")
    train_on_ranks(pretrained("vlm_digits", tmp_path / "run", digits, llama, *own))
    export(tmp_path / "run", tmp_path / "out")
    came, went = adapter(folder), adapter(tmp_path / "out")
    before, behind = "base_model.model.model.", "base_model.model.model.language_model."
    assert all(value.equal(went[name.replace(before, behind)]) for name, value in came.items())
    base = tmp_path / "out" / "base"
    assert json.loads((base / "config.json").read_text())["model_type"] == "llava"
    again = (f"{START}={tmp_path / 'out'}", *UNCHANGED)
    train_on_ranks(pretrained("gpt_tiny", tmp_path / "again", prose, base, *again))
    export(tmp_path / "again", tmp_path / "whole", "--merge")
    found, before = tensors(tmp_path / "whole"), "language_model."
    language = {name.removeprefix(before): value for name, value in found.items() if name.startswith(before)}
    assert largest_difference(language, tensors(merged)) < ROUNDING
    towers = {name for name in found if not name.startswith(before)}
    assert towers and all(found[name].equal(tensors(base)[name]) for name in towers)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("modules.language.lora.rank=4",), "modules.language.lora.rank: is 4, and the adapter in {folder} has 3"),
        (("modules.language.lora.targets=[q_proj]",), "modules.language.lora.targets: is ['q_proj'], and the adapter"),
    ],
)
def test_keys_that_contradict_an_adapter_name_both_values(given, words, made, prose, tmp_path):
    from mimo_train.config.errors import ConfigError

    llama, folder, _ = made
    with pytest.raises(ConfigError) as caught:
        pretrained("gpt_tiny", tmp_path / "run", prose, llama, f"{START}={folder}", *given)
    assert words.format(folder=folder) in str(caught.value)

"""Runs that are no model of `transformers` leave part by part; directories and adapters alone answer prompts."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.dist.commands import command, conversation
from tests.dist.hf.test_adapters import make_adapted_llama
from tests.dist.hf.test_pretrained import UNCHANGED, pretrained
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, train_on_ranks

PROMPT, MOST = "It was", 6


def _saved(cfg) -> tuple[str, dict]:
    """A checkpoint, and the parameters that it holds as arrays."""
    from mimo_train.models.parameters import global_names, modules_of
    from tests.dist.steps import Steps

    run = Steps(cfg)
    run.train(1)
    modules = modules_of(run.model)
    values = {
        name: {one: value.detach().clone().numpy() for one, value in global_names(chunk).items()}
        for name, (chunk,) in modules.items()
    }
    return str(run.save()), values


def test_parts_without_a_class_are_safetensors_by_our_names(digits, tmp_path):
    cfg = config(
        "vlm_digits",
        tmp_path / "run",
        digits,
        "layout=one_process",
        "modules.images.encoder.class_token=true",
        "modules.images.encoder.resize=native",
        "modules.language.llm.position=learned",
    )
    ((folder, values),) = run_ranks(_saved, 1, cfg)
    ((code, said),) = run_ranks(command, 1, ["export", folder, "--to", str(tmp_path / "out")])
    assert code == 0, said
    form, *written = said.splitlines()  # before what is written
    assert form.startswith("3 directories (") and len(written) == 3, said
    assert "for no model of transformers has all parts: modules.images.encoder: " in form
    assert "modules.language.llm.position is 'learned'" in said
    ((code, said),) = run_ranks(command, 1, ["export", folder, "--to", str(tmp_path / "merged"), "--merge"])
    assert code == 1 and f"no module of {folder} has any: leave it out" in said
    assert not (tmp_path / "merged").exists()
    parts = {
        "language": ("language", ""),
        "images": ("images", "encoders."),
        "images.projector": ("images", "input_projections."),
    }
    for part, (module, begins) in parts.items():
        found = load_file(tmp_path / "out" / part / "model.safetensors")
        expected = {
            name.removeprefix(begins): value for name, value in values[module].items() if name.startswith(begins)
        }
        assert found.keys() == expected.keys() and expected
        assert all((value.numpy() == expected[name]).all() for name, value in found.items())
    own = json.loads((tmp_path / "out" / "images" / "config.json").read_text())["mimo_train"]
    assert own["class_token"] is True and own["hidden_size"] == 32


def test_a_tower_and_a_language_model_leave_as_models_of_transformers(digits, tmp_path):
    """Where only the projector between them is none that transformers has."""
    projector = (f"modules.images.projector.{key}" for key in ("merge=3", "kind=linear", "bias=false"))
    merged = ("layout=one_process", *projector, "modules.images.encoder.final_norm=true")
    ((folder, values),) = run_ranks(_saved, 1, config("vlm_digits", tmp_path / "run", digits, *merged))
    ((code, said),) = run_ranks(command, 1, ["export", folder, "--to", str(tmp_path / "out")])
    assert code == 0 and "final_norm is true, and LLaVA reads its tower without the norm" in said
    assert "projector of images (safetensors by the names of Idefics3's connector" in said
    ((name, value),) = load_file(tmp_path / "out" / "images.projector" / "model.safetensors").items()
    assert name == "model.connector.modality_projection.proj.weight"
    assert (value.numpy() == values["images"]["input_projections.0.encoder.weight"]).all()
    ((wrong, kinds),) = run_ranks(_loaded, 1, tmp_path / "out")
    assert wrong == [] and kinds == ["LlamaForCausalLM", "SiglipVisionModel"]


def _loaded(folder: Path) -> tuple[list[str], list[str]]:
    from transformers import AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer

    wrong, kinds = [], []
    for name, kind in (("language", AutoModelForCausalLM), ("images", AutoModel)):
        model, found = kind.from_pretrained(folder / name, output_loading_info=True)
        wrong += [*found["missing_keys"], *found["unexpected_keys"]]
        kinds.append(type(model).__name__)
    AutoTokenizer.from_pretrained(folder / "language")
    AutoImageProcessor.from_pretrained(folder / "images")
    return wrong, kinds


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """A Llama, and an adapter of PEFT for it."""
    folders = tuple(tmp_path_factory.mktemp("peft") / name for name in ("llama", "adapter", "merged"))
    run_ranks(make_adapted_llama, 1, *folders)
    return folders[:2]


def _greedy(folder: Path) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(PROMPT, add_special_tokens=False, return_tensors="pt")["input_ids"]
    begin = ids.new_tensor([[tokenizer.bos_token_id]])
    import torch

    ids = torch.cat([begin, ids], dim=1)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MOST, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def generated(folder: Path) -> str:
    """What the command prints."""
    options = ["--prompt", PROMPT, "--max-new-tokens", str(MOST)]
    ((code, out, err),) = run_ranks(conversation, 1, ["generate", str(folder), *options])
    assert code == 0, err
    return out.removesuffix("\n")


def test_a_directory_answers_as_transformers_does(made):
    llama, _ = made
    (text,) = run_ranks(_greedy, 1, llama)
    assert generated(llama) == text and text


def test_adapters_alone_generate_beside_their_directory_and_leave_merged(made, prose, tmp_path):
    """The checkpoint has adapters alone; the directory of the run has the rest."""
    llama, adapter = made
    own = (f"modules.language.lora.adapter={adapter}", "checkpoint.trained_only=true", *UNCHANGED)
    train_on_ranks(pretrained("gpt_tiny", tmp_path / "run", prose, llama, *own))
    ((code, said),) = run_ranks(command, 1, ["export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--merge"])
    assert code == 0, said
    (before,), (after,) = (run_ranks(_greedy, 1, folder) for folder in (llama, tmp_path / "out"))
    assert before != after and generated(tmp_path / "run") == after
    # The adapter names the folder of its model.
    assert generated(adapter) == after

"""Weights of a directory of `transformers` into a run of any layout, and out again."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mimo_train.config.compose import load
from mimo_train.config.pretrained.weight_files import SINGLE
from mimo_train.layout.run import resolve
from tests.dist.commands import command
from tests.dist.hf.models import TOKENS, make_llama
from tests.dist.ranks import run_ranks
from tests.dist.runs import TINY, TINY_ENCODER, TOLERANCE, curve, largest_difference, train_on_ranks, train_rank

UNCHANGED = ("train.iters=1", "optim.lr=0", "optim.min_lr=0")
"""A step that leaves weights as they are."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "my-llama"
    run_ranks(make_llama, 1, folder)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def pretrained(name: str, run_dir: Path, demo: Path, folder: Path, *overrides: str):
    """A shipped config with the directory as its language model, made tiny."""
    tiny = [key for key in (*TINY, *TINY_ENCODER) if not key.startswith("modules.")]
    tiny += [] if name == "gpt_tiny" else TINY_ENCODER
    places = (f"run.dir={run_dir}", f"data.shards={demo}/train", "data.validation_shards=", "data.demo=")
    own = (f"modules.language.pretrained={folder}", "data.sequence_length=160")
    return load(name, (*tiny, *places, *own, *overrides))


def export(run_dir: Path, to: Path, *options: str) -> None:
    ((code, said),) = run_ranks(command, 1, ["export", str(run_dir), "--to", str(to), *options])
    assert code == 0, said


def test_what_comes_in_goes_out_bit_for_bit(llama, prose, tmp_path):
    """In fp32; `test_families` has the other families."""
    layout = "modules.language.layout.pp=3"
    train_on_ranks(pretrained("gpt_tiny", tmp_path / "run", prose, llama, *UNCHANGED, layout))
    export(tmp_path / "run", tmp_path / "out")
    came, went = tensors(llama), tensors(tmp_path / "out")
    assert came.keys() == went.keys()
    assert all(torch.equal(value, went[name]) for name, value in came.items())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (llama, tmp_path / "out"))
    assert before.items() <= after.items()
    assert (after["rope_theta"], after["torch_dtype"]) == (before["rope_parameters"]["rope_theta"], "float32")
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (llama / name).read_bytes()
    of_version_5 = json.loads((llama / "tokenizer_config.json").read_text())
    assert of_version_5["tokenizer_class"] == "TokenizersBackend", "which version 4 does not know"
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    # Version 4 knows the list by another name, and takes `extra_special_tokens` as a map alone.
    renamed = {"additional_special_tokens": of_version_5.pop("extra_special_tokens")}
    # The generic class of version 4 makes inputs that `generate` rejects, unless they are named.
    renamed |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    assert written == of_version_5 | renamed


ONE = ("layout=one_process",)
CUT = (
    "layout=two_processes",
    *(f"modules.language.layout.{size}" for size in ("tp=2", "pp=2")),
    "modules.images.layout.dp=2",
    "train.micro_batch_size=4",
)


def test_a_vocabulary_with_more_rows_than_the_directory_s(llama, prose, tmp_path):
    """Old rows are read, new ones are drawn, both are exported."""
    more = ("modules.language.llm.vocab_size=390", "modules.language.layout.tp=2")  # the padding grows too
    train_on_ranks(pretrained("gpt_tiny", tmp_path / "run", prose, llama, *UNCHANGED, *more))
    export(tmp_path / "run", tmp_path / "out")
    came, went = tensors(llama), tensors(tmp_path / "out")
    tables = ["model.embed_tokens.weight", "lm_head.weight"]
    for name, value in came.items():
        assert torch.equal(value, went[name][: len(value)]) and len(went[name]) == (
            390 if name in tables else len(value)
        )
    new = [went[name][TOKENS:] for name in tables]
    assert all(0.01 < rows.std() < 0.04 for rows in new) and not torch.equal(*new)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 390


def test_every_layout_begins_with_the_same_weights(llama, digits, tmp_path):
    """With an encoder of our own in front, and adapters beside frozen weights."""
    curves = []
    for name, layout in (("one", ONE), ("cut", CUT)):
        own = ("train.iters=4", "modules.language.lora.rank=2")
        curves.append(curve(train_on_ranks(pretrained("vlm_digits", tmp_path / name, digits, llama, *layout, *own))))
    assert max(largest_difference(*curves)) < TOLERANCE
    other = pretrained("vlm_digits", tmp_path / "other", digits, llama, *ONE, *own, "run.seed=2")
    assert abs(curve(train_on_ranks(other))[0][1] / curves[0][0][1] - 1) < 0.05, "the seed moves the encoder alone"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda there: there.pop("model.layers.1.mlp.up_proj.weight"), "it lacks model.layers.1.mlp.up_proj.weight"),
        (lambda there: there.update(extra=torch.ones(2)), "has extra, for which the model has no place"),
        (
            lambda there: there.update({"model.norm.weight": torch.ones(47)}),
            "model.norm.weight has shape (47,) there, and 48 rows here",
        ),
    ],
    ids=["missing", "unexpected", "another shape"],
)
def test_a_directory_that_does_not_fit_is_refused_on_every_rank(change, words, llama, prose, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    there = tensors(llama)
    change(there)
    save_file(there, folder / "model.safetensors")
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / file, folder)
    cfg = pretrained("gpt_tiny", tmp_path / "run", prose, folder, *UNCHANGED, "modules.language.layout.pp=2")
    said = run_ranks(_refused, 2, cfg)
    assert said[0] == said[1] and said[0].startswith(f"modules.language.pretrained: {folder} ") and words in said[0]


def test_of_a_model_of_several_parts_a_layer_too_many_is_named(llama, prose, tmp_path):
    """Though nothing of its other parts is read."""
    folder = tmp_path / "llava"
    folder.mkdir()
    there = {f"language_model.{name}": value for name, value in tensors(llama).items()}
    save_file(there | {"vision_tower.any": torch.ones(2)}, folder / "model.safetensors")
    text = json.loads((llama / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    own = (*UNCHANGED, "data.tokenizer=bytes")
    (said,) = run_ranks(_refused, 1, pretrained("gpt_tiny", tmp_path / "run", prose, folder, *own))
    assert "language_model.model.layers.2." in said and "for which the model has no place" in said, said
    assert "vision_tower" not in said


def _refused(cfg) -> str:
    from mimo_train.config.errors import UserError

    try:
        train_rank(cfg)
    except UserError as error:
        return str(error)
    return ""


def test_transformers_reads_what_was_trained(llama, prose, tmp_path):
    """With the tokenizer that it was trained with."""
    train_on_ranks(pretrained("gpt_tiny", tmp_path / "run", prose, llama, "train.iters=3", "data.tokenizer=bytes"))
    export(tmp_path / "run", tmp_path / "out", "--dtype", "bf16")
    went = tensors(tmp_path / "out")
    assert {value.dtype for value in went.values()} == {torch.bfloat16}
    assert not torch.equal(went["lm_head.weight"].float(), tensors(llama)["lm_head.weight"])
    ((missing, dtype, ids),) = run_ranks(_loaded, 1, tmp_path / "out")
    assert (missing, dtype) == ([], "torch.bfloat16")
    assert ids == [65, 66]


def _loaded(folder: Path) -> tuple[list[str], str, list[int]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder).encode("AB", add_special_tokens=False)
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return [*found["missing_keys"], *found["unexpected_keys"]], str(model.dtype), ids


def test_adapters_alone_are_saved_and_the_directory_is_their_base(llama, digits, tmp_path):
    """In a run with an encoder of its own, of which the projector is saved too."""
    own = ("optim.decay=constant", "modules.language.lora.rank=2", "modules.language.lora.dora=true", *CUT[:2])
    own += ("checkpoint.trained_only=true", "modules.images.freeze=[encoder]", "train.micro_batch_size=4")
    runs = {name: f"train.iters={steps}" for name, steps in (("whole", 4), ("half", 2))}
    base = Path(shutil.copytree(llama, tmp_path / "base"))
    whole, half = (pretrained("vlm_digits", tmp_path / name, digits, base, *own, one) for name, one in runs.items())
    rest = pretrained("vlm_digits", tmp_path / "half", digits, base, *own, "train.iters=4")
    train_on_ranks(half)
    assert curve(train_on_ranks(rest)) == curve(train_on_ranks(whole))
    there = tensors(base)
    there["model.norm.weight"][3] += 1
    save_file(there, base / SINGLE)
    again = pretrained("vlm_digits", tmp_path / "half", digits, base, *own, "train.iters=5")
    said, *_ = run_ranks(_refused, resolve(again).layout.processes[-1] + 1, again)
    assert said.startswith("modules.language.pretrained: checkpoint ") and "the frozen weights differ" in said
    assert f"took them from modules.language.pretrained={base}, run.seed=1234: restore" in said

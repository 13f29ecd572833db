"""Runs that were made here as directories of `transformers`: they answer as the evaluation in the loop does."""

import json
from functools import partial
from pathlib import Path

import pytest

from mimo_train.config.compose import load
from tests.dist.commands import command
from tests.dist.greedy import prompts_and_answers
from tests.dist.hf.asking import MOST, answers_here, answers_of_transformers, questions
from tests.dist.hf.models import TOKENS, make_llama
from tests.dist.ranks import run_ranks
from tests.dist.runs import TINY, config


def _trained(cfg) -> tuple[str, dict[int, list[int]], dict[int, list[int]]]:
    """A checkpoint, and prompts and greedy answers of held-out samples in the loop, by number."""
    from tests.dist.steps import Steps

    run = Steps(cfg)
    run.train(cfg.train.iters)
    folder, stops = run.save(), run.session.parts.tokenizer.template.stop_ids
    found = prompts_and_answers(run, MOST)
    prompts = {number: prompt for number, (prompt, _, _) in found.items()}
    answers = {number: [token for token in answer if token not in stops] for number, (_, answer, _) in found.items()}
    return str(folder), prompts, answers


@pytest.fixture(scope="module")
def adapted(digits, tmp_path_factory):
    """A run with adapters in both modules and a trained projector, of sizes and weights of its own: (checkpoint,
    prompts, answers)."""
    cfg = config(
        "vlm_digits",
        tmp_path_factory.mktemp("run"),
        digits,
        "layout=two_processes",
        "modules.language.lora.rank=4",
        "modules.images.lora.rank=2",
        "modules.language.llm.init_std=0.3",  # so that answers differ
        "train.iters=2",
        "train.eval_samples=40",
        "train.global_batch_size=40",
        f"data.validation_shards={digits}/held_out",
        "data.sequence_length=120",
    )
    (folder, _, _), (_, prompts, answers) = run_ranks(_trained, 2, cfg)
    numbers = sorted(answers)
    return folder, [prompts[number] for number in numbers], [answers[number] for number in numbers]


def test_the_demo_leaves_as_llava_and_answers_alike(adapted, digits, tmp_path):
    """Merged, all held-out questions; as a base with an adapter for peft, some of them."""
    folder, prompts, answers = adapted
    asked = questions(digits / "held_out", len(prompts))
    assert len(prompts) == 40 and len({tuple(answer) for answer in answers}) > 10
    ((code, said),) = run_ranks(command, 1, ["export", folder, "--to", str(tmp_path / "merged"), "--merge"])
    assert code == 0 and "images and language as one LLaVA (siglip_vision_model, llama)" in said
    ((code, said),) = run_ranks(command, 1, ["export", folder, "--to", str(tmp_path / "apart")])
    assert code == 0 and "adapters of images and language for peft" in said
    (theirs,) = run_ranks(answers_of_transformers, 1, tmp_path / "merged", None, asked)
    assert (theirs.wrong, theirs.prompts) == ({}, prompts) and theirs.answers == answers
    (here,) = run_ranks(answers_here, 1, tmp_path / "merged", asked)
    assert [tokens for tokens, _ in here] == answers, "from the directory, by our own code"
    adapter = json.loads((tmp_path / "apart" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "apart" / "base")
    base, some = tmp_path / "apart" / "base", asked[:12]
    (bare,) = run_ranks(answers_of_transformers, 1, base, None, some)
    (full,) = run_ranks(answers_of_transformers, 1, base, tmp_path / "apart", some)
    assert (bare.wrong, full.wrong) == ({}, {}) and bare.answers != answers[:12] and full.answers == answers[:12]


def _make_tower(kind: str, folder: Path) -> None:
    """A vision tower of transformers with random weights, a layer more than LLaVA reads, and what it has behind it."""
    import torch
    import transformers

    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
    own = {"image_size": 28, "patch_size": 14}
    kind = kind if kind == "Dinov2" else f"{kind}Vision"
    config = getattr(transformers, f"{kind}Config")(**sizes, **own)
    torch.manual_seed(4)
    model = getattr(transformers, f"{kind}Model")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


TYPES = {"CLIP": "clip_vision_model", "Siglip": "siglip_vision_model", "Dinov2": "dinov2"}


@pytest.mark.parametrize(("kind", "tokens"), [("CLIP", TOKENS), ("Siglip", 259), ("Dinov2", TOKENS)])
def test_a_tower_and_a_language_model_of_two_directories_leave_as_one_llava(kind, tokens, digits, tmp_path):
    """With a projector that was made here: it answers alike, and what it does not read of the tower is in it. The
    second vocabulary has no row left for the placeholder, which transformers looks up."""
    from safetensors.torch import load_file

    from tests.dist.hf.test_pretrained import tensors

    tower, llama = tmp_path / "tower", tmp_path / "llama"
    run_ranks(_make_tower, 1, kind, tower)
    run_ranks(partial(make_llama, vocab_size=tokens), 1, llama)
    tiny = [key for key in TINY if not key.startswith("modules.")]
    places = (f"run.dir={tmp_path / 'run'}", f"data.shards={digits}/train", "data.demo=")
    held_out = (f"data.validation_shards={digits}/held_out", "train.eval_samples=16", "data.sequence_length=120")
    read = ("modules.images.encoder.feature_layer=-2", "modules.images.encoder.final_norm=false")
    both = (f"modules.images.pretrained={tower}", f"modules.language.pretrained={llama}")
    cfg = load("vlm_digits", (*tiny, *places, *held_out, *read, *both, "layout=one_process", "train.iters=1"))
    ((folder, prompts, answers),) = run_ranks(_trained, 1, cfg)
    ((code, said),) = run_ranks(command, 1, ["export", folder, "--to", str(tmp_path / "out")])
    assert code == 0 and f"as one LLaVA ({TYPES[kind]}, llama)" in said, said
    asked = questions(digits / "held_out", len(answers))
    (theirs,) = run_ranks(answers_of_transformers, 1, tmp_path / "out", None, asked)
    numbers = sorted(answers)
    assert (theirs.wrong, theirs.prompts) == ({}, [prompts[number] for number in numbers])
    assert theirs.answers == [answers[number] for number in numbers]
    out, came = tensors(tmp_path / "out"), load_file(tower / "model.safetensors")
    tables = [out[f"language_model.{name}"] for name in ("model.embed_tokens.weight", "lm_head.weight")]
    assert [len(table) for table in tables] == [max(tokens, 260)] * 2
    assert tokens > 259 or all(table[259].allclose(table[:259].mean(0), atol=1e-6) for table in tables)
    before = "vision_tower." if kind == "Dinov2" else "vision_tower.vision_model."
    whole = {name.removeprefix(before): value for name, value in out.items() if name.startswith(before)}
    assert whole.keys() == {name.removeprefix("vision_model.") for name in came}
    others = (".layers.2.", ".layer.2.", "post_layernorm", "head.", "mask_token")
    last = [name for name in came if name.startswith("layernorm") or any(part in name for part in others)]
    assert len(last) > 10 and all(came[name].equal(whole[name.removeprefix("vision_model.")]) for name in last)

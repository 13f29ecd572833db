"""Runs that were made here as directories of `transformers`: they answer as the evaluation in the loop does."""

import contextlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.runs import config

MOST = 8
"""Longest answer in tokens."""


def command(arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of `mimo-train`."""
    from mimo_train.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        code = main(arguments)
    return code, said.getvalue()


def _trained(cfg) -> tuple[str, dict[int, list[int]], dict[int, list[int]]]:
    """A checkpoint, and prompts and greedy answers of held-out samples in the loop, by number."""
    from mimo_train.evaluation.greedy import _prompt_length, greedy_answers
    from mimo_train.evaluation.held_out import _evaluating
    from tests.dist.steps import Steps

    run = Steps(cfg)
    run.train(cfg.train.iters)
    folder, iterator = run.save(), run.session.held_out()
    iterator.advance()
    prompts = {}
    for microbatch in iterator.current.microbatches:
        if "input_ids" not in microbatch:  # the encoder's rank
            continue
        rows = zip(microbatch["sample_numbers"].tolist(), microbatch["input_ids"], microbatch["loss_mask"], strict=True)
        prompts |= {number: row[: _prompt_length(mask)].tolist() for number, row, mask in rows}
    with _evaluating(run.model):
        answers = dict(greedy_answers(run.pipeline, run.session.parts.tokenizer, iterator, MOST))
    iterator.close()
    return str(folder), prompts, answers


def questions(shards: Path, count: int, turn: int = 0) -> list[tuple[str, list[bytes]]]:
    """(text of a turn, with <image> at the places of pictures; files of the pictures) of the first records."""
    members: dict[str, dict[str, bytes]] = {}
    for shard in sorted(shards.glob("*.tar")):
        with tarfile.open(shard) as archive:
            for entry in archive:
                key, _, name = entry.name.partition(".")
                members.setdefault(key, {})[name] = archive.extractfile(entry).read()
    found = []
    for record in list(members.values())[:count]:
        text = json.loads(record["json"])["conversations"][turn]["value"]
        found.append((text, [record[name] for name in sorted(record) if name != "json"]))
    return found


def _transformers_answers(
    base: Path, adapter: Path | None, asked: list
) -> tuple[dict, list[list[int]], list[list[int]]]:
    """(what was wrong with the weights, prompts, answers) of transformers, with the adapter of peft."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, found = AutoModelForImageTextToText.from_pretrained(base, output_loading_info=True)
    processor = AutoProcessor.from_pretrained(base)
    if adapter is not None:
        from peft import PeftModel, get_peft_model_state_dict
        from safetensors.torch import load_file

        model = PeftModel.from_pretrained(model, adapter)
        stored = load_file(adapter / "adapter_model.safetensors")
        found["adapter"] = stored.keys() ^ get_peft_model_state_dict(model).keys()
    prompts, answers = [], []
    for text, files in asked:
        pictures = iter(Image.open(io.BytesIO(file)).convert("RGB") for file in files)
        parts = text.split("<image>")
        content = [{"type": "text", "text": parts[0]}] if parts[0] else []
        for part in parts[1:]:
            content += [{"type": "image", "image": next(pictures)}, {"type": "text", "text": part}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=MOST, do_sample=False)
        (prompt,), (whole,) = inputs["input_ids"].tolist(), output.tolist()
        prompts.append(prompt)
        answers.append([token for token in whole[len(prompt) :] if token != processor.tokenizer.eos_token_id])
    return {name: sorted(wrong) for name, wrong in found.items() if wrong}, prompts, answers


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
    """Merged, and as a base with an adapter for peft: all held-out questions."""
    folder, prompts, answers = adapted
    asked = questions(digits / "held_out", len(prompts))
    assert len(prompts) == 40 and len({tuple(answer) for answer in answers}) > 10
    ((code, said),) = run_ranks(command, 1, ["export", folder, "--to", str(tmp_path / "merged"), "--merge"])
    assert code == 0 and "images and language as one LLaVA (siglip_vision_model, llama)" in said
    ((code, said),) = run_ranks(command, 1, ["export", folder, "--to", str(tmp_path / "apart")])
    assert code == 0 and "adapters of images and language for peft" in said
    ((wrong, seen, found),) = run_ranks(_transformers_answers, 1, tmp_path / "merged", None, asked)
    assert (wrong, seen) == ({}, prompts) and found == answers
    adapter = json.loads((tmp_path / "apart" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "apart" / "base")
    ((wrong, _, bare),) = run_ranks(_transformers_answers, 1, tmp_path / "apart" / "base", None, asked)
    ((also, _, found),) = run_ranks(_transformers_answers, 1, tmp_path / "apart" / "base", tmp_path / "apart", asked)
    assert (wrong, also) == ({}, {}) and bare != answers and found == answers

"""The same messages are the same tokens in training, generate, evaluate, and for readers of the export."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data.records.records import parse_record
from mimo_train.config.compose import load
from mimo_train.config.pretrained.config_of_directory import config_of_directory
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.evaluation.benchmarks.requests import request_of
from mimo_train.evaluation.generation.prompts import Prompts
from mimo_train.hf.directory import write_config
from mimo_train.hf.joined import llava
from mimo_train.inputs.datasets import build_dataset, tokenizer_of
from tests.dist.models import composites
from tests.tars import write_tar
from tests.unit.data.text.chat_templates import LLAVA, save_tokenizer

SIZES = [(30, 50), (61, 25), (70, 45)]
TALK = [
    ("system", ["be short"]),
    ("user", ["which digit is green, ", 0, " or ", 1, "?"]),
    ("assistant", ["three"]),
    ("user", [2, "read the digits\nfrom left to right"]),
    ("assistant", ["it is three: 3"]),
]
"""(role, parts), an image as its number."""


def _ours(folder: Path) -> Any:
    """The demo's export."""
    cfg = load("vlm_digits", ["layout=one_process", f"data.shards={folder}"], weights=False)
    tokenizer = tokenizer_of(cfg)
    document = llava(cfg, tokenizer, embedding_rows(cfg.llm, tokenizer.vocab_size))
    document.write_files(folder)
    write_config(folder, document.config, "fp32")
    return cfg


def _llava_1_5(folder: Path) -> Any:
    import transformers

    save_tokenizer(folder, LLAVA)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pad = tokenizer.convert_tokens_to_ids("<image>")
    text, vision = transformers.LlamaConfig(**composites.LLAVA_TEXT), composites.LLAVA_VISION
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision), text_config=text, image_token_index=pad
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    side = composites.TILE
    images = transformers.CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    transformers.LlavaProcessor(
        images, tokenizer, patch_size=composites.PATCH, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)  # fmt: skip
    return config_of_directory(folder)


def _of_transformers(kind: str, folder: Path) -> Any:
    import transformers

    folder = folder / "model"
    composites.made(kind).save_pretrained(folder)
    composites._processor(folder, kind, transformers)
    return config_of_directory(folder)


MODELS = {
    "ours": _ours,
    "llava_1_5": _llava_1_5,
    "llava_onevision": partial(_of_transformers, "llava_onevision"),
    "qwen2_5_vl": partial(_of_transformers, "qwen2_5_vl"),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_generate_evaluate_and_the_export_have_the_same_prompt(name, tmp_path):
    from transformers import AutoProcessor

    cfg = MODELS[name](tmp_path)
    directory = Path(cfg.language.pretrained or tmp_path)
    processor, tokenizer = AutoProcessor.from_pretrained(directory), tokenizer_of(cfg)
    images = [composites.image(*size) for size in SIZES]
    theirs = [_asked(processor, TALK[:count], images) for count in (2, 4)]

    prompts, media = Prompts(cfg, tokenizer), []
    for at, size in enumerate(SIZES):
        (tmp_path / f"{at}.png").write_bytes(composites.file_of(size))
        media.append(prompts.medium("image", tmp_path / f"{at}.png"))
    record = json.dumps({"messages": _messages(TALK, images=None)}).encode()
    counts = {"image": len(SIZES)}
    turns = parse_record(record, "json", "key", counts).turns
    generated = [prompts.of_conversation(turns[:count], media[: 3 if count > 2 else 2]).ids for count in (2, 4)]
    assert generated == theirs

    asked = [request_of(_messages(TALK[:count], images)) for count in (2, 4)]
    for request, ids in zip(asked, theirs, strict=True):
        of_request = [prompts.medium_of(kind, raw, "file") for kind, raw in request.files]
        assert prompts.of_conversation(request.turns, of_request).ids == ids

    files = [(f"a.{at}.png", composites.file_of(size)) for at, size in enumerate(SIZES)]
    shard = write_tar(tmp_path / "shards" / "0.tar", [("a.json", record), *files])
    cfg = replace(cfg, data=replace(cfg.data, shards=str(shard), demo="", sequence_length=400))
    sample, bad = build_dataset(cfg, tokenizer).read_text(0)
    assert bad is None
    trained = sample.input_ids.tolist()
    for ids in theirs:
        assert trained[: len(ids)] == ids
    # ... and the answers, which readers of the export see as earlier turns.
    whole = _asked(processor, TALK, images, add_generation_prompt=False)
    assert (trained + whole[len(trained) :])[: len(whole)] == whole, "training"


def _messages(talk: list, images: list | None) -> list[dict[str, Any]]:
    return [
        {
            "role": role,
            "content": [
                {"type": "text", "text": part} if isinstance(part, str)
                else {"type": "image"} | ({"image": images[part], "url": images[part]} if images else {})
                for part in parts
            ],
        }
        for role, parts in talk
    ]  # fmt: skip


def _asked(processor: Any, talk: list, images: list, *, add_generation_prompt: bool = True) -> list[int]:
    """Ids of messages as transformers' clients make them."""
    messages = _messages(talk, images)
    for part in (part for message in messages for part in message["content"]):
        part.pop("url", None)
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=True, return_tensors="pt"
    )
    return inputs["input_ids"][0].tolist()

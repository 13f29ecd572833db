"""Questions about the images of shards, and the answers of `mimo-train generate` and of transformers."""

import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from data.records.conversation import split_markers

MOST = 8
"""Longest answer in tokens."""


def questions(shards: Path, count: int, turn: int = 0) -> list[tuple[str, list[bytes]]]:
    """(text of a turn, with <image> at the places of images; files of the images) of the first records."""
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


def answers_here(model: Path, asked: list, most: int = MOST) -> list[tuple[list[int], str]]:
    """(tokens, text) of the answers of `mimo-train generate`, from a run or a directory."""
    from mimo_train.evaluation.generation.answers import Answers, Chat
    from mimo_train.evaluation.generation.decoder import Decoder
    from mimo_train.evaluation.generation.options import Sampling
    from mimo_train.evaluation.generation.prompts import Prompts
    from mimo_train.evaluation.open_model import open_model

    opened = open_model(model)
    parts = opened.parts
    prompts, found = Prompts(opened.cfg, parts.tokenizer), []
    chat = Chat(prompts, Answers(opened.cfg, Decoder(parts.pipeline), parts.tokenizer, Sampling(), most))
    for text, files in asked:
        chat.reset()
        with tempfile.TemporaryDirectory() as folder:
            for number, file in enumerate(files):
                Path(folder, str(number)).write_bytes(file)
                chat.attached.append(prompts.medium("image", Path(folder, str(number))))
        answer = chat.say(text)
        found.append((answer.tokens, answer.text))
    return found


def logits_here(model: Path, rows: list[list[int]], file: Path | None = None) -> Any:
    """Logits [rows, sequence, vocabulary] of our own model of a run or a directory, as float64 of NumPy.

    Args:
        rows: ids, of one length; placeholders of an image among them.
        file: the image of each row.
    """
    import torch

    from mimo_train.evaluation.generation.prompts import Prompts
    from mimo_train.evaluation.open_model import open_model

    opened = open_model(model)
    parts = opened.parts
    prompts, chunk, found = Prompts(opened.cfg, parts.tokenizer), parts.pipeline.model[0].eval(), []
    for ids in rows:
        prompt = prompts.with_inputs(ids, prompts.inputs([prompts.medium("image", file)] if file else []))
        batch: dict[str, Any] = {"input_ids": torch.tensor([ids]), "position_ids": prompt.positions_to(len(ids))}
        batch |= {"modality_inputs": prompt.inputs} if prompt.inputs else {}
        counts = {name: [number] for name, number in prompt.rows.items()}
        parts.pipeline.shapes.begin(counts)
        with torch.no_grad():
            output = chunk(**batch, attention_mask=None)
        logits = output[0] if isinstance(output, tuple) else output
        found.append(logits[..., : opened.cfg.llm.vocab_size or parts.tokenizer.vocab_size].double())
    return torch.cat(found).numpy()


class Theirs(NamedTuple):
    """What transformers answers."""

    wrong: dict[str, list[str]]
    """What was wrong with the weights."""
    prompts: list[list[int]]
    """Tokens."""
    answers: list[list[int]]
    """Tokens."""
    texts: list[str]
    """Of the answers."""


def answers_of_transformers(base: Path, adapter: Path | None, asked: list, most: int = MOST) -> Theirs:
    """Greedy answers of an exported directory, with the adapter of peft. Messages are those of a client: images, and
    texts without the line breaks of records."""
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
    prompts, answers, texts = [], [], []
    for text, files in asked:
        images = iter(Image.open(io.BytesIO(file)).convert("RGB") for file in files)
        content = [
            {"type": "image", "image": next(images)} if part.kind == "image" else {"type": "text", "text": part.text}
            for part in split_markers(text)
        ]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=most, do_sample=False)
        (prompt,), (whole,) = inputs["input_ids"].tolist(), output.tolist()
        prompts.append(prompt)
        answers.append([token for token in whole[len(prompt) :] if token != processor.tokenizer.eos_token_id])
        texts.append(processor.decode(whole[len(prompt) :], skip_special_tokens=True))
    return Theirs({name: sorted(wrong) for name, wrong in found.items() if wrong}, prompts, answers, texts)

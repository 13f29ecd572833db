"""Samples as a user of webdataset and Pillow reads them in the training process, against the work of our loader.

Images become uint8 tensors, turns become ids with the loss on those of the assistant, rows are padded. Nothing is
shuffled, resized, checked, counted or made ready for a resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from data.text.tokens import Tokenizer

Step = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]
"""Ids and labels [samples, length], -100 where there is no loss; images [3, height, width] of these samples."""


def read_steps(shards: Path, samples: int, tokenizer: Tokenizer, length: int) -> Iterator[Step]:
    """Steps of `samples` samples of `shards`, again and again; longer texts are cut to `length` ids."""
    import webdataset  # only the extra `dev` has it

    while True:
        of_step: list[dict[str, Any]] = []
        for sample in webdataset.WebDataset(sorted(map(str, shards.glob("*.tar"))), shardshuffle=False).decode("pil"):
            of_step.append(sample)
            if len(of_step) == samples:
                yield to_step(of_step, tokenizer, length)
                of_step = []


def to_step(samples: list[dict[str, Any]], tokenizer: Tokenizer, length: int) -> Step:
    """What webdataset has decoded, as tensors."""
    ids = torch.full((len(samples), length), tokenizer.pad_id)
    labels = torch.full((len(samples), length), -100)
    for row, sample in enumerate(samples):
        found, learned = to_ids(sample, tokenizer)
        ids[row, : len(found[:length])] = torch.tensor(found[:length])
        labels[row, : len(found[:length])] = torch.tensor(learned[:length])
    images = [image for sample in samples for image in sample.values() if isinstance(image, Image.Image)]
    return (
        ids,
        labels,
        [torch.from_numpy(np.array(one.convert("RGB"))).permute(2, 0, 1).contiguous() for one in images],
    )


def to_ids(sample: dict[str, Any], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of a caption or of a conversation, and its labels."""
    if "txt" in sample:
        found = tokenizer.encode(sample["txt"])
        return found, found
    ids: list[int] = []
    labels: list[int] = []
    for is_answer, text in turns_of(sample["json"]):
        found = tokenizer.encode(text)
        ids += found
        labels += found if is_answer else [-100] * len(found)
    return ids, labels


def turns_of(record: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """(whether the assistant says it, text) of each turn, of LLaVA's conversations or of the messages of a chat."""
    for turn in record.get("conversations", ()):
        yield turn["from"] == "gpt", turn["value"]
    for message in record.get("messages", ()):
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "<image>") for part in content)
        yield message["role"] == "assistant", content

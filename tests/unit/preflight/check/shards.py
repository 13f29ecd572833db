"""Shards for tests of `check`."""

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from encoders.weight_map import spelt
from mimo_train.cli import main
from mimo_train.config.compose import load
from mimo_train.config.pretrained.weight_files import SINGLE
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.hf.parts import pretrained_parts
from tests.tars import write_tar


def image(width: int = 20, height: int = 20) -> bytes:
    raw = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(raw, "PNG")
    return raw.getvalue()


def heic() -> bytes:
    """Return an image whose header is read here, and which pillow-heif decodes."""
    library, raw = pytest.importorskip("pillow_heif"), io.BytesIO()
    library.from_pillow(Image.new("RGB", (64, 64), (200, 30, 30))).save(raw)
    return raw.getvalue()


def record(question: str, answer: str = "seven") -> bytes:
    return json.dumps(
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
    ).encode()


def shard(path: Path, *members: tuple[str, bytes]) -> Path:
    return write_tar(path, members)


def sound(count: int = 4) -> list[tuple[str, bytes]]:
    """Return samples of 32 tokens: begin, 2 role markers, 16 of the image, 6 of text, seven, 2 ends. 6 carry loss."""
    members = []
    for at in range(count):
        members += [(f"{at:04d}.png", image()), (f"{at:04d}.json", record("<image>\nWhat?"))]
    return members


def on(shards, **more: str) -> list[str]:
    """Return the overrides of a run on `shards`, without a demo."""
    values = {"data.demo": "", "data.validation_shards": "", "data.shards": str(shards), **more}
    return ["vlm_digits", *(f"{key}={value}" for key, value in values.items())]


def write_weights(folder: Path, *overrides: str) -> Path:
    """Write a file with all tensors of the model that a directory's config.json describes, each constant."""
    cfg = load("vlm_digits", [f"modules.language.pretrained={folder}", *overrides])
    tensors = {}
    for part in pretrained_parts(cfg, embedding_rows(cfg.llm, cfg.llm.vocab_size)):
        if part.folder == folder:
            rows = part.weights.row_counts()
            tensors |= {spelt(name, part.weights.prefixes[0]): torch.zeros(count, 1) for name, count in rows.items()}
    save_file(tensors, folder / SINGLE)
    return folder / SINGLE


def run(capsys, *argv: str) -> tuple[int, str, list[str]]:
    """Return (exit code, stdout, faults without their `error: `)."""
    code = main(["check", *argv])
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (code == 1) == bool(lines)
    if lines:
        assert lines.pop().endswith("this run cannot start")
    assert all(line.startswith("error: ") for line in lines)
    return code, out, [line.removeprefix("error: ") for line in lines]

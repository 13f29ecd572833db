"""docs/recipes.md does what it says: its commands, on tiny models and data."""

import json
import re
import shlex
from pathlib import Path

import pytest

from mimo_train.config.compose import load
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.commands import command
from tests.dist.hf.models import make_llama
from tests.dist.ranks import run_ranks
from tests.dist.runs import train_rank
from tests.unit.data.helpers import encode_image

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
TINY = ("train.iters=2", "train.global_batch_size=4", "train.micro_batch_size=2", "train.precision=fp32")
TINY += ("layout=one_process", "run.device=cpu", "data.workers=0", "data.sequence_length=200", "optim.warmup_iters=0")
TINY += ("train.report_samples=2", "train.eval_samples=2", "log.tensorboard=false", "checkpoint.save_interval=0")
RECORDS = {"blip_laion_cc_sbu_558k.json": "pretrain", "llava_v1_5_mix665k.json": "instruct"}
RUNS = {
    "llava_1_5_pretrain": {"input_projections"},
    "llava_1_5_finetune": {"input_projections", "decoder", "embedding"},
}


def make_clip(folder: Path) -> None:
    """On a rank, as `make_llama`."""
    import torch
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    images = {"image_size": 28, "patch_size": 14}
    CLIPModel(CLIPConfig(text_config=sizes | {"vocab_size": 50}, vision_config=sizes | images)).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the data and the models that the page begins with."""
    folder = tmp_path_factory.mktemp("recipes")
    run_ranks(_make_models, 1, folder)
    for number, (name, media) in enumerate(RECORDS.items()):
        (folder / media).mkdir()
        records = []
        for at in range(520):
            (folder / media / f"{at}.jpg").write_bytes(encode_image(20, 30, seed=at)) if at < 20 else None
            asked, said = (
                {"from": "human", "value": f"What is {at}?\n<image>"},
                {"from": "gpt", "value": f"It is {number}."},
            )
            records.append({"id": str(at), "image": f"{at % 20}.jpg", "conversations": [asked, said]})
        (folder / name).write_text(json.dumps(records))
    (folder / "photo.jpg").write_bytes(encode_image(40, 30))
    return folder


def _make_models(folder: Path) -> None:
    make_llama(folder / "models" / "vicuna-7b-v1.5")
    make_clip(folder / "models" / "clip-vit-large-patch14-336")


def commands() -> list[list[str]]:
    """Of the section about LLaVA, in order."""
    section = PAGE.read_text().partition("## LLaVA-1.5")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", section, flags=re.S | re.M)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_the_page_from_a_json_to_a_directory(place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    said = [_run([word.replace("/models/", f"{place}/models/") for word in command]) for command in commands()]
    assert [command[:2] for command in commands()] == [
        *[["mimo-train", "shards"]] * 2,
        *[["scripts/train_vlm.sh", f"recipes/{name}"] for name in RUNS],
        ["mimo-train", "generate"],
        ["mimo-train", "export"],
    ]
    assert "shards/llava_pretrain/held_out: 512 samples" in said[0]
    first, second = (read_metrics(place / "runs" / name / "metrics.jsonl") for name in RUNS)
    assert [len([line for line in lines if "lm loss" in line]) for lines in (first, second)] == [2, 2]
    assert any("eval/exact_match" in line for line in second)
    assert list((place / "exported").rglob("*.safetensors"))


def _run(line: list[str]) -> str:
    program, *arguments = line
    if program == "scripts/train_vlm.sh":
        cfg = load(arguments[0], [*arguments[1:], *TINY])
        run_ranks(train_rank, 1, cfg)
        return ""
    ((code, said),) = run_ranks(command, 1, arguments)
    assert code == 0, said
    return said

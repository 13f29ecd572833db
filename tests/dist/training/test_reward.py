"""Reward models: the same numbers at any layout, and as transformers scores them. `e2e/test_trl.py` has trl's."""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_train.config.compose import load
from tests.dist.commands import command
from tests.dist.hf.models import make_llama
from tests.dist.layout_tables import PACKED
from tests.dist.ranks import run_ranks
from tests.dist.runs import TINY, TOLERANCE, config, largest_difference
from tests.dist.steps import Steps, whole
from tests.tars import write_tar

STEPS, BOUND = 3, 1e-5
REWARD = (
    *("train.task=reward", "train.global_batch_size=8", "train.micro_batch_size=4", "train.iters=5"),
    *("data.sequence_length=128", "optim.warmup_iters=0"),
)
PLAIN_ADAM = (
    *("optim.lr=1e-3", "optim.min_lr=1e-3", "optim.eps=1e-8", "optim.weight_decay=0", "optim.decay=constant"),
    *("optim.clip_grad=1", "data.shuffle=false"),
)
SIZE = "modules.language.layout."
ON_ONE: dict[str, tuple[str, ...]] = {
    "text": (),
    "packed": PACKED,
    "lora": ("modules.language.lora.rank=4",),
    "images": ("layout=one_process",),
}
ON_TWO: dict[str, tuple[str, tuple[str, ...]]] = {
    "tp2, sp": ("text", (f"{SIZE}tp=2", f"{SIZE}sp=true")),
    "pp2": ("text", (f"{SIZE}pp=2",)),
    "cp2, packed": ("text", (f"{SIZE}cp=2", *PACKED)),
    "lora, tp2": ("lora", (f"{SIZE}tp=2", *ON_ONE["lora"])),
    "images, apart": ("images", ("layout=two_processes",)),
}
"""Layout -> the run on one process that has the same numbers, and the changes."""


def write_pairs(folder: Path, samples: int = 40, demo: Path | None = None) -> Path:
    """Pairs of texts of several lengths, every third with a margin; with the images of a demo."""
    media = []
    if demo:
        with tarfile.open(demo) as tar:
            media = [tar.extractfile(member).read() for member in tar if member.name.endswith(".png")]
    members: list[tuple[str, bytes]] = []
    for number in range(samples):
        words = [f"{'abcdefgh'[(number * at) % 8] * (1 + (number + at) % 5)}" for at in range(1, 12)]
        record: dict[str, Any] = {"prompt": " ".join(words[:3]), "chosen": " ".join(words[3 : 5 + number % 6])}
        record |= {"rejected": " ".join(words[::-2])} | ({"margin": number / 20} if number % 3 == 0 else {})
        members += [(f"{number:03d}.png", media[number])] if media else []
        members.append((f"{number:03d}.json", json.dumps(record).encode()))
    write_tar(folder / "train" / "s.tar", members)
    return folder


@pytest.fixture(scope="module")
def pairs(digits, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pairs")
    images = min((digits / "train").glob("*.tar"))
    return {"text": write_pairs(folder / "text"), "images": write_pairs(folder / "images", demo=images)}


def of_llama(run_dir: Path, pairs: Path, folder: Path, *changes: str):
    tiny = [key for key in TINY if not key.startswith("modules.")]
    places = (f"run.dir={run_dir}", f"data.shards={pairs}/train", "data.validation_shards=", "data.demo=")
    return load("gpt_tiny", (*tiny, *places, *REWARD, f"modules.language.pretrained={folder}", *changes))


def steps_of(run: Steps, steps: int = STEPS) -> list[tuple[float | None, float | None]]:
    """(loss, gradient norm) of each of the next steps; the loss on the language model's last stage, else None."""
    points = []
    for _ in range(steps):
        ((_, norm),) = run.train()
        loss = run.result.losses.get("loss")
        points.append((None if loss is None else float(loss), norm))
    return points


def trained(cfgs: dict[str, Any]) -> dict[str, list[tuple]]:
    """Curve of each run on this rank."""
    curves = {}
    for name, cfg in cfgs.items():
        run = Steps(cfg)
        curves[name] = steps_of(run)
        run.session.close()
    return curves


def test_every_layout_trains_to_the_numbers_of_one_process(pairs, tmp_path):
    def cfg(name: str, kind: str, changes: tuple[str, ...]):
        images = kind == "images"
        model = "vlm_digits" if images else "gpt_tiny"
        return config(model, tmp_path / name, pairs["images" if images else "text"], *REWARD, *changes)

    (one,) = run_ranks(trained, 1, {name: cfg(name, name, changes) for name, changes in ON_ONE.items()})
    two = run_ranks(trained, 2, {name: cfg(name, kind, changes) for name, (kind, changes) in ON_TWO.items()})
    assert max(largest_difference(whole([one["text"]]), whole([one["packed"]]))) < TOLERANCE
    for name, (kind, _) in ON_TWO.items():
        assert max(largest_difference(whole([one[kind]]), whole([rank[name] for rank in two]))) < TOLERANCE, name
    assert all(curve[-1][0] < curve[0][0] for curve in one.values()), "what does not learn says nothing"


def _values(run: Steps) -> list[np.ndarray]:
    """Value of each answer's last token, with its token ids in front, from the first step."""
    iterator, rows = run.session.data, []
    iterator.advance()
    collected = run.pipeline.run(run.step_func, iterator, forward_only=True, collect_non_loss_data=True)
    for batch, values in zip(iterator.current.microbatches, collected, strict=True):
        for ids, of_row, length in zip(batch["input_ids"], values["losses"], batch["lengths"], strict=True):
            rows.append(np.array([*ids[:length].tolist(), float(of_row[length - 1])]))
    return rows


def _scores(folder: Path, rows: list[np.ndarray], adapter: Path | None = None) -> list[float]:
    """Scores of transformers for the token ids in front of each row's value, with an adapter of peft."""
    import torch
    from transformers import AutoModelForSequenceClassification

    labels = {"num_labels": 1, "pad_token_id": 0} if adapter else {}
    model = AutoModelForSequenceClassification.from_pretrained(folder, **labels)
    assert (type(model).__name__, model.config.num_labels) == ("LlamaForSequenceClassification", 1)
    pad, width = model.config.pad_token_id, max(map(len, rows))
    if adapter:
        from peft import PeftModel

        assert sorted(path.name for path in adapter.glob("*.safetensors")) and not (adapter / "base").exists()
        model = PeftModel.from_pretrained(model, adapter)
    ids = torch.tensor([[*row[:-1].astype(int), *[pad] * (width - len(row))] for row in rows])
    with torch.no_grad():
        return model(ids, attention_mask=(ids != pad).long()).logits[:, 0].tolist()


def _exported(root: Path, pairs: Path) -> dict[str, Any]:
    """Values here and in transformers after an export, of a run that resumed and of one with adapters."""
    make_llama(root / "llama")
    rate, lora = ("optim.eps=1e-8", "optim.lr=0.01"), ("modules.language.lora.rank=4",)
    uninterrupted = steps_of(Steps(of_llama(root / "whole", pairs, root / "llama", *rate)), 4)
    found: dict[str, Any] = {"scores": {}}
    for name, changes in (("run", rate), ("lora", (*rate, *lora))):
        run = Steps(of_llama(root / name, pairs, root / "llama", *changes))
        assert steps_of(run, 2) == uninterrupted[:2] or name == "lora"
        run.save()
        run.session.close()
        to = root / f"of {name}"
        if name == "lora":
            assert command(["export", str(root / name), "--to", str(root / "adapter")])[0] == 0
        assert command(["export", str(root / name), "--to", str(to), *["--merge"] * (name == "lora")])[0] == 0
        rows = _values(Steps(of_llama(root / name, pairs, root / "llama", *changes)))
        found["scores"][name] = [row[-1] for row in rows], _scores(to, rows)
        if name == "lora":
            found["scores"]["adapter"] = [row[-1] for row in rows], _scores(root / "llama", rows, root / "adapter")
    resumed = Steps(of_llama(root / "run", pairs, root / "llama", *rate))
    found["curves"] = uninterrupted, uninterrupted[:2] + steps_of(resumed, 2)
    held_out = (f"data.validation_shards={pairs}/train", "train.eval_samples=6")
    again = Steps(of_llama(root / "again", pairs, root / "of run", *PLAIN_ADAM, *held_out))
    rows = _values(again)
    found["scores"]["again"] = [row[-1] for row in rows], _scores(root / "of run", rows)
    found["evaluated"] = again.session.held_out.evaluate(0, again.step_func)
    again.session.close()
    samples = ["--data", f"{pairs}/train", "--limit", "6", "--output", str(root / "scores")]
    found["of the export"] = command(["evaluate", str(root / "of run"), *samples])
    return found


@pytest.fixture(scope="module")
def exported(pairs, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("exported")
    return root, run_ranks(_exported, 1, root, pairs["text"])[0]


def test_an_export_scores_as_the_run_does_and_a_resumed_run_goes_on(exported):
    root, found = exported
    uninterrupted, resumed = found["curves"]
    assert uninterrupted == resumed
    for name, (here, there) in found["scores"].items():
        assert np.ptp(here) > 1e-3, name
        np.testing.assert_allclose(there, here, atol=BOUND * np.abs(here).max(), err_msg=name)
    assert found["evaluated"].keys() >= {"eval/loss", "eval/rewards/accuracies", "eval/rewards/margins"}
    assert found["evaluated"]["eval/samples"] == 6 and "eval/exact_match" not in found["evaluated"]
    assert found["of the export"][0] == 0, found["of the export"]
    results = json.loads((root / "scores" / "results.json").read_text())
    assert results["metrics"] == pytest.approx(found["evaluated"], rel=1e-5)

"""The recipes of LLaVA-1.5 with tiny models, as the page walks through them: the projector, then the language model,
then a directory that transformers loads."""

from pathlib import Path

from mimo_train.config.compose import load
from tests.dist.commands import command
from tests.dist.hf.asking import answers_of_transformers, questions
from tests.dist.hf.models import make_llama
from tests.dist.hf.test_export import _make_tower
from tests.dist.hf.test_pretrained import tensors
from tests.dist.ranks import run_ranks
from tests.dist.runs import train_on_ranks

TINY = (
    "train.iters=2", "train.global_batch_size=4", "train.micro_batch_size=2", "train.precision=fp32",
    "data.sequence_length=160", "data.workers=0", "data.demo=", "data.validation_shards=", "log.tensorboard=false",
    "layout=two_processes",
)  # fmt: skip
TOWER, PROJECTOR = "vision_tower.vision_model.", "multi_modal_projector."


def export(run: Path, to: Path) -> dict:
    ((code, said),) = run_ranks(command, 1, ["export", str(run), "--to", str(to)])
    assert code == 0 and "images and language as one LLaVA (clip_vision_model, llama)" in said, said
    return tensors(to)


def part(there: dict, before: str) -> dict:
    return {name.removeprefix(before): value for name, value in there.items() if name.startswith(before)}


def same(one: dict, other: dict) -> bool:
    assert one.keys() == other.keys() and one
    return all(value.equal(other[name]) for name, value in one.items())


def test_projector_then_language_model_then_a_directory(digits, tmp_path):
    run_ranks(_make_tower, 1, "CLIP", tmp_path / "tower")
    run_ranks(make_llama, 1, tmp_path / "llama")
    both = (f"modules.images.pretrained={tmp_path}/tower", f"modules.language.pretrained={tmp_path}/llama")
    for stage, more in (("pretrain", ()), ("finetune", (f"checkpoint.weights={tmp_path}/pretrain", "optim.lr=1e-3"))):
        places = (f"run.dir={tmp_path}/{stage}", f"data.shards={digits}/train")
        lines = train_on_ranks(load(f"recipes/llava_1_5_{stage}", (*TINY, *places, *both, *more)))
        assert [line["step"] for line in lines if "lm loss" in line] == [1, 2]
    first, last = (export(tmp_path / stage, tmp_path / f"out_{stage}") for stage in ("pretrain", "finetune"))
    tower = part(tensors(tmp_path / "tower"), "vision_model.") or tensors(tmp_path / "tower")
    assert same(part(first, TOWER), tower) and same(part(last, TOWER), tower)
    llama = tensors(tmp_path / "llama")
    assert same(part(first, "language_model."), llama) and not same(part(last, "language_model."), llama)
    assert not same(part(first, PROJECTOR), part(last, PROJECTOR))
    asked = questions(digits / "held_out", 2)
    (theirs,) = run_ranks(answers_of_transformers, 1, tmp_path / "out_finetune", None, asked)
    assert theirs.wrong == {} and len(theirs.answers) == 2

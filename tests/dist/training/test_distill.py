"""Distillation is equal to a plain loop of torch with transformers, and the same at every layout of both models."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mimo_train.config.compose import load
from mimo_train.layout.run import resolve
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.hf import models
from tests.dist.hf.one_step import OPTIM, overrides
from tests.dist.ranks import run_ranks
from tests.dist.runs import train_on_ranks, train_rank

STEPS, WEIGHT, TEMPERATURE, BOUND = 5, 0.7, 2.0, 1e-5
LAYOUT, TEACHER = "modules.language.layout", "distill.layout.language"
NUMBERS = ("loss", "kl", "lm loss", "grad_norm")
EVALUATED = ("eval/loss", "eval/kl", "eval/lm loss")


def config(name: str, run_dir: Path, demo: Path, folder: Path, *others: str):
    """A run of five steps from `folder/student`, taught by `folder/teacher`."""
    of_model = {"gpt_tiny": "modules.language.pretrained", "vlm_digits": "pretrained"}[name]
    return load(
        name,
        [
            *overrides(run_dir, demo),
            *(f"{of_model}={folder}/student", f"distill.teacher={folder}/teacher", "train.task=distill"),
            *(f"distill.weight={WEIGHT}", f"distill.temperature={TEMPERATURE}", f"train.iters={STEPS}"),
            *("train.global_batch_size=8", "train.micro_batch_size=4", "data.sequence_length=160"),
            *(f"data.validation_shards={demo}/held_out", "train.eval_samples=8"),
            *others,
        ],
    )


def make_llamas(folder: Path) -> None:
    models.SPREAD["LlamaForCausalLM"] = 0.25
    models.make_llama(folder / "student")
    models.make_llama(folder / "teacher", hidden_size=72, num_hidden_layers=2)


def make_llavas(folder: Path) -> None:
    """A teacher that cuts an image into 64 patches instead of 36."""
    models.make_llava(folder / "student")
    models.TOWER["image_size"] = 56
    models.make_llava(folder / "teacher")


def learn_alone(make, name: str, run_dir: Path, demo: Path, folder: Path, *others: str) -> dict[str, list]:
    """On a rank: make the directories, train here, then with transformers."""
    make(folder)
    cfg = config(name, run_dir, demo, folder, *others)
    train_rank(cfg)
    return {"ours": numbers_of(run_dir), "torch": PlainLoop(cfg, folder).train()}


def numbers_of(run_dir: Path) -> list[list[float]]:
    """NUMBERS of every step, then EVALUATED at the end."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    steps = [[line[name] for name in NUMBERS] for line in lines if "grad_norm" in line]
    evaluations = [[line[name] for name in EVALUATED] for line in lines if "eval/kl" in line]
    return [*steps, evaluations[-1]]


class PlainLoop:
    """The same steps with transformers and torch alone: a sample at a time, without padding."""

    def __init__(self, cfg, folder: Path):
        import transformers

        from mimo_train.run_dataset import open_dataset
        from mimo_train.training.teacher.source import open_teacher

        kind = transformers.AutoModelForImageTextToText if cfg.encoders else transformers.AutoModelForCausalLM
        self.student, self.teacher = (
            kind.from_pretrained(folder / name, attn_implementation="eager") for name in ("student", "teacher")
        )
        configs = cfg, open_teacher(resolve(cfg)).run.cfg
        self.sets = {split: [open_dataset(each, split=split) for each in configs] for split in ("train", "validation")}
        self.process = {}
        if cfg.encoders:
            load = transformers.AutoImageProcessor.from_pretrained
            self.process = {name: load(folder / name) for name in ("student", "teacher")}

    def train(self) -> list[list[float]]:
        found, optimizer = [], None
        for step in range(1, STEPS + 1):
            self.student.zero_grad()
            sums = self._sums(step)
            sums[0].backward()
            trained = [value for value in self.student.parameters() if value.grad is not None]
            if optimizer is None:
                groups = [
                    {"params": [value for value in trained if (value.ndim > 1) == decays], "weight_decay": decay}
                    for decays, decay in ((True, OPTIM["weight_decay"]), (False, 0.0))
                ]
                betas = OPTIM["beta1"], OPTIM["beta2"]
                optimizer = torch.optim.AdamW(groups, lr=OPTIM["lr"], eps=OPTIM["eps"], betas=betas)
            norm = torch.nn.utils.clip_grad_norm_(trained, OPTIM["clip_grad"])
            optimizer.step()
            loss, divergence, entropy = (float(value) for value in sums)
            found.append([loss, divergence, entropy, float(norm)])
        with torch.no_grad():
            return [*found, [float(value) for value in self._sums(None)]]

    def _sums(self, step: int | None) -> list[torch.Tensor]:
        """Mean loss, divergence and cross entropy of the tokens of a step, or of the held-out samples."""
        sets = self.sets["train" if step else "validation"]
        divergence, entropy, tokens = torch.zeros(()), torch.zeros(()), 0
        for number in sets[0].step_samples(step) if step else range(8):
            student, labels = self._logits(self.student, "student", sets[0][number])
            with torch.no_grad():
                teacher, same = self._logits(self.teacher, "teacher", sets[1][number])
            assert torch.equal(labels, same)
            log_s, log_t = (F.log_softmax(logits / TEMPERATURE, -1) for logits in (student, teacher))
            divergence = divergence + F.kl_div(log_s, log_t, reduction="sum", log_target=True)
            entropy = entropy + F.cross_entropy(student, labels, reduction="sum")
            tokens += len(labels)
        loss = WEIGHT * TEMPERATURE**2 * divergence + (1 - WEIGHT) * entropy
        return [value / tokens for value in (loss, divergence, entropy)]

    def _logits(self, model, name: str, sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and labels of the learned tokens of a sample."""
        options, images = {}, [np.asarray(image) for image in sample.media.get("images", ())]
        if images:
            cut = {"do_resize": False, "do_center_crop": False, "return_tensors": "pt"}
            options["pixel_values"] = self.process[name](images, **cut).pixel_values
        logits = model(input_ids=sample.input_ids[None], **options).logits[0]
        learned = sample.loss_mask > 0
        return logits[learned], sample.labels[learned]


@pytest.fixture(scope="module")
def llamas(prose, tmp_path_factory) -> tuple[Path, dict[str, list]]:
    folder = tmp_path_factory.mktemp("llamas")
    (learned,) = run_ranks(learn_alone, 1, make_llamas, "gpt_tiny", folder / "run", prose, folder)
    return folder, learned


def test_steps_and_evaluation_of_a_text_model_equal_a_plain_loop(llamas):
    _require_near(*llamas[1].values(), BOUND)
    assert llamas[1]["ours"][0][1] > 0.05, "the models differ"


def test_steps_of_a_vlm_equal_a_plain_loop(digits, tmp_path):
    """The teacher has more tokens for an image, and replicas on the ranks of both of the student's modules."""
    longer = "distill.sequence_length=300"
    run = (tmp_path / "run", digits, tmp_path)
    (learned,) = run_ranks(learn_alone, 1, make_llavas, "vlm_digits", *run, "layout=one_process", longer)
    _require_near(*learned.values(), BOUND)
    of_teacher = (f"{TEACHER}.dp=2", "distill.first_rank.language=0", longer)
    apart = config("vlm_digits", tmp_path / "apart", digits, tmp_path, "layout=two_processes", *of_teacher)
    train_on_ranks(apart)
    _require_near(numbers_of(tmp_path / "apart"), learned["ours"], BOUND)


ROWS = {
    "the student as transformers has it": ["modules.language.implementation=transformers"],
    "tp2 sp, teacher dp2": [f"{LAYOUT}.tp=2", f"{LAYOUT}.sp=true", f"{TEACHER}.dp=2"],
    "pp2, teacher tp2": [f"{LAYOUT}.pp=2", f"{TEACHER}.tp=2", "distill.top_k=1000"],
    "cp2, teacher pp2": [f"{LAYOUT}.cp=2", f"{TEACHER}.pp=2", "train.micro_batch_size=2"],
    "dp2 packed, teacher cp2": [f"{LAYOUT}.dp=2", f"{TEACHER}.cp=2", "data.pack=true", "data.pack_length=320"],
    "tp2, teacher pp2 on ranks of its own": [f"{LAYOUT}.tp=2", f"{TEACHER}.pp=2", "distill.first_rank.language=2"],
}


@pytest.mark.parametrize("row", ROWS)
def test_layouts_of_both_models_change_no_number(row, llamas, prose, tmp_path):
    folder, learned = llamas
    resumes = "own" in row
    for changes in (["train.iters=3"], []) if resumes else ([],):
        train_on_ranks(config("gpt_tiny", tmp_path / "run", prose, folder, *ROWS[row], *changes))
    _require_near(numbers_of(tmp_path / "run"), learned["ours"], BOUND)


def _require_near(found: list[list[float]], expected: list[list[float]], bound: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=bound)


def test_adapters_of_the_student_learn_from_a_teacher(llamas, prose, tmp_path):
    """They start with the losses of the student."""
    folder, learned = llamas
    train_on_ranks(config("gpt_tiny", tmp_path / "run", prose, folder, "modules.language.lora.rank=4", "train.iters=3"))
    found = numbers_of(tmp_path / "run")
    assert found[0][:3] == pytest.approx(learned["ours"][0][:3], rel=BOUND)
    assert found[2][0] < found[0][0]


def test_a_run_is_a_teacher(llamas, prose, tmp_path):
    """A student that starts from its teacher's checkpoint does not differ from it."""
    folder, _ = llamas
    start = (f"distill.teacher={folder}/run", f"checkpoint.weights={folder}/run", "train.iters=1")
    train_on_ranks(config("gpt_tiny", tmp_path / "run", prose, folder, *start))
    assert numbers_of(tmp_path / "run")[0][1] == pytest.approx(0, abs=1e-6)

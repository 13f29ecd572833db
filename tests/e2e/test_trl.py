"""Steps of every preference task are TRL's. On demand: `MIMO_TRL` is a Python that has trl 1.16 and datasets."""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from mimo_train.config.compose import load
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.hf.models import make_llama, tokenizer_of_bytes
from tests.dist.ranks import run_ranks
from tests.dist.runs import train_rank
from tests.tars import write_tar

pytestmark = pytest.mark.skipif(not os.environ.get("MIMO_TRL"), reason="needs MIMO_TRL, a Python that has trl")
ROOT = Path(__file__).resolve().parents[2]
STEPS, PAIRS = 5, 4
WORDS = "the small river hill stone bird red blue green sings runs under over near bright quiet seven three".split()
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}Q:{{ m['content'] }}\n{% else %}A:"
    "{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
KL_SPACING = 1e-4
"""A mean of differences of log-probabilities near 200, whose spacing in fp32 is 1.5e-5; rewards are a tenth of them."""
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "kl", "nll_loss")
FORMS = {"kto": "labels", "reward": "margins"}
"""Records of a task that does not read pairs alone."""
OF_REWARD_TRAINER = {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}


def make_model(folder: Path, kind: str, labels: int) -> None:
    """On a rank: a tiny Llama whose tokenizer has a chat template."""
    make_llama(folder, kind, num_labels=labels)
    tokenizer = tokenizer_of_bytes()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, and records as JSON lines and as shards of a step each: TRL's KL of KTO rotates answers in a step."""
    folder, draw = tmp_path_factory.mktemp("trl"), random.Random(7)
    run_ranks(make_model, 1, folder / "llama", "LlamaForCausalLM", 2)
    run_ranks(make_model, 1, folder / "reward", "LlamaForSequenceClassification", 1)

    def said(role: str, least: int, most: int) -> list[dict]:
        words = [draw.choice(WORDS) for _ in range(draw.randint(least, most))]
        return [{"role": role, "content": " ".join(words)}]

    pairs = [
        {"prompt": said("user", 2, 6), "chosen": said("assistant", 3, 16), "rejected": said("assistant", 3, 16)}
        for _ in range(STEPS * PAIRS)
    ]
    labels = [
        {"prompt": pair["prompt"], "completion": pair["chosen" if at % 3 else "rejected"], "label": bool(at % 3)}
        for at, pair in enumerate(pairs)
    ]
    margins = [pair | {"margin": at % 3 / 2} for at, pair in enumerate(pairs)]
    for name, records in (("pairs", pairs), ("labels", labels), ("margins", margins)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        for step in range(STEPS):
            of_step = enumerate(records[PAIRS * step : PAIRS * (step + 1)])
            members = [(f"{PAIRS * step + at:04d}.json", json.dumps(record).encode()) for at, record in of_step]
            write_tar(folder / name / f"{step}.tar", members)
    return folder


@pytest.mark.parametrize("task", ["dpo", "ipo", "simpo", "orpo", "kto", "reward"])
def test_five_steps_are_trl_s(folder, task):
    form, model = FORMS.get(task, "pairs"), folder / ("reward" if task == "reward" else "llama")
    script, out = ROOT / "benchmarks/preferences_trl.py", folder / f"{task}.jsonl"
    arguments = [task, model, folder / f"{form}.jsonl", STEPS, PAIRS, out]
    done = subprocess.run(
        [os.environ["MIMO_TRL"], script, *map(str, arguments)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    theirs = [{OF_REWARD_TRAINER.get(name, name): value for name, value in entry.items()} for entry in entries]
    run = folder / f"run {task}"
    overrides = [
        f"train.task={task}", f"modules.language.pretrained={model}", f"data.shards={folder / form}",
        "data.validation_shards=", "data.demo=", "data.sequence_length=200", "data.shuffle=false", "data.workers=0",
        f"run.dir={run}", "run.device=cpu", f"train.iters={STEPS}", f"train.global_batch_size={PAIRS}",
        f"train.micro_batch_size={PAIRS}", "train.eval_interval=0", "checkpoint.save_interval=0", "optim.lr=1e-3",
        "optim.min_lr=1e-3", "optim.warmup_iters=0", "optim.decay=constant", "optim.weight_decay=0",
        "log.tensorboard=false",
    ]  # fmt: skip
    run_ranks(train_rank, 1, load("gpt_tiny", overrides))
    ours = [line for line in read_metrics(run / "metrics.jsonl") if "grad_norm" in line]
    assert len(ours) == len(theirs) == STEPS
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=1e-5), (name, mine, other)
        for name in mine.keys() & other.keys() & {*REWARDS}:
            bound = KL_SPACING if name == "kl" else 1e-5
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=bound), (name, mine, other)
    assert ours[-1]["loss"] != pytest.approx(ours[0]["loss"], rel=1e-5)

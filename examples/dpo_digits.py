"""DPO on the digits demo with fresh mistakes: each step rejects wrong answers that the model gives before that step.

    python examples/dpo_digits.py RUN TO [--steps 240] [--loss sft] [KEY=VALUE ...]

RUN is a run of vlm_digits; TO gets the new one, on one process. A step asks questions of the training samples until 32
answers, drawn at temperature 1, are wrong. The right answers to them are chosen. The reference of a step is the model
before it. `--loss sft` is the control: it learns the right answers to the questions that it answers wrong.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid

from mimo_train.config.compose import load
from mimo_train.engine.batch import Batch, question_of
from mimo_train.engine.engine import Engine
from mimo_train.evaluation.generation.options import Sampling
from mimo_train.evaluation.generation.prompts import Prompt
from mimo_train.inputs.datasets import build_dataset

PAIRS, QUESTIONS, NEW_TOKENS, BETA = 32, 64, 8, 0.1
Loss = tuple[torch.Tensor, torch.Tensor, dict]


def mistakes_of(engine: Engine) -> Iterator[Batch]:
    """Yield batches of `PAIRS` right and wrong answers: sample 2n is right, 2n + 1 is what the weights of that time
    answer. `reference` has the log-probabilities of these weights."""
    dataset, asked = build_dataset(engine.cfg, engine.tokenizer), 0
    sampling = Sampling(temperature=1.0, seed=engine.cfg.run.seed)
    while True:
        prompts, answers = list[Prompt](), list[list[int]]()
        while len(answers) < 2 * PAIRS:
            questions = [question_of(dataset, asked + number) for number in range(QUESTIONS)]
            asked += QUESTIONS
            written = engine.generate([prompt for prompt, _ in questions], sampling, NEW_TOKENS)
            for (prompt, truth), answer in zip(questions, written, strict=True):
                if answer.learned and answer.text != engine.tokenizer.decode(truth).strip():
                    prompts += [prompt, prompt]
                    answers += [truth, answer.learned]
        batch = Batch(prompts[: 2 * PAIRS], answers[: 2 * PAIRS])
        yield Batch(batch.prompts, batch.answers, {"reference": engine.log_probs(batch)})


def sums_of(values: torch.Tensor, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of values over the tokens of the right and of the wrong answers: two of [PAIRS]."""
    is_answer = tensors["samples"] >= 0
    sums = values.new_zeros(2 * PAIRS).index_add(0, tensors["samples"][is_answer], values[is_answer])
    return sums[0::2], sums[1::2]


def dpo(log_probs: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Loss:
    """Return the loss of DPO (arXiv 2305.18290, equation 7)."""
    (right, wrong), (old_right, old_wrong) = sums_of(log_probs, tensors), sums_of(tensors["reference"], tensors)
    total = -logsigmoid(BETA * (right - old_right - wrong + old_wrong)).sum()
    report = {"logps/chosen": (right.sum(), PAIRS), "logps/rejected": (wrong.sum(), PAIRS)}
    return total, torch.tensor(PAIRS), report


def sft(log_probs: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Loss:
    """Return the negative log-likelihood of the right answers, a mean over tokens of an answer, then over answers."""
    (right, _), (tokens, _) = sums_of(log_probs, tensors), sums_of(tensors["mask"], tensors)
    total = -(right / tokens).sum()
    return total, torch.tensor(PAIRS), {"sft loss": (total, PAIRS)}


def main() -> None:
    """Train, and write the losses and the held-out exact match into TO/metrics.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("to", metavar="TO", type=Path)
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*")
    parser.add_argument("--loss", choices=("dpo", "sft"), default="dpo")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--eval-interval", type=int, default=60)
    args = parser.parse_intermixed_args()
    cfg = load(
        str(args.run / "config.yaml"),
        (
            f"run.dir={args.to}",
            f"checkpoint.weights={args.run}",
            "layout=one_process",
            f"train.iters={args.steps}",
            f"train.global_batch_size={2 * PAIRS}",
            f"train.micro_batch_size={2 * PAIRS}",
            "train.exit_interval=0",
            "optim.lr=5e-4",
            "optim.warmup_iters=20",
            *args.overrides,
        ),
    )
    with Engine(cfg) as engine:
        batches, loss = mistakes_of(engine), {"dpo": dpo, "sft": sft}[args.loss]
        say(engine, engine.evaluate())
        while engine.step < args.steps:
            report = engine.train(next(batches), loss)
            if engine.step % args.eval_interval == 0 or engine.step == args.steps:
                report |= engine.evaluate()
            say(engine, report)
        engine.save()


def say(engine: Engine, report: dict[str, float]) -> None:
    """Log and print the numbers of a step."""
    engine.log(report)
    print(f"step {engine.step}:", ", ".join(f"{name} {value:.4g}" for name, value in report.items()), flush=True)


if __name__ == "__main__":
    main()

"""GRPO on the digits demo: a run that was trained too little learns from rewards alone, exact match of its answers.

    torchrun --nproc-per-node 2 examples/grpo_digits.py RUN TO [--steps 200] [KEY=VALUE ...]

RUN is a run of vlm_digits; TO gets the new one. Every process has a replica of the model. Each step asks 32 questions
of the training samples 4 times each. An answer's advantage is its reward in standard deviations from the mean of its
question (Shao et al. 2024, arXiv 2402.03300, section 4.1). A batch is learned from once, so that the ratio of
probabilities is 1, and its clipping does nothing.
"""

import argparse
import os
import statistics
from pathlib import Path

import torch

from mimo_train.config.compose import load
from mimo_train.engine.batch import Batch, question_of
from mimo_train.engine.engine import Engine
from mimo_train.evaluation.generation.options import Sampling
from mimo_train.inputs.datasets import build_dataset

QUESTIONS, ANSWERS, NEW_TOKENS = 32, 4, 8


def reward_of(answer: str, truth: str) -> float:
    """Return the reward of an answer: exact match."""
    return float(answer == truth)


def advantages_of(rewards: list[float]) -> list[float]:
    """Return the advantages of the answers to each question."""
    advantages = []
    for first in range(0, len(rewards), ANSWERS):
        group = rewards[first : first + ANSWERS]
        mean, deviation = statistics.fmean(group), statistics.pstdev(group)
        advantages += [(reward - mean) / (deviation + 1e-6) for reward in group]
    return advantages


def loss(log_probs: torch.Tensor, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Return the loss of GRPO, a mean over tokens, without a penalty for distance from the start."""
    ratio, mask = (log_probs - log_probs.detach()).exp(), tensors["mask"]
    total = -(ratio * tensors["advantages"] * mask).sum()
    return total, mask.sum().int(), {"grpo loss": (total, mask.sum())}


def main() -> None:
    """Train, and write the rewards and the held-out exact match into TO/metrics.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("to", metavar="TO", type=Path)
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eval-interval", type=int, default=50)
    args = parser.parse_intermixed_args()
    replicas = int(os.environ.get("WORLD_SIZE", "1"))
    cfg = load(
        str(args.run / "config.yaml"),
        (
            f"run.dir={args.to}",
            f"checkpoint.weights={args.run}",
            "placement.mode=shared",
            f"modules.images.layout.dp={replicas}",
            f"modules.language.layout.dp={replicas}",
            f"train.iters={args.steps}",
            f"train.global_batch_size={QUESTIONS * ANSWERS}",
            f"train.micro_batch_size={QUESTIONS * ANSWERS // replicas}",
            "train.exit_interval=0",
            "optim.lr=1e-4",
            "optim.decay=constant",
            "optim.warmup_iters=5",
            *args.overrides,
        ),
    )
    with Engine(cfg) as engine:
        dataset = build_dataset(cfg, engine.tokenizer)
        answers_to = [question_of(dataset, number) for number in range(args.steps * QUESTIONS)]
        engine.log(report := engine.evaluate())
        say(engine, report)
        while engine.step < args.steps:
            asked = answers_to[engine.step * QUESTIONS : (engine.step + 1) * QUESTIONS]
            prompts = [prompt for prompt, _ in asked for _ in range(ANSWERS)]
            truths = [engine.tokenizer.decode(truth).strip() for _, truth in asked for _ in range(ANSWERS)]
            sampling = Sampling(temperature=1.0, seed=cfg.run.seed)
            answers = engine.generate(prompts, sampling, NEW_TOKENS)
            rewards = [reward_of(answer.text, truth) for answer, truth in zip(answers, truths, strict=True)]
            written = [answer.learned for answer in answers]
            report = engine.train(Batch(prompts, written, {"advantages": advantages_of(rewards)}), loss)
            report["reward"] = statistics.fmean(rewards)
            if engine.step % args.eval_interval == 0 or engine.step == args.steps:
                report |= engine.evaluate()
            engine.log(report)
            say(engine, report)
        engine.save()


def say(engine: Engine, report: dict[str, float]) -> None:
    """Print the numbers of a step, on one rank."""
    if engine.session.state.is_logging_rank:
        print(f"step {engine.step}:", ", ".join(f"{name} {value:.4g}" for name, value in report.items()), flush=True)


if __name__ == "__main__":
    main()

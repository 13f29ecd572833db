"""Tiny runs on several ranks, and the curves they leave."""

from pathlib import Path

from mimo_train.config.compose import load
from mimo_train.metrics.sinks.jsonl import read_metrics
from mimo_train.plan.run import resolve
from tests.dist.ranks import run_ranks

TINY = (
    "modules.language.llm.num_layers=2",
    "modules.language.llm.hidden_size=32",
    "modules.language.llm.ffn_hidden_size=64",
    "modules.language.llm.num_attention_heads=4",
    "train.eval_interval=0",
    "train.report_samples=0",
    "checkpoint.save_interval=0",
    "optim.warmup_iters=2",
    "data.workers=0",
    "log.tensorboard=false",
)
TINY_ENCODER = (
    "modules.images.encoder.num_layers=1",
    "modules.images.encoder.hidden_size=32",
    "modules.images.encoder.ffn_hidden_size=64",
)


def config(name: str, run_dir: Path, demo: Path, *overrides: str):
    """A shipped config on the demo shards in `demo`, made tiny."""
    tiny = TINY + (TINY_ENCODER if name.startswith("vlm") else ())
    places = (f"run.dir={run_dir}", f"data.shards={demo}/train", "data.validation_shards=", "data.demo=")
    return load(name, (*tiny, *places, *overrides))


def train_on_ranks(cfg, timeout: float = 240) -> list[dict]:
    """Train `cfg` on as many processes as its layout needs; returns the lines of metrics.jsonl."""
    run_ranks(train_rank, resolve(cfg).layout.processes[-1] + 1, cfg, timeout=timeout)
    return read_metrics(Path(cfg.run.dir) / "metrics.jsonl")


def train_rank(cfg) -> int:
    """One rank of a run."""
    from mimo_train.training.pretrain import pretrain

    return pretrain(cfg)


def curve(lines: list[dict]) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every training step."""
    return [(line["step"], line["lm loss"], line["grad_norm"]) for line in lines if "lm loss" in line]


def largest_difference(one: list[tuple], other: list[tuple]) -> tuple[float, float]:
    """Largest relative difference of losses and of gradient norms between two curves of the same steps."""
    assert [point[0] for point in one] == [point[0] for point in other]
    return tuple(
        max(abs(a[index] - b[index]) / abs(a[index]) for a, b in zip(one, other, strict=True)) for index in (1, 2)
    )


STEPS = 20
"""Steps over which two layouts are compared."""
TOLERANCE = 1e-5
"""Largest relative difference of fp32 runs at different layouts."""

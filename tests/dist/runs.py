"""Tiny runs on several ranks, and the curves they leave."""

from dataclasses import dataclass
from pathlib import Path

from mimo_train.config.compose import load
from mimo_train.layout.run import resolve
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.ranks import run_ranks

STEPS = 20
"""Steps over which two layouts are compared."""

EPSILON = 1.0
"""Of Adam, in every tiny run. Adam divides a gradient by its own size: at its usual epsilon a gradient that is nothing
but rounding, whose sign is another one in another order of summation, moves its parameter by a whole learning rate, and
whether two layouts stay together is luck. No gradient is larger than this epsilon after `clip_grad`, so that an update
is linear in the gradient to within a factor of two, and two layouts' parameters differ by as little as their gradients
do. What no comparison of two such runs sees is a fault in how an update depends on the size of past gradients: for that
`test_layout_parity` compares two layouts at the usual epsilon, and `test_training` our Adam with torch's."""
RATE = 0.3
"""Peak learning rate of every tiny run; divided by EPSILON that of gradient descent. Losses fall by 1 or more."""


@dataclass(frozen=True)
class Bounds:
    """Largest differences between a layout and one process over STEPS, five times what rounding gives at most
    (benchmarks/layouts_cpu2_2026-11-22.md)."""

    loss: float
    """Relative."""
    norm: float
    """Relative, of the gradient norm."""
    parameter: float
    """At the end: root mean square over the elements of the parameter that differs most, in learning rates. What moves
    least of all parameters moves by 1e-3 learning rates."""


BOUNDS = Bounds(loss=1e-6, norm=3e-6, parameter=6e-7)
"""Of fp32 runs."""
BOUNDS_BF16 = Bounds(loss=1e-2, norm=2.5e-2, parameter=4e-3)
TOLERANCE = BOUNDS.norm
"""Of tests that have one bound for losses and gradient norms of fp32 runs."""
USUAL_ADAM = ("optim.eps=1e-8", "optim.lr=1e-3")
"""Adam as users have it."""

TINY = (
    # Megatron-Core and torch compute, as on GPUs.
    "run.cpu_kernels=false",
    "modules.language.llm.num_layers=2",
    "modules.language.llm.hidden_size=32",
    "modules.language.llm.ffn_hidden_size=64",
    "modules.language.llm.num_attention_heads=4",
    "modules.language.llm.num_query_groups=0",
    "modules.language.llm.head_size=0",
    "train.eval_interval=0",
    "train.report_samples=0",
    "checkpoint.save_interval=0",
    f"optim.eps={EPSILON}",
    f"optim.lr={RATE}",
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


def train_on_ranks(cfg) -> list[dict]:
    """Train `cfg` on as many processes as its layout needs; returns the lines of metrics.jsonl."""
    run_ranks(train_rank, resolve(cfg).layout.processes[-1] + 1, cfg)
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

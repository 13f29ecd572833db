"""Predictions of `mimo-train plan` beside measured steps: layouts of one to eight processes on this machine's cores.

    OMP_NUM_THREADS=1 python benchmarks/planner.py [--rounds 3] [--steps 8] [--only gpt] [--layouts dp2,tp2]

For a plain GPT and for vision + language: layers are measured on one process (`--measure`), steps of each layout are
predicted with cores that ranks share, and then measured, in rounds over all layouts, there and back, so that a machine
that becomes slower is slower for all. Printed are both times, their rank correlation, that of two rounds with each
other, which no prediction can be better than, and how much slower the layout predicted to be best is than the best; for
each shape, and the correlations for all layouts together. A quiet machine is needed: with other work, rounds differ
more than layouts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimo_train.config.compose import load
from mimo_train.config.schema import ConfigContainer
from mimo_train.plan.inputs import tokenizer_of
from mimo_train.plan.layout import lay_out
from mimo_train.plan.parameters import embedding_rows
from mimo_train.planner.candidate import Candidate
from mimo_train.planner.costs import Costs
from mimo_train.planner.devices import DEVICES, Device, Links
from mimo_train.planner.predict import Predictor
from mimo_train.planner.profile import Profile, read_profile

ROOT = Path(__file__).resolve().parents[1]
LLM = ("hidden_size=256", "num_layers=8", "num_attention_heads=8", "ffn_hidden_size=704")
ENCODER = ("hidden_size=192", "num_layers=8", "num_attention_heads=8", "ffn_hidden_size=768")
SHAPES = {
    "gpt": ("gpt_tiny", ("train.global_batch_size=16", "train.micro_batch_size=2")),
    "vlm": ("vlm_digits", ("train.global_batch_size=16", "train.micro_batch_size=4",
                           *(f"modules.images.encoder.{size}" for size in ENCODER))),
}  # fmt: skip
"""Runs whose steps take some tenths of a second on one core."""
QUIET = ("run.device=cpu", "train.eval_interval=0", "train.report_samples=0", "checkpoint.save_interval=0",
         "data.pad=sequence", "log.tensorboard=false", "data.validation_shards=")  # fmt: skip


def _language(**sizes: int) -> tuple[str, ...]:
    return tuple(f"modules.language.layout.{axis}={size}" for axis, size in sizes.items())


def _images(**sizes: int) -> tuple[str, ...]:
    return tuple(f"modules.images.layout.{axis}={size}" for axis, size in sizes.items())


SHARED, APART = ("placement.mode=shared",), ("placement.mode=disjoint",)
LAYOUTS = {
    "gpt": {
        "one": (),
        "dp2": _language(dp=2),
        "tp2": _language(tp=2),
        "pp2": _language(pp=2),
        "pp2 vpp2": _language(pp=2, vpp=2),
        "dp4": _language(dp=4),
        "tp2 dp2": _language(tp=2, dp=2),
        "pp4": _language(pp=4),
        "dp8": _language(dp=8),
        "tp2 pp2 dp2": _language(tp=2, pp=2, dp=2),
    },
    "vlm": {
        "one": SHARED,
        "shared dp2": (*SHARED, *_language(dp=2), *_images(dp=2)),
        "shared dp2 tp2": (*SHARED, *_language(tp=2), *_images(dp=2)),
        "two": APART,
        "1, dp2": (*APART, *_language(dp=2)),
        "dp2, 1": (*APART, *_images(dp=2)),
        "1, tp2": (*APART, *_language(tp=2)),
        "dp2, dp2": (*APART, *_language(dp=2), *_images(dp=2)),
        "pp2, pp2": (*APART, *_language(pp=2), *_images(pp=2)),
        "shared pp2 dp2": (*SHARED, *_language(pp=2, dp=2), *_images(dp=2)),
        "dp4, dp4": (*APART, *_language(dp=4), *_images(dp=4)),
    },
}
"""Shape -> name -> overrides."""


def cpu(cores: float) -> Device:
    """A core of this machine: messages of gloo as a trial measured them; only layers are measured here."""
    return replace(DEVICES["h100"], name="a core", memory=1e12, traffic=5e9, inside=2e9, across=2e9, cores=cores)


def config(shape: str, layout: str, *overrides: str) -> ConfigContainer:
    """A run of a layout."""
    name, _ = SHAPES[shape]
    return load(name, (*_sizes(shape), *LAYOUTS[shape][layout], *overrides))


def _sizes(shape: str) -> tuple[str, ...]:
    return (*SHAPES[shape][1], *(f"modules.language.llm.{size}" for size in LLM), *QUIET)


def predicted(cfg: ConfigContainer, profile: Profile, cores: float) -> float:
    """Seconds of a step."""
    layout = lay_out(cfg)
    candidate = Candidate(
        {name: module.layout for name, module in cfg.modules.items()},
        frozenset(edge.giver for edge in layout.shared_edges),
        False,
        cfg.train.micro_batch_size,
        cfg.train.recompute,
        cfg.optim.distributed_optimizer,
        0,
        layout.world_size,
    )
    links = Links(cpu(cores), node=layout.world_size)
    rows = embedding_rows(cfg.llm, tokenizer_of(cfg).vocab_size)
    costs = Costs({cfg.train.recompute: cfg}, rows, dict.fromkeys(cfg.encoders, 1.0), links, profile)
    one = Predictor(cfg, costs, links)
    return one.predict(one.pipeline(candidate)).seconds


def measured(shape: str, layout: str, folder: Path, steps: int) -> float:
    """Median seconds of a step, without the first three."""
    run = folder / f"{shape} {layout}".replace(" ", "_").replace(",", "")
    name, processes = SHAPES[shape][0], lay_out(config(shape, layout)).world_size
    command = [sys.executable, "-m", "mimo_train.launch.torchrun", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "mimo_train.cli", "train", name, *_sizes(shape), *LAYOUTS[shape][layout]]
    command += [f"run.dir={run}", f"train.iters={3 + steps}", "checkpoint.resume=never"]
    _run(command, folder.parent)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_seconds"] for line in lines if line.get("step", 0) > 3 and "step_seconds" in line]
    return statistics.median(seconds[-steps:])


def _run(command: list[str], folder: Path) -> None:
    """Run a command there; ends this program with what it said if it fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's, of values without ties."""
    places = [sorted(range(len(each)), key=each.__getitem__) for each in (one, other)]
    ranks = [{at: place for place, at in enumerate(order)} for order in places]
    number = len(one)
    squares = sum((ranks[0][at] - ranks[1][at]) ** 2 for at in range(number))
    return 1 - 6 * squares / (number * (number**2 - 1))


class Result(NamedTuple):
    """Of one layout."""

    layout: str
    predicted: float
    """Seconds of a step."""
    measured: list[float]
    """In each round."""

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.measured)


def main() -> None:
    """Print predictions beside measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="over all layouts")
    parser.add_argument("--steps", type=int, default=8, help="of each run that count")
    parser.add_argument("--only", choices=SHAPES, help="one of the two shapes")
    parser.add_argument("--layouts", type=lambda text: text.split(","), help="of that shape, some of its names")
    args = parser.parse_args()
    cores = float(len(os.sched_getaffinity(0)))
    shapes = [args.only] if args.only else [*SHAPES]
    results: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            names = args.layouts or [*LAYOUTS[shape]]
            results[shape] = _compared(shape, names, Path(folder), args.rounds, args.steps, cores)
            print(f"\n{shape}, {cores:g} cores: predicted, measured (median of {args.rounds} rounds), ratio")
            _tell(results[shape])
    if len(shapes) > 1:
        print("\nboth shapes together:")
        _tell_correlations([one for shape in shapes for one in results[shape]])


def _compared(shape: str, names: list[str], folder: Path, rounds: int, steps: int, cores: float) -> list[Result]:
    costs, name = folder / f"{shape}.json", SHAPES[shape][0]
    command = [sys.executable, "-m", "mimo_train.cli", "plan", name, *_sizes(shape), "--gpus", "1", "--measure"]
    _run([*command, "--profile", str(costs)], folder)
    cfgs = {layout: config(shape, layout) for layout in names}
    profile = read_profile(costs, list(cfgs[names[0]].modules), cfgs[names[0]].train.precision)
    results = [Result(layout, predicted(cfgs[layout], profile, cores), []) for layout in names]
    for at in range(rounds):
        for one in results if at % 2 == 0 else reversed(results):
            one.measured.append(measured(shape, one.layout, folder / str(at), steps))
    return results


def _tell(results: Sequence[Result]) -> None:
    for one in results:
        rounds = ", ".join(f"{each * 1e3:.0f}" for each in one.measured)
        ratio = one.predicted / one.median
        print(f"  {one.layout:16} {one.predicted * 1e3:8.0f} ms {one.median * 1e3:8.0f} ms {ratio:6.2f}  ({rounds})")
    best = min(results, key=lambda one: one.predicted)
    print(f"  chosen {best.layout}: {best.median / min(one.median for one in results):.2f} of the best")
    _tell_correlations(results)


def _tell_correlations(results: Sequence[Result]) -> None:
    expected, medians = [one.predicted for one in results], [one.median for one in results]
    print(f"  rank correlation over {len(results)} layouts {rank_correlation(expected, medians):.2f}", end="")
    rounds = list(zip(*(one.measured for one in results), strict=True))
    each = [rank_correlation(one, other) for one, other in combinations(rounds, 2)]
    print(f"; of two rounds with each other {', '.join(f'{one:.2f}' for one in each)}" if each else "")


if __name__ == "__main__":
    main()

"""Predictions of `mimo-train plan` beside measured steps: layouts of one to eight processes on this machine's cores.

    OMP_NUM_THREADS=1 python -m benchmarks.planner [--minutes 20] [--only gpt] [--layouts 'dp2;tp2']

For a plain GPT, for vision + language, and for the demo. All runs are started at first, and then train in turn, a step
of each, there and back. Five times meanwhile a matmul is measured on one process, and on as many at once as there are
cores, and messages between two processes. What a process does besides layers is the time of a step in which next to
nothing is computed. With the medians steps are predicted, by the assumed rates of a core, with cores that ranks share.
Printed are both times, their rank correlation, that of some turns with the others, which no prediction can be better
than, and how much slower the layout predicted to be best is than the best; for each shape, and the correlations for all
layouts together. A quiet machine is needed.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.alternating import Ranks, import_program, in_processes, started, step, working_in_a_temporary_folder
from mimo_train.config.compose import load
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.devices import DEVICES, LINKS, Device, Links
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.inputs.datasets import tokenizer_of
from mimo_train.layout.ranks import lay_out
from mimo_train.preflight.plan.candidate import Candidate
from mimo_train.preflight.plan.costs import Costs
from mimo_train.preflight.plan.predict import Predictor, Stage

CORES = len(os.sched_getaffinity(0))
CORE, CORE_TRAFFIC = 120e9, 20e9
"""FLOP/s of a core, of which the share `MATMULS` is reached, and its memory's bytes in a second: assumed."""
WARM_UP = 2
"""Steps of a run that do not count."""
LEAST_TURNS = 4
LOOKS = 4
"""How often matmuls and messages are measured, and once more at the end."""
LLM = tuple(
    f"modules.language.llm.{size}"
    for size in ("hidden_size=256", "num_layers=8", "num_attention_heads=8", "ffn_hidden_size=704")
)
ENCODER = ("hidden_size=192", "num_layers=8", "num_attention_heads=8", "ffn_hidden_size=768")
SHAPES = {
    "gpt": ("gpt_tiny", ("train.global_batch_size=8", "train.micro_batch_size=1", *LLM)),
    "vlm": ("vlm_digits", ("train.global_batch_size=16", "train.micro_batch_size=4", *LLM,
                           *(f"modules.images.encoder.{size}" for size in ENCODER))),
    "demo": ("vlm_digits", ()),
}  # fmt: skip
"""Runs whose steps take some tenths of a second on one core, and the demo as it is."""
QUIET = ("run.device=cpu", "train.eval_interval=0", "train.report_samples=0", "checkpoint.save_interval=0",
         "data.pad=sequence", "log.tensorboard=false", "data.validation_shards=", "data.workers=0",
         "run.hang_report_seconds=0", "train.iters=100000", "checkpoint.resume=never")  # fmt: skip


def _language(**sizes: int) -> tuple[str, ...]:
    return tuple(f"modules.language.layout.{axis}={size}" for axis, size in sizes.items())


def _images(**sizes: int) -> tuple[str, ...]:
    return tuple(f"modules.images.layout.{axis}={size}" for axis, size in sizes.items())


NOTHING = "nothing"
_EMPTY_ENCODER = tuple(
    f"modules.images.encoder.{size}"
    for size in ("hidden_size=16", "num_layers=1", "num_attention_heads=1", "ffn_hidden_size=16")
)
EMPTY = {"gpt": (), "vlm": _EMPTY_ENCODER, "demo": _EMPTY_ENCODER}
"""Sizes of modules in which nearly nothing is computed: what is left of a step is the program around them."""
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
    "demo": {
        "one": SHARED,
        "two": APART,
        "shared dp2": (*SHARED, *_language(dp=2), *_images(dp=2)),
        "shared dp2, 4": (*SHARED, *_language(dp=2), *_images(dp=2), "train.micro_batch_size=4"),
    },
}
"""Shape -> name -> overrides."""


class Messages(NamedTuple):
    """Between two processes over gloo."""

    latency: float
    """Seconds."""
    rate: float
    """Bytes in a second of an all-reduce, which are as many as in a message."""


class Machine(NamedTuple):
    """What ranks share, as measured."""

    messages: Messages
    cores: float
    """Processes that compute at once, of as many as there are cores, in time of one that is alone."""

    def __str__(self) -> str:
        messages = f"messages {self.messages.latency * 1e6:.0f} us and {self.messages.rate / 1e9:.2f} GB/s"
        return f"{CORES} cores that compute as {self.cores:.2f}; {messages}"

    @classmethod
    def of(cls, messages: Sequence[Messages], cores: Sequence[float]) -> "Machine":
        """The medians."""
        latency, rate = (statistics.median(each) for each in zip(*messages, strict=True))
        return cls(Messages(latency, rate), statistics.median(cores))

    def device(self) -> Device:
        """A core of it, with assumed rates."""
        latency, rate = self.messages
        links = {"inside": rate / LINKS, "across": rate / LINKS, "latency": latency}
        rates = {"half": CORE, "single": CORE, "traffic": CORE_TRAFFIC}
        return replace(DEVICES["h100"], name="a core", memory=1e12, **rates, **links)


def config(shape: str, layout: str, *overrides: str) -> ConfigContainer:
    """A run of a layout."""
    name, _ = SHAPES[shape]
    return load(name, (*_sizes(shape), *LAYOUTS[shape][layout], *overrides))


def _empty(shape: str) -> ConfigContainer:
    sizes = ("hidden_size=16", "num_layers=1", "num_attention_heads=1", "ffn_hidden_size=16")
    return config(shape, "one", *(f"modules.language.llm.{size}" for size in sizes), *EMPTY[shape])


def _sizes(shape: str) -> tuple[str, ...]:
    return (*SHAPES[shape][1], *QUIET)


def _matmuls() -> float:
    """Seconds of matmuls on one thread."""
    weight = torch.randn(512, 512)
    began = time.perf_counter()
    for _ in range(200):
        weight @ weight
    return time.perf_counter() - began


def _cores() -> float:
    """Processes that compute at once, of as many as there are cores, in time of one that is alone."""
    (alone,) = in_processes(_matmuls, 1)
    return CORES * alone / statistics.mean(in_processes(_matmuls, CORES))


def _messages() -> Messages:
    ranks = Ranks(_reduce, 2)
    try:
        return Messages(*ranks.told()[0])
    finally:
        ranks.end()


def _reduce(pipe: Connection) -> None:
    """A rank of two: the latency of a message, and bytes in a second."""
    dist.init_process_group("gloo")
    seconds = []
    for elements in (16, 1 << 20):
        values, found = torch.zeros(elements), []
        for _ in range(20):
            began = time.perf_counter()
            dist.all_reduce(values)
            found.append(time.perf_counter() - began)
        seconds.append(statistics.median(found))
    small, large = seconds
    pipe.send((True, (small / 2, 4 * (1 << 20) / (large - small))))
    pipe.recv()


class SharedCores(Predictor):
    """Predicts steps of ranks that share cores."""

    def __init__(self, cfg: ConfigContainer, costs: Costs, links: Links, cores: float, process: float):
        """`process`: seconds of a step besides layers."""
        super().__init__(cfg, costs, links)
        self._cores, self._process = cores, process

    def until_update(self, candidate: Candidate, stages: Sequence[Stage], microbatches: float) -> float:
        """As many ranks as there are cores compute at once. Messages use the time of cores too."""
        seconds = super().until_update(candidate, stages, microbatches)
        at_once = min(sum(stage.ranks for stage in stages), math.ceil(self._cores))
        busy = [microbatches * (stage.forward + stage.backward) + stage.gradients for stage in stages]
        return max(seconds * max(1.0, at_once / self._cores), self._shared(stages, busy))

    def update(self, stages: Sequence[Stage]) -> float:
        """With what a process does besides layers."""
        updates = [stage.update + self._process for stage in stages]
        return max(*updates, self._shared(stages, updates))

    def _shared(self, stages: Sequence[Stage], seconds: Sequence[float]) -> float:
        return sum(stage.ranks * each for stage, each in zip(stages, seconds, strict=True)) / self._cores


def candidate_of(cfg: ConfigContainer) -> Candidate:
    """The layout of a run, on one node."""
    layout = lay_out(cfg)
    shared = frozenset(edge.source for edge in layout.shared_edges)
    layouts = {name: module.layout for name, module in cfg.modules.items()}
    options = cfg.train.micro_batch_size, cfg.train.recompute, cfg.optim.distributed_optimizer
    return Candidate(layouts, *options, node=0, gpus=layout.world_size, shared=shared)


def predicted(cfg: ConfigContainer, machine: Machine, process: float) -> float:
    """Seconds of a step."""
    candidate = candidate_of(cfg)
    links = Links(machine.device(), node=candidate.gpus)
    rows = embedding_rows(cfg.llm, tokenizer_of(cfg).vocab_size)
    costs = Costs({cfg.train.recompute: cfg}, rows, dict.fromkeys(cfg.encoders, 1.0), links)
    return SharedCores(cfg, costs, links, machine.cores, process).predict(candidate).seconds


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
    """Of every turn."""
    processors: list[float]
    """Seconds of processors of every turn, of all ranks."""

    @property
    def median(self) -> float:
        """Of the turns."""
        return statistics.median(self.measured)


def main() -> None:
    """Print predictions beside measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20, help="of turns, behind the start of all runs")
    parser.add_argument("--only", choices=SHAPES, help="one of these shapes")
    parser.add_argument("--layouts", type=lambda text: text.split(";"), help="of that shape, some of its names")
    args = parser.parse_args()
    chosen = [
        (shape, layout) for shape in ([args.only] if args.only else SHAPES) for layout in args.layouts or LAYOUTS[shape]
    ]
    import_program()
    with working_in_a_temporary_folder():
        machine, results = compared(chosen, 60 * args.minutes)
    print(machine)
    for shape, own in results.items():
        turns = len(own[0].measured)
        print(f"\n{shape}: predicted, measured (median of {turns} turns), ratio, quartiles, seconds of processors")
        _tell(own)
    if len(results) > 1:
        print("\nall shapes together:")
        _tell_correlations([one for own in results.values() for one in own])


def compared(chosen: Sequence[tuple[str, str]], limit: float) -> tuple[Machine, dict[str, list[Result]]]:
    """Layouts of shapes, which train in turn, and the machine as it was before, between and after.

    Args:
        limit: seconds after which no turn begins, but for the first ones.
    """
    shapes = list(dict.fromkeys(shape for shape, _ in chosen))
    cfgs = {(shape, layout): config(shape, layout) for shape, layout in chosen}
    cfgs |= {(shape, NOTHING): _empty(shape) for shape in shapes}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {one: [] for one in cfgs}
    messages, cores = [], []

    def look() -> None:
        messages.append(_messages())
        cores.append(_cores())

    with ExitStack() as ends:
        runs = {}
        for one, cfg in cfgs.items():
            began = time.perf_counter()
            cfg = replace(cfg, run=replace(cfg.run, dir=f"runs/{len(runs)}"))
            runs[one] = ends.enter_context(started(cfg))
            for _ in range(WARM_UP):
                step(runs[one])
            print(f"{' '.join(one)}: started in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        began, looks, turn = time.perf_counter(), 0, 0
        while turn < LEAST_TURNS or time.perf_counter() - began < limit:
            if time.perf_counter() - began >= looks * limit / LOOKS:
                look()
                looks += 1
            for one in runs if turn % 2 == 0 else reversed(runs):
                found[one].append(step(runs[one]))
            turn += 1
        look()
    machine = Machine.of(messages, cores)
    results: dict[str, list[Result]] = {shape: [] for shape in shapes}
    for shape, layout in chosen:
        process = statistics.median(processors for _, processors in found[shape, NOTHING])
        expected = predicted(cfgs[shape, layout], machine, process)
        seconds, processors = (list(each) for each in zip(*found[shape, layout], strict=True))
        results[shape].append(Result(layout, expected, seconds, processors))
    for shape in shapes:
        processors = statistics.median(processors for _, processors in found[shape, NOTHING])
        print(f"{shape}: {processors * 1e3:.0f} ms of a step of a process beside layers")
    return machine, results


def _tell(results: Sequence[Result]) -> None:
    for one in results:
        low, _, high = statistics.quantiles(one.measured, n=4)
        print(
            f"  {one.layout:16} {one.predicted * 1e3:8.0f} ms {one.median * 1e3:8.0f} ms "
            f"{one.predicted / one.median:6.2f}  {low * 1e3:6.0f} {high * 1e3:6.0f}  "
            f"{statistics.median(one.processors):6.2f} s"
        )
    best = min(results, key=lambda one: one.predicted)
    print(f"  chosen {best.layout}: {best.median / min(one.median for one in results):.2f} of the best")
    _tell_correlations(results)


def _tell_correlations(results: Sequence[Result]) -> None:
    """Of predictions with medians, and of medians of some turns with those of the others."""
    expected, medians = [one.predicted for one in results], [one.median for one in results]
    print(f"  rank correlation over {len(results)} layouts {rank_correlation(expected, medians):.2f}", end="")
    turns = len(results[0].measured)
    for title, some, others in (
        ("even turns with odd ones", slice(0, None, 2), slice(1, None, 2)),
        ("the first half with the second", slice(0, turns // 2), slice(turns // 2, None)),
    ):
        pairs = [[statistics.median(one.measured[part]) for one in results] for part in (some, others)]
        print(f"; of {title} {rank_correlation(*pairs):.2f}", end="")
    print()


if __name__ == "__main__":
    main()

"""Real steps on the CPU through the stand-in for Transformer Engine, in a process that has not imported Megatron-Core:
prints the curve of each run as JSON. Arguments: the folder of the demo of images, a folder for runs."""

import json
import multiprocessing
import sys
import warnings
from dataclasses import replace
from pathlib import Path

STALE = ", copies of the first step"
"""Of runs in which nobody says that weights may have changed."""
PACKED = ("data.pack=true", "train.recompute=full")
RUNS = {
    "none": ({}, ()),
    "both": ({"images": "tensorwise", "language": "blockwise"}, ()),
    "images": ({"images": "tensorwise"}, ()),
    f"images{STALE}": ({"images": "tensorwise"}, ()),
    f"text{STALE}": ({"language": "mxfp8"}, ()),
    "none, packed": ({}, PACKED[:1]),
    "both, packed, recomputed": ({"images": "mxfp8", "language": "tensorwise"}, PACKED[:2]),
}
"""Recipes of modules, overrides."""


def curve(name: str, run) -> None:
    """Train with layers of the stand-in."""
    from mimo_train.training import setup as setting_up
    from mimo_train.training.pretrain import pretrain
    from mimo_train.training.step import schedule, startup

    setting_up.use_transformer_engine = startup.use_transformer_engine = lambda kind: True
    if STALE in name:
        schedule.renew_copies = lambda chunks: None
    pretrain(run)


def main() -> None:
    """Run all of them."""
    warnings.filterwarnings("ignore")
    from mimo_train.preflight.dry_run import fake_engine

    fake_engine.install()
    import mimo_train.training.pretrain  # noqa: F401
    from mimo_train.layout.run import resolve
    from mimo_train.logging.sinks.jsonl import read_metrics
    from tests.dist.runs import config

    demo, folder = map(Path, sys.argv[1:3])
    found = {}
    for name, (recipes, overrides) in RUNS.items():
        own = folder / name.replace(" ", "_")
        steps = ("train.iters=4", "train.global_batch_size=16", "train.micro_batch_size=4", "train.eval_samples=8")
        held_out = (f"data.validation_shards={demo}/held_out", "train.eval_interval=2", "run.device=cpu")
        run = resolve(config("vlm_digits", own, demo, "layout=one_process", *steps, *held_out, *overrides))
        # Behind the checks, which ask for CUDA and bf16: here numbers are those of fp32, rounded by nothing.
        modules = {key: replace(one, fp8=recipes.get(key, "")) for key, one in run.cfg.modules.items()}
        run = replace(run, cfg=replace(run.cfg, modules=modules))
        process = multiprocessing.get_context("fork").Process(target=curve, args=(name, run))
        process.start()
        process.join()
        lines = read_metrics(own / "metrics.jsonl") if process.exitcode == 0 else []
        found[name] = [[line[key] for key in ("lm loss", "grad_norm", "eval/loss") if key in line] for line in lines]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Runs with the fake Transformer Engine, in a process that has not imported Megatron-Core: prints the results as JSON.

Arguments: folders of the demos of images and of texts, a folder for runs, names of RANKS.
"""

import json
import multiprocessing
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from tests import fake_engine

LANGUAGE, IMAGES = "modules.language.layout.", "modules.images.layout."
HALF = "train.precision=bf16"
TP_SP = (f"{LANGUAGE}tp=2", f"{LANGUAGE}sp=true")
EXPERTS = ("llm@modules.language.llm=gpt_tiny_moe", *TP_SP, f"{LANGUAGE}dp=2", f"{LANGUAGE}ep=2", f"{LANGUAGE}etp=2")
RANKS = {
    "tp, sp": ("gpt_tiny", 1, (*TP_SP, f"{LANGUAGE}dp=2")),
    "cp, packed": ("gpt_tiny", 1, (f"{LANGUAGE}cp=2", "data.pack=true")),
    "packed": ("gpt_tiny", 0, ("data.pack=true",)),
    "experts": ("gpt_tiny", 1, EXPERTS),
    "head norms, recompute": ("gpt_tiny", 0, ("modules.language.llm.qk_norm=true", "train.recompute=full")),
    "images": ("vlm_digits", 0, (f"{IMAGES}tp=2", f"{LANGUAGE}pp=2")),
    "fp8, tp, sp": ("gpt_tiny", 1, (*TP_SP, "train.fp8=tensorwise", "data.sequence_length=64")),
    "fp8, first layer in bf16": ("gpt_tiny", 1, (f"{LANGUAGE}pp=2", "train.fp8=blockwise",
                                                 "modules.language.llm.num_layers=4",
                                                 "train.num_layers_at_start_in_bf16=1")),
    "fp8, packed, recompute": ("gpt_tiny", 0, ("data.pack=true", "train.recompute=full", "train.fp8=mxfp8")),
    "fp8, images": ("vlm_digits", 0, (f"{IMAGES}tp=2", f"{LANGUAGE}pp=2", "modules.images.fp8=tensorwise",
                                      "encoder@modules.images.encoder=vit_tiny_native")),
    "fp8, shared": ("vlm_digits", 0, ("placement.mode=shared", f"{IMAGES}dp=2", f"{LANGUAGE}tp=2",
                                      "train.fp8=tensorwise", "train.recompute=selective")),
    "fp8, experts": ("gpt_tiny", 1, (*EXPERTS, "train.fp8=tensorwise", "data.sequence_length=64",
                                     "modules.language.llm.shared_expert_ffn_hidden_size=64")),
    "behind images": ("vlm_digits", 2, (f"{IMAGES}tp=2", f"{LANGUAGE}pp=2", f"{LANGUAGE}dp=2")),
}  # fmt: skip
"""Config, rank, overrides. All were tried; MIMO_ALL_LAYOUTS=1 runs all, and DEFAULT otherwise."""
DEFAULT = ("tp, sp", "experts", "behind images", "fp8, tp, sp", "fp8, packed, recompute", "fp8, shared", "fp8, experts")
WITHIN_OTHERS = ("head norms, recompute", "images", "fp8, packed, recompute", "fp8, images")
"""Runs whose peak is not in these layers."""
STALE = ", copies of the first step"
"""Suffix of runs in which copies of weights are not renewed."""
CURVES = {
    "none": ({}, ()),
    "both": ({"images": "tensorwise", "language": "blockwise"}, ()),
    "images": ({"images": "tensorwise"}, ()),
    f"images{STALE}": ({"images": "tensorwise"}, ()),
    f"text{STALE}": ({"language": "mxfp8"}, ()),
    "none, packed": ({}, ("data.pack=true",)),
    "both, packed, recomputed": ({"images": "mxfp8", "language": "tensorwise"},
                                 ("data.pack=true", "train.recompute=full")),
}  # fmt: skip
"""Recipes of modules, overrides."""


def use_engine(*_) -> None:
    """Build layers of Transformer Engine."""
    from mimo_train.training import setup as setting_up
    from mimo_train.training.step import pipeline

    setting_up.use_transformer_engine = pipeline.use_transformer_engine = lambda kind: True


def rank(name: str, images: str, texts: str, folder: Path) -> dict:
    """Return the dry run of a rank."""
    from mimo_train.layout.run import resolve
    from mimo_train.preflight.dry_run import one_rank
    from mimo_train.preflight.dry_run.command import in_child
    from mimo_train.preflight.dry_run.observation import RankFailure, selected_kinds
    from tests.dist.runs import config

    one_rank.choose_layers = use_engine
    config_name, number, overrides = RANKS[name]
    demo = images if config_name == "vlm_digits" else texts
    run = resolve(config(config_name, folder / "run", demo, *overrides, HALF))
    result = in_child(run, selected_kinds(run.layout, str(number))[0])
    if isinstance(result, RankFailure):
        return {"failed": f"{result.what}\n{result.trace}"}
    return {"failed": "", "lines": [line for _, line, _ in result.lines], "flops": result.flops}


def curve(name: str, images: str, folder: Path) -> list:
    """Return the loss and gradient norm of every step, and losses of evaluations, of real steps on the CPU."""
    from mimo_train.layout.run import resolve
    from mimo_train.logging.sinks.jsonl import read_metrics
    from tests.dist.runs import config

    recipes, overrides = CURVES[name]
    run_dir = folder / name.replace(" ", "_")
    steps = ("train.iters=4", "train.global_batch_size=16", "train.micro_batch_size=4", "train.eval_samples=8")
    held_out = (f"data.validation_shards={images}/held_out", "train.eval_interval=2", "run.device=cpu")
    run = resolve(config("vlm_digits", run_dir, images, "layout=one_process", *steps, *held_out, *overrides))
    # After the checks, which require CUDA and bf16: these steps are in fp32, without rounding.
    modules = {key: replace(module, fp8=recipes.get(key, "")) for key, module in run.cfg.modules.items()}
    run = replace(run, cfg=replace(run.cfg, modules=modules))
    process = multiprocessing.get_context("fork").Process(target=_train, args=(name, run))
    process.start()
    process.join()
    lines = read_metrics(run_dir / "metrics.jsonl") if process.exitcode == 0 else []
    return [line[key] for line in lines for key in ("lm loss", "grad_norm", "eval/loss") if key in line]


def _train(name: str, run) -> None:
    from mimo_train.training.pretrain import pretrain
    from mimo_train.training.step import pipeline

    use_engine()
    if STALE in name:
        pipeline.renew_copies = lambda chunks: None
    pretrain(run)


def main() -> None:
    """Print the results."""
    warnings.filterwarnings("ignore")
    fake_engine.install()
    import mimo_train.training.pretrain  # noqa: F401

    images, texts, folder, *names = sys.argv[1:]
    curves = {name: curve(name, images, Path(folder)) for name in CURVES}
    ranks = {name: rank(name, images, texts, Path(folder)) for name in names}
    print(json.dumps({"ranks": ranks, "curves": curves}))


if __name__ == "__main__":
    main()

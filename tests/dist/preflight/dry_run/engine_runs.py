"""Dry runs with the stand-in for Transformer Engine, in a process that has not imported Megatron-Core: prints what each
found as JSON. Arguments: folders of the demos of images and of texts, a folder for runs, names of RUNS."""

import json
import sys
import warnings
from pathlib import Path

LANGUAGE, IMAGES = "modules.language.layout.", "modules.images.layout."
HALF = "train.precision=bf16"
RUNS = {
    "tp, sp": ("gpt_tiny", 1, (f"{LANGUAGE}tp=2", f"{LANGUAGE}sp=true", f"{LANGUAGE}dp=2")),
    "cp, packed": ("gpt_tiny", 1, (f"{LANGUAGE}cp=2", "data.pack=true")),
    "packed": ("gpt_tiny", 0, ("data.pack=true",)),
    "experts": ("gpt_tiny", 1, ("llm@modules.language.llm=gpt_tiny_moe", f"{LANGUAGE}tp=2", f"{LANGUAGE}sp=true",
                                f"{LANGUAGE}dp=2", f"{LANGUAGE}ep=2", f"{LANGUAGE}etp=2")),
    "head norms, recompute": ("gpt_tiny", 0, ("modules.language.llm.qk_norm=true", "train.recompute=full")),
    "images": ("vlm_digits", 0, (f"{IMAGES}tp=2", f"{LANGUAGE}pp=2")),
    "fp8, tp, sp": ("gpt_tiny", 1, (f"{LANGUAGE}tp=2", f"{LANGUAGE}sp=true", "train.fp8=tensorwise",
                                    "data.sequence_length=64")),
    "fp8, first layer in bf16": ("gpt_tiny", 1, (f"{LANGUAGE}pp=2", "train.fp8=blockwise",
                                                 "modules.language.llm.num_layers=4",
                                                 "train.num_layers_at_start_in_bf16=1")),
    "fp8, packed, recompute": ("gpt_tiny", 0, ("data.pack=true", "train.recompute=full", "train.fp8=mxfp8")),
    "fp8, images": ("vlm_digits", 0, (f"{IMAGES}tp=2", f"{LANGUAGE}pp=2", "modules.images.fp8=tensorwise",
                                        "encoder@modules.images.encoder=vit_tiny_native")),
    "fp8, shared": ("vlm_digits", 0, ("placement.mode=shared", f"{IMAGES}dp=2", f"{LANGUAGE}tp=2",
                                      "train.fp8=tensorwise", "train.recompute=selective")),
    "fp8, experts": ("gpt_tiny", 1, ("llm@modules.language.llm=gpt_tiny_moe", f"{LANGUAGE}tp=2", f"{LANGUAGE}sp=true",
                                     f"{LANGUAGE}dp=2", f"{LANGUAGE}ep=2", f"{LANGUAGE}etp=2", "train.fp8=tensorwise",
                                     "modules.language.llm.shared_expert_ffn_hidden_size=64",
                                     "data.sequence_length=64")),
    "behind images": ("vlm_digits", 2, (f"{IMAGES}tp=2", f"{LANGUAGE}pp=2", f"{LANGUAGE}dp=2")),
}  # fmt: skip
"""Every one was tried; these by default, and all with MIMO_ALL_LAYOUTS=1."""
DEFAULT = (
    "tp, sp",
    "experts",
    "behind images",
    "fp8, tp, sp",
    "fp8, packed, recompute",
    "fp8, shared",
    "fp8, experts",
)
WITHIN_OTHERS = ("head norms, recompute", "images", "fp8, packed, recompute", "fp8, images")
"""Runs whose peak is not held by these layers."""


def main() -> None:
    """Run all of them."""
    warnings.filterwarnings("ignore")
    from mimo_train.preflight.dry_run import fake_engine

    fake_engine.install()
    from mimo_train.layout.run import resolve
    from mimo_train.preflight.dry_run import one_rank
    from mimo_train.preflight.dry_run.command import in_child
    from mimo_train.preflight.dry_run.observation import selected_kinds
    from tests.dist.runs import config

    images, texts, folder = map(Path, sys.argv[1:4])
    one_rank.import_program()
    found = {}
    for name in sys.argv[4:]:
        config_name, rank, overrides = RUNS[name]
        demo = images if config_name == "vlm_digits" else texts
        run = resolve(config(config_name, folder / "run", demo, *overrides, HALF))
        one = in_child(run, selected_kinds(run.layout, str(rank))[0], engine=True)
        failed = f"{one.what}\n{one.trace}" if hasattr(one, "what") else ""
        lines = [] if failed else [line for _, line, _ in one.lines]
        found[name] = {"failed": failed, "lines": lines} | ({} if failed else {"flops": one.flops, "saved": one.saved})
    print(json.dumps(found))


if __name__ == "__main__":
    main()

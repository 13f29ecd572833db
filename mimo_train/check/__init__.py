"""`mimo-train check`: the contract of a run, proven without a GPU, and every fault at once.

Parts that do not depend on a fault still run: a layout that does not divide keeps nobody from learning that a shard is
truncated.
"""

import shlex
import sys
from collections.abc import Sequence

from mimo_train.check import arithmetic, ranks, run_dir, samples
from mimo_train.check.faults import config_faults
from mimo_train.check.report import Report, show
from mimo_train.config import compose
from mimo_train.config.schema import LANGUAGE, ConfigContainer, ConfigError, Fault
from mimo_train.plan import layout
from mimo_train.plan.memory import padded_vocab_size

LAYOUT_KEYS = ("modules", "placement", "train.global_batch_size", "train.micro_batch_size", "train.iters")
"""Faults below these keys leave no layout."""

BATCH_KEYS = ("train", "data.sequence_length")
"""Faults below these keys leave no arithmetic of batch and memory."""


def main(config: str, overrides: Sequence[str] = ()) -> int:
    """Check one run, print what was found, and return 1 if it cannot start, else 0."""
    try:
        cfg = compose.load(config, overrides)
    except ConfigError as error:
        show(Report(faults=error.faults), "", sys.stdout, sys.stderr)
        return 1
    report = check(cfg)
    script = "train_gpt.sh" if compose.is_plain_gpt(cfg) else "train_vlm.sh"
    command = shlex.join([f"scripts/{script}", config, *overrides])
    show(report, f"no faults; start it with: {command}", sys.stdout, sys.stderr)
    return 1 if report.faults else 0


def check(cfg: ConfigContainer) -> Report:
    """Everything that can be said about a run before it starts."""
    report = Report(faults=config_faults(cfg))
    plan = None if _any_below(report.faults, LAYOUT_KEYS) else layout.plan(cfg)
    specs_are_sound = LANGUAGE in cfg.modules and not any(_is_of_spec(fault) for fault in report.faults)
    batch_is_sound = plan is not None and not _any_below(report.faults, BATCH_KEYS)
    seen = samples.Seen()
    if specs_are_sound:
        tokenizer = samples.build_tokenizer(report, cfg)
        vocab = padded_vocab_size(tokenizer.vocab_size) if tokenizer else None
        arithmetic.add_modules(report, cfg, plan, vocab)
        if plan:
            ranks.add_ranks(report, cfg, plan)
        arithmetic.add_media(report, cfg)
        seen = samples.add_data(report, cfg, tokenizer)
        if batch_is_sound:
            arithmetic.add_batch(report, cfg, plan)
            arithmetic.add_memory(report, cfg, plan, vocab, seen.media_per_sample)
    run_dir.add_run_dir(report, cfg, plan, seen.fingerprint)
    return report


def _any_below(faults: list[Fault], keys: Sequence[str]) -> bool:
    return any(fault.key == key or fault.key.startswith(f"{key}.") for fault in faults for key in keys)


def _is_of_spec(fault: Fault) -> bool:
    """Whether a fault says that an encoder, a projector or a language model cannot be built from its sizes."""
    parts = fault.key.split(".")
    return parts[0] == "modules" and (
        len(parts) == 1 or (len(parts) > 2 and parts[2] in ("encoder", "projector", "llm"))
    )

"""`mimo-train check`: checks a run without a GPU, and reports every fault at once.

Parts that do not depend on a fault still run: an invalid layout does not hide a truncated shard. Samples are read if
there is no fault.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mimo_train.config import compose
from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.parts import LANGUAGE, PARTS
from mimo_train.config.pretrained.hub import snapshots_of
from mimo_train.config.run_files import shipped_configs
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.user_code import missing_code
from mimo_train.layout.batch import Batch
from mimo_train.layout.ranks import lay_out
from mimo_train.layout.run import INPUT_KEYS, Run, config_faults, with_config_faults, with_iters
from mimo_train.preflight.check.report import Report, show

GPU_DRIVERS = (Path("/proc/driver/nvidia"), Path("/dev/dxg"))
"""One exists with a driver for NVIDIA GPUs; the second on Linux inside Windows."""

LAYOUT_KEYS = ("modules", "placement", "train.global_batch_size", "train.micro_batch_size", "train.iters")
"""Faults below these keys prevent a layout."""

BATCH_KEYS = ("train", "data.sequence_length")
"""Faults below these keys prevent the computation of batch and memory."""


def main(config: str, overrides: Sequence[str] = (), *, without_data: bool = False) -> int:
    """Check one run, print the report, and return 1 if it cannot start, else 0.

    Args:
        without_data: skip tokenizer, weights and shards, which may be missing.
    """
    try:
        cfg = compose.load(config, overrides, without_data=without_data, weights=False)
    except ConfigError as error:
        show(Report(faults=_without_inputs(with_config_faults(error).faults, without_data)), "", sys.stdout, sys.stderr)
        return 1
    from mimo_train.preflight.check import tables  # slow to import, as are the imports of `check`

    report = check(cfg, without_data=without_data)
    tables.add_layouts(report, config, overrides, cfg, without_data=without_data)
    script = shipped_configs().parent / "scripts" / ("train_vlm.sh" if cfg.encoders else "train_gpt.sh")
    if script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    # There are no scripts if mimo-train is installed as a package.
    start = [str(script)] if script.is_file() else ["mimo-train", "launch", "here"]
    last = f"no faults; start it with: {shlex.join([*start, config, *overrides])}"
    if without_data:
        last = "no faults, without a look at tokenizer, weights and shards"
    show(report, last, sys.stdout, sys.stderr)
    return 1 if report.faults else 0


def check(cfg: ConfigContainer, *, without_data: bool = False) -> Report:
    """Run all checks that are possible before a run starts.

    Args:
        without_data: skip tokenizer, weights and shards. The vocabulary is that of the language model's config.
    """
    from mimo_train.estimate.parameters import embedding_rows, vocabulary_faults
    from mimo_train.preflight.check import media, resuming, tables
    from mimo_train.preflight.check.data import add_data, build_tokenizer
    from mimo_train.preflight.check.shards import Seen
    from mimo_train.preflight.check.teacher import add_teacher

    report = Report(faults=_without_inputs(config_faults(cfg), without_data))
    layout = None if _any_below(report.faults, LAYOUT_KEYS) else lay_out(cfg)
    specs_are_sound = LANGUAGE in cfg.modules and not any(_is_of_spec(fault) for fault in report.faults)
    run = Run(cfg, layout, Batch.of(cfg)) if layout and not _any_below(report.faults, BATCH_KEYS) else None
    seen, tokenizer, vocab = Seen(), None, None
    if specs_are_sound:
        tokenizer = None if without_data else build_tokenizer(report, cfg)
        vocab = embedding_rows(cfg.llm, tokenizer.vocab_size) if tokenizer else None
        if without_data and cfg.llm.vocab_size:
            vocab = embedding_rows(cfg.llm, cfg.llm.vocab_size)
        report.faults += vocabulary_faults(cfg.llm, tokenizer.text_size) if tokenizer else ()
        tables.add_modules(report, cfg, layout, vocab)
        if layout:
            tables.add_ranks(report, cfg, layout)
        media.add_media(report, cfg)
        if not without_data:
            seen = add_data(report, cfg, tokenizer)
        if run and seen.steps is not None:
            run = with_iters(run, seen.steps)
        if run:
            tables.add_batch(report, run)
            tables.add_memory(report, run, vocab, seen.media_per_sample)
            tables.add_work(report, run, vocab, seen.media_per_sample)
            if not without_data:
                add_teacher(report, run, tokenizer)
    _add_remarks(report, cfg)
    resuming.add_run_dir(
        report, run.cfg if run else cfg, layout, seen.fingerprint, tokenizer, without_data=without_data
    )
    return report


def _add_remarks(report: Report, cfg: ConfigContainer) -> None:
    """Report missing user code, and patterns that only the start of the run can check."""
    from mimo_train.estimate.parameters import freeze_patterns
    from mimo_train.hf.llava_limits import export_form

    for key, snapshot in snapshots_of(asdict(cfg)).items():
        cached, missing = snapshot.weight_bytes(key)
        if missing:
            sizes = f"{missing / 1e6:,.1f} MB of weights, {cached / 1e6:,.1f} MB are in the cache"
            report.notes.append(f"{key}: a start downloads {sizes} ({snapshot})")
    keys = {fault.key for fault in report.faults}
    report.faults += [fault for fault in missing_code(cfg.train) if fault.key not in keys]
    for name, module in cfg.modules.items():
        until = [entry for entry in module.freeze_until if entry not in PARTS]
        groups = [entry for entry in module.optim.groups if entry not in PARTS]
        for key, patterns in (("freeze", freeze_patterns(module)), ("freeze_until", until), ("optim.groups", groups)):
            if patterns and f"modules.{name}.{key}" not in keys:
                report.notes.append(
                    f"modules.{name}.{key}: whether {', '.join(patterns)} match parameters is seen when the model is "
                    "built, as with --dry-run"
                )
    if not any(key.startswith("modules") for key in keys) and LANGUAGE in cfg.modules:
        report.notes.append(export_form(cfg))
    if cfg.run.device == "cuda" and not any(driver.exists() for driver in GPU_DRIVERS):
        text = "run.device is cuda, but this machine has no GPU driver. The run starts on other machines only"
        report.warnings.append(f"{text}, or here with run.device=cpu")


def _without_inputs(faults: list[Fault], without_data: bool) -> list[Fault]:
    return [fault for fault in faults if not without_data or fault.key not in INPUT_KEYS]


def _any_below(faults: list[Fault], keys: Sequence[str]) -> bool:
    return any(fault.key == key or fault.key.startswith(f"{key}.") for fault in faults for key in keys)


def _is_of_spec(fault: Fault) -> bool:
    parts = fault.key.split(".")
    return parts[0] == "modules" and (
        len(parts) == 1 or (len(parts) > 2 and parts[2] in ("encoder", "projector", "llm"))
    )

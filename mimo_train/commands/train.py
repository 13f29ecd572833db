"""`mimo-train train`: one rank of a run. It trains, writes the report, and prints a summary."""

import argparse
import base64
import gc
import json
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.text_format import plural
from mimo_train.commands.arguments import add_config_command, print_fault, users_faults

if TYPE_CHECKING:
    from mimo_train.launch.exit_signal import ExitSignal
    from mimo_train.layout.run import Run


def add(commands: Any) -> None:
    """Add the command."""
    add_config_command(
        commands,
        "train",
        _train,
        "train; one rank, started by torchrun",
        "Runs one rank of a run. Processes are started by torchrun, or by scripts/train_vlm.sh and\n"
        "scripts/train_gpt.sh, as many as `mimo-train world CONFIG` prints. A run.dir that holds a\n"
        "checkpoint is resumed.\n\n"
        "examples:\n"
        "  torchrun --nproc-per-node 2 -m mimo_train.cli train vlm_digits\n"
        "  mimo-train train vlm_digits layout=one_process train.iters=100",
    )


def _train(args: argparse.Namespace) -> int:
    """Faults found before the start are the same on every rank: rank 0 prints them, the others exit 1 silently."""
    from mimo_train.config import compose
    from mimo_train.config.errors import ConfigError
    from mimo_train.launch.processes import is_idle, say_idle, started_run
    from mimo_train.launch.restarts import require_resume

    try:
        run = started_run(compose.load(args.config, args.overrides))
        require_resume(run.cfg.checkpoint.resume)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print_fault(error)
        return 1
    if is_idle(run.layout):  # before the slow imports
        say_idle()
        return 0
    return main(run)


def main(run: "Run") -> int:
    """Run one rank; returns its exit code.

    A rank that fails prints its own error and exits at once, without waiting for its peers: the launcher then ends
    them.
    """
    from mimo_train.launch.exit_signal import ExitSignal
    from mimo_train.launch.rank_monitor import watched
    from mimo_train.logging.rank_log import show

    exit_signal = ExitSignal().listen()  # before the slow imports
    try:
        with watched(run):
            code = _watched_main(run, exit_signal)
    except BaseException as error:
        if not _still_reading():
            raise
        code = _report_error(error)
    if _still_reading():  # a thread that still runs while the interpreter shuts down could abort it
        show("", end="")
        sys.stderr.flush()
        os._exit(code)
    return code


def _still_reading() -> bool:
    from data.workers import still_reading

    return still_reading()


def _report_error(error: BaseException) -> int:
    """Print an error that ends the process before logging has begun, and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, users_faults()):
        print_fault(error)
    else:
        traceback.print_exception(error)
    return 1


def _watched_main(run: "Run", exit_signal: "ExitSignal") -> int:
    from mimo_train.commands.rank_failure import end_rank
    from mimo_train.logging.rank_log import adopt_torch, divert, errors_only, log_of, show

    rank = run.layout.processes.index(int(os.environ.get("RANK", "0")))
    divert(log_of(run.dir, rank)).copy_console()
    if rank == 0:
        show(_first_line(run))
    if run.cfg.run.inprocess_restarts:
        # Its threads poll the other ranks every second, and torch would print a warning each time.
        errors_only()

    gc.disable()  # imports stay: looking through them again and again takes a tenth of the time until the first step
    import torch.distributed as dist

    adopt_torch()
    from mimo_train.parallel.device import light_imports

    with light_imports(run.cfg.run.device):
        from mimo_train.training.pretrain import pretrain
    gc.freeze()
    gc.enable()

    try:
        code = pretrain(run, exit_signal=exit_signal)
    except BaseException as error:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        end_rank(error, rank)
    dist.barrier()
    if rank == run.layout.logging_rank:
        try:
            lines = _summary(run)
        except OSError as error:  # a full disk, or a folder that was removed: what was trained is saved
            sys.stderr.write(f"the report of {run.dir} cannot be written: {error}\n")
        else:
            show("\n".join(lines))
    if code:
        # The launcher ends the remaining ranks when the first one exits with a code.
        dist.barrier()
    dist.destroy_process_group()
    return code


def _first_line(run: "Run") -> str:
    """Return a line about the run, to print while the libraries are imported."""
    modules = ", ".join(f"{name} ({sizes})" for name, sizes in run.layout.modules.items())
    ranks = f"{run.layout.world_size} processes" if run.layout.world_size > 1 else "one process"
    train = run.cfg.train
    epochs = f"{train.epochs:g} epoch{'s' * (train.epochs != 1)} in steps"
    length = epochs if train.epochs else plural(train.iters, "step")
    return (
        f"{run.dir}: {modules} on {ranks}; {length} of "
        f"{plural(run.batch.global_batch_size, 'sample')} of {run.cfg.sample_length} tokens; "
        "starting"
    )


def _summary(run: "Run") -> list[str]:
    """The last lines of a run: its result, the path of its report, which is written, and a command to try."""
    from mimo_train.inputs.datasets import held_out_sets
    from mimo_train.logging.report.page import write_report
    from mimo_train.logging.sinks.jsonl import read_metrics

    run_dir = run.dir
    if not (run_dir / "metrics.jsonl").exists():  # stopped before its first step
        return []
    report = write_report(run_dir, run)
    prefixes = [each.prefix for each in held_out_sets(run.cfg)]  # the run may have had others before
    last: dict[str, dict[str, Any]] = {}
    for line in read_metrics(run_dir / "metrics.jsonl"):
        last |= {prefix: line for prefix in prefixes if f"{prefix}samples" in line}
    lines = [held_out_line(last[prefix], prefix) for prefix in prefixes if prefix in last]
    return [*lines, f"report: {report}", f"next: {_try_it(run)}"]


def held_out_line(line: dict[str, float], at: str = "eval/") -> str:
    """Return the result of the last evaluation, a line of metrics.jsonl, on the set whose keys begin with `at`."""
    kind, _, name = at.rstrip("/").partition("/")
    of_set = f"{'test' if kind == 'test' else 'held-out'} {name}".rstrip()
    if not line[f"{at}samples"]:
        return f"{of_set}: no sample has a token with loss, so that nothing is measured (step {line['step']})"
    exact = f" exact match {line[f'{at}exact_match']:.3f}," if f"{at}exact_match" in line else ""
    return f"{of_set}{exact} loss {line[f'{at}loss']:.3f} ({line[f'{at}samples']:.0f} samples, step {line['step']})"


def _try_it(run: "Run") -> str:
    """A command that queries the checkpoint about a held-out sample of the report, or exports a reward model; writes
    the media to files."""
    from encoders.registry import is_path
    from encoders.transformers_media.spec import MediaSpec
    from mimo_train.config.compose import to_dict
    from mimo_train.config.user_code import CALLBACKS, FORWARD_STEP, code_named

    program = Path(sys.executable).parent / "mimo-train"  # the scripts leave its folder off PATH
    program_text = min(os.path.relpath(program), str(program), key=len) if program.exists() else "mimo-train"
    program_text, source = shlex.quote(program_text), shlex.quote(str(run.checkpoints))
    if run.cfg.traits.value_head:
        return f"{program_text} export {source} --to reward-model"
    run_dir = run.dir
    samples_file = run_dir / "samples.json"
    samples = json.loads(samples_file.read_text()) if samples_file.exists() else []
    sample = next(
        (sample for sample in samples if sample["images"] or sample["clips"]), samples[0] if samples else None
    )
    # The report has no media without a held-out sample, or of a media half: then the files are the user's to name.
    encoders = [module.encoder for module in run.cfg.encoders.values()]
    kinds = dict.fromkeys(each.kind for each in encoders if sample is None or isinstance(each, MediaSpec))
    prompt, media = "Hello", ""
    if sample is not None:
        prompt = (sample["question"] or sample["truth"][:20]).strip()
        # Images are the frames of videos.
        visuals = ("--video", "videos", "mp4") if sample.get("videos") else ("--image", "images", "png")
        for option, field, extension in (visuals, ("--audio", "clips", "wav")):
            for at, content in enumerate(sample.get(field, [])):
                file = run_dir / f"held_out{at or ''}.{extension}"
                file.write_bytes(base64.b64decode(content))
                media += f" {option} {shlex.quote(str(file))}"
    media = media or "".join(f" --{kind} FILE" for kind in kinds)
    own_encoder = any(
        key not in (CALLBACKS, FORWARD_STEP) and any(map(is_path, names))
        for key, names in code_named(to_dict(run.cfg)).items()
    )
    trust = " --trust-code" if own_encoder else ""
    return f"{program_text} generate {source}{media} --prompt {shlex.quote(prompt)}{trust}"

"""Replay of a bad step: a checkpoint of the state before it, and a file with the command that repeats it.

Both are in `run.dir`/replay, where `checkpoint.resume=auto` does not find checkpoints and `checkpoint.keep` does not
remove them. A restarted run resumes from its own newest checkpoint, and reads the same samples again.
"""

import json
import shlex
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from mimo_train.config.compose import to_dict, to_yaml
from mimo_train.debug.bisect import Origin
from mimo_train.debug.nan_findings import Findings
from mimo_train.training.step.batches import StepIterator
from mimo_train.training.step.state import GlobalState

FOLDER = "replay"
"""Folder in `run.dir`."""


def write_replay(
    state: GlobalState,
    data: StepIterator,
    norms: dict[str, float],
    findings: Findings,
    origin: Origin | None,
    checkpoint: Path,
) -> tuple[Path, str]:
    """Write `replay/step_XXXXXXXX.json` and its config, on the logging rank. Collective.

    Args:
        norms: gradient norm of each module.
        origin: what bisecting found, if it was asked for.
        checkpoint: folder of the state before the step.

    Returns:
        The file, and the command that repeats the step and bisects it. Its run has its own folder, keeps the learning
        rates, and ends after this one step.
    """
    step, folder, current = state.train_state.step + 1, state.run_dir / FOLDER, data.current
    file, config = folder / f"step_{step:08d}.json", folder / f"step_{step:08d}.yaml"
    overrides = [
        f"run.dir={folder / f'step_{step:08d}'}",
        f"checkpoint.resume={checkpoint}",
        "train.on_nan=bisect",
        f"train.exit_interval={step}",
    ]
    if state.cfg.checkpoint.dir:
        overrides.append("checkpoint.dir=")  # its checkpoints are none of the run
    if state.cfg.run.inprocess_restarts:
        # A run with restarts resumes from its newest checkpoint, not from a chosen one.
        overrides.append("run.inprocess_restarts=0")
    ranks = f"torchrun --nproc-per-node {state.layout.processes[-1] + 1} -m mimo_train.cli train"
    command = f"{ranks} {shlex.join([str(config), *overrides])}"
    if state.is_logging_rank:
        suspects = {part.microbatch for part in (*findings.inputs, *findings.losses)}
        record = {
            "step": step,
            "consumed_samples": state.train_state.consumed_train_samples,
            "samples": [current.first_sample, current.first_sample + current.size],
            "microbatches": len(current.microbatches),
            "suspect_microbatches": sorted(suspects),
            "grad_norm": {module: str(norm) for module, norm in norms.items()},
            "findings": asdict(findings),
            "origin": asdict(origin) if origin is not None else None,
            "checkpoint": str(checkpoint),
            "config_file": str(config),
            "overrides": overrides,
            "command": command,
            "config": to_dict(state.cfg),
        }
        config.write_text(to_yaml(state.cfg))
        file.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    return file, command

"""The policy `train.on_nan` for a step with a non-finite gradient, and the replay of the step.

The optimizer has updated nothing, and every rank has the same norm, so all ranks act alike without communication.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from mimo_train.config.compose import to_dict, to_yaml
from mimo_train.config.errors import UserError
from mimo_train.debug.bisect import Origin, bisect
from mimo_train.debug.nan_findings import Findings, gather
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.parallel import device
from mimo_train.training.step.batches import StepIterator
from mimo_train.training.step.losses import StepLosses
from mimo_train.training.step.pipeline import Pipeline
from mimo_train.training.step.state import GlobalState, StepResult

FOLDER = "replay"
"""Folder in `run.dir`."""
TRANSIENT = "every microbatch alone is finite: their sum overflows, or the fault was a transient one of the machine"
MOST_IN_A_ROW = 10
"""Bad steps in a row after which `train.on_nan=skip` ends the run: samples are not the cause then."""


class NonFiniteStep(UserError):
    """A gradient was not finite, and `train.on_nan` ends the run. The same on every rank."""


class NanPolicy:
    """Checks the steps of a loop. A good step costs no message and no copy from the device.

    `train.on_nan=bisect` calls `forward_backward` as (data, number of microbatches).
    """

    def __init__(
        self,
        state: GlobalState,
        pipeline: Pipeline,
        optimizer: ModuleOptimizer,
        losses: StepLosses,
        forward_backward: Callable[[StepIterator, int], None],
        save: Callable[[Path, str], Path],
    ):
        """`save` is called as (folder, reason); it saves the run and returns the checkpoint's folder. Collective."""
        self._state, self._pipeline, self._optimizer, self._losses = state, pipeline, optimizer, losses
        self.forward_backward, self._save = forward_backward, save
        self._in_a_row = 0
        self._generators: dict[str, Any] = {}
        self._scale: torch.Tensor | None = None

    def start_step(self) -> None:
        """Record what a step changes and a replay needs: the random generators and the loss scale."""
        self._generators = device.get_rng_state()
        if isinstance(self._optimizer.grad_scaler, DynamicGradScaler):
            # The scaler replaces this tensor at an update.
            self._scale = self._optimizer.grad_scaler.scale

    def end_step(self, result: StepResult, data: StepIterator) -> None:
        """Apply `train.on_nan` if the step was bad; collective in that case. Raises NonFiniteStep with the policies
        raise and bisect, and with skip at the tenth bad step in a row."""
        if not result.skipped_iter:
            self._in_a_row = 0
        elif not result.should_exit and not self._scale_was_lowered():
            self._bad_step(result.grad_norm, data)

    def _scale_was_lowered(self) -> bool:
        """True if fp16 lowered its loss scale, which is not a fault unless the scale is the smallest."""
        scaler = self._optimizer.grad_scaler
        return isinstance(scaler, DynamicGradScaler) and bool(self._scale > scaler.min_scale)

    def _bad_step(self, norm: float | None, data: StepIterator) -> None:
        state, policy = self._state, self._state.cfg.train.on_nan
        step = state.train_state.step + 1
        self._in_a_row += 1
        findings = gather(self._pipeline, self._losses, data)
        nothing = f"step {step}: a gradient is not finite (norm {norm}), nothing was updated"
        if policy == "skip" and self._in_a_row < MOST_IN_A_ROW:
            state.console.message("\n  ".join([f"train.on_nan=skip: {nothing}", *findings.lines()]))
            return
        if policy == "skip":
            nothing += f", as in the {MOST_IN_A_ROW - 1} steps before it"
        norms = self._optimizer.module_grad_norms
        device.set_rng_state(self._generators)
        checkpoint = self._save(state.run_dir / FOLDER, f"before step {step}, whose gradient is not finite")
        origin = None
        if policy == "bisect":
            device.set_rng_state(self._generators)
            origin = bisect(self.forward_backward, self._pipeline, self._losses, data)
        file, command = write_replay(state, data, norms, findings, origin, checkpoint)
        lines = [
            f"train.on_nan={policy}: {nothing}",
            *findings.lines(),
            *([f"bisect: {origin or TRANSIENT}"] if policy == "bisect" else []),
            f"the state before this step is checkpoint {checkpoint}, the findings are in {file}",
            f"make the step again, and bisect it: {command}",
        ]
        raise NonFiniteStep("\n".join(lines))


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
        checkpoint: folder of the state before the step.

    Returns:
        The file, and the command that repeats the step and bisects it, in its own folder and for one step.
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
        overrides.append("checkpoint.dir=")  # its checkpoints do not belong to the run
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

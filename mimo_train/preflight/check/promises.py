"""Checks of what a run needs apart from its config and data: the user's code, and what is only known later."""

from pathlib import Path

from mimo_train.config.parts import PARTS
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.user_code import missing_code
from mimo_train.estimate.parameters import freeze_patterns
from mimo_train.hf.llava_limits import why_several
from mimo_train.preflight.check.findings import Report

DRIVER = Path("/proc/driver/nvidia")
"""What a machine with a driver for NVIDIA's GPUs has."""

OF_WINDOWS = Path("/dev/dxg")
"""What Linux inside Windows has in its place."""


def add_promises(report: Report, cfg: ConfigContainer) -> None:
    """Report code of the user that is not there, and what only the start of the run can show."""
    known = {fault.key for fault in report.faults}
    report.faults += [fault for fault in missing_code(cfg.train) if fault.key not in known]
    for name, module in cfg.modules.items():
        until = [entry for entry in module.freeze_until if entry not in PARTS]
        for key, patterns in (("freeze", freeze_patterns(module)), ("freeze_until", until)):
            if patterns and f"modules.{name}.{key}" not in known:
                report.notes.append(
                    f"modules.{name}.{key}: whether {', '.join(patterns)} match parameters is seen when the model is "
                    "built, as with --dry-run"
                )
    reason = "" if any(key.startswith("modules") for key in known) else why_several(cfg)
    if reason:
        several = "an export of this run is a directory for each part, since transformers has no model for all"
        report.notes.append(f"{several}: {reason}")
    if cfg.run.device == "cuda" and not DRIVER.exists() and not OF_WINDOWS.exists():
        report.warnings.append(
            "run.device is cuda, and this machine has no driver for GPUs: the run starts on others only, here with "
            "run.device=cpu"
        )

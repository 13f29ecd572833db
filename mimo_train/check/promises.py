"""What a run needs beside its config and data, as far as it can be seen before a start: classes of callbacks, and what
is only known later. Imports no torch, and no module of the user."""

import ast
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from mimo_train.check.findings import Report
from mimo_train.config.fault import Fault
from mimo_train.config.own_code import search_working_directory
from mimo_train.config.parts import PARTS
from mimo_train.config.schema import ConfigContainer
from mimo_train.plan.parameters import freeze_patterns

DRIVER = Path("/proc/driver/nvidia")
"""What a machine with a driver for NVIDIA's GPUs has."""

OF_WINDOWS = Path("/dev/dxg")
"""What Linux inside Windows has in its place."""


def add_promises(report: Report, cfg: ConfigContainer) -> None:
    """Faults callbacks that are not there, and notes what only the start of the run can show."""
    known = {fault.key for fault in report.faults}
    if "train.callbacks" not in known:
        report.faults += [
            Fault("train.callbacks", f"{entry!r} cannot be used: {why}")
            for entry in cfg.train.callbacks
            for why in _why_not_there(*entry.split(":"))
        ]
    for name, module in cfg.modules.items():
        until = [entry for entry in module.freeze_until if entry not in PARTS]
        for key, patterns in (("freeze", freeze_patterns(module)), ("freeze_until", until)):
            if patterns:
                report.notes.append(
                    f"modules.{name}.{key}: whether {', '.join(patterns)} match parameters is seen when the model is "
                    "built, as with --dry-run"
                )
    if cfg.run.device == "cuda" and not DRIVER.exists() and not OF_WINDOWS.exists():
        report.warnings.append(
            "run.device is cuda, and this machine has no driver for GPUs: the run starts on others only, here with "
            "run.device=cpu"
        )


def _why_not_there(module: str, name: str) -> Iterator[str]:
    """Why a class cannot be loaded, from the source of its module, which is not run: what it does when it is imported,
    and the names that it makes then, stay unknown."""
    search_working_directory()
    importlib.invalidate_caches()
    try:
        spec = find_spec(module)
    except (Exception, SystemExit) as error:  # its packages are imported: whatever they raise
        yield f"{type(error).__name__}: {error}"
        return
    if spec is None:
        yield f"No module named {module!r}"
        return
    try:
        source = getattr(spec.loader, "get_source", lambda _: None)(module)
        body = None if source is None else ast.parse(source, spec.origin or module).body
    except (SyntaxError, UnicodeDecodeError, ImportError) as error:
        yield f"{type(error).__name__}: {error}"
        return
    # Only a module of plain statements shows all of its names.
    plain = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Expr, ast.Assign)
    if body is None or not all(isinstance(one, (*plain, ast.AnnAssign)) for one in body):
        return
    names = {found for one in body for found in _names(one)}
    if not names & {name, "*", "__getattr__"}:
        yield f"module {module!r} ({spec.origin}) has no {name!r}"


def _names(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement gives a module."""
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Name) and node.id in ("exec", "globals", "setattr"):
            yield "*"  # anything may come of it

"""Check that `data` and `encoders` are imported from mimo-train.

The names are common: a user's folder may hold a `data.py`. Our scripts start Python with -P, which keeps the working
directory off the path; `python -m` (torchrun) puts it first.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from mimo_train.config.errors import UserError

NAMES = ("encoders", "data")
HOME = Path(__file__).resolve().parents[2]
"""Folder that holds our packages: a checkout or site-packages."""


def working_directory_last() -> None:
    """Move the working directory from the front of Python's path, where `python -m` puts it, to the end. The user's
    modules are still found (`train.callbacks`) but do not hide ours. No effect if our packages are in it."""
    if sys.flags.safe_path or not sys.path:
        return
    try:
        directory = os.getcwd()
    except OSError:  # it was removed
        return
    if sys.path[0] in ("", directory) and Path(directory).resolve() != HOME:
        del sys.path[0]
        if directory not in sys.path:
            sys.path.append(directory)


def require_own_packages() -> None:
    """Require that Python imports our own packages.

    Raises:
        UserError: another package hides one of ours; one line each with both locations and the fix.
    """
    faults = [fault for name in NAMES if (fault := _fault(name))]
    if faults:
        raise UserError("\n".join(faults))


def _fault(name: str) -> str:
    spec, ours = find_spec(name), HOME / name / "__init__.py"
    if spec is None or spec.origin is None:
        return f"{name}: mimo-train's package is not next to {HOME / 'mimo_train'}: install mimo-train again"
    origin = Path(spec.origin)
    if origin.resolve() == ours:
        return ""
    hides = origin.parent if origin.name == "__init__.py" else origin
    return (
        f"{name}: Python finds {hides} before mimo-train's own {ours.parent}: take {hides.parent} out of PYTHONPATH or "
        f"rename {hides.name}; if a package brought it, uninstall that or set MIMO_VENV to a folder for an environment "
        "of mimo-train's own"
    )

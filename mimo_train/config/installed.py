"""Which optional libraries are installed. Imports none of them."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from mimo_train.config.fault import Fault


def library_faults(section: Any, prefix: str, needed: Mapping[str, tuple[str, str]]) -> Iterator[Fault]:
    """Keys of a section that are on and whose library is not installed.

    Args:
        needed: by key, the module that it needs and what pip installs it by.
    """
    for name, (module, install) in needed.items():
        value = getattr(section, name)
        if value and not is_installed(module):
            off = str(type(value)()).lower()
            yield Fault(
                f"{prefix}.{name}",
                f"{module} is not installed: run `pip install {install}`, or set {prefix}.{name}={off}",
            )


def is_installed(module: str) -> bool:
    """Whether a module of this name can be imported."""
    try:
        found = find_spec(module)
    except ModuleNotFoundError:  # of its package
        return False
    # A folder of that name in the working directory is found too, without an origin.
    return found is not None and found.origin is not None

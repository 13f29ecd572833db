"""Code of users that a config names: where Python looks for it, what is said before it is imported, and whose word
counts. Imports no torch."""

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from encoders.joined.spec import PARTS as JOINED
from encoders.registry import is_path, registered
from mimo_train.config.fault import UserError

CALLBACKS = "train.callbacks"


def search_working_directory() -> None:
    """Let modules of the working directory be found, behind everything else, so that they hide no installed package.
    The scripts and the `mimo-train` command leave it off Python's path."""
    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        return
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def code_named(plain: Mapping[str, Any]) -> dict[str, list[str]]:
    """What is imported when a config is built and run, by key; nothing is imported here. Values of wrong types, which
    are faults of their own, name nothing.

    Args:
        plain: nested dicts, as `compose.from_dict` takes them.
    """
    named: dict[str, list[str]] = {}
    modules = plain.get("modules")
    for name, module in modules.items() if isinstance(modules, Mapping) else ():
        if isinstance(module, Mapping):
            named |= {key: [family] for key, family in _families(module.get("encoder"), f"modules.{name}.encoder")}
    train = plain.get("train")
    callbacks = train.get("callbacks") if isinstance(train, Mapping) else None
    if isinstance(callbacks, (list, tuple)) and callbacks:
        named[CALLBACKS] = [str(entry) for entry in callbacks]
    return named


def _families(encoder: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if not isinstance(encoder, Mapping):
        return
    family = str(encoder.get("family", ""))
    if is_path(family) or registered(family):
        yield f"{prefix}.family", family
    for part in JOINED:
        yield from _families(encoder.get(part), f"{prefix}.{part}")


def say_imports(plain: Mapping[str, Any]) -> None:
    """Say on standard error what code of users is about to be imported; on rank 0, and once."""
    if os.environ.get("RANK", "0") == "0":
        for key, names in code_named(plain).items():
            _say(f"{key} names code that is imported: " + ", ".join(f"{name}{_origin(name)}" for name in names))


@cache
def _say(line: str) -> None:
    # `data` may be another package until `mimo_train.launch.own_packages` has looked, which imports `config`.
    from data.shown import shown

    sys.stderr.write(f"notice: {shown(line)}\n")
    sys.stderr.flush()


def _origin(name: str) -> str:
    return "" if is_path(name) else "".join(f" ({where})" for where in registered(name))


def require_trusted(plain: Mapping[str, Any], whose: str, trusted: Collection[str], remedy: str) -> None:
    """What an installed package has registered is taken: whoever installed it has chosen it.

    Args:
        plain: a config that the user has not written.
        whose: the file that it is from, for the message.
        trusted: paths that the user has named too.
        remedy: the end of the message.

    Raises:
        UserError: it names code by a path, which building it would import.
    """
    for key, names in code_named(plain).items():
        refused = [name for name in names if is_path(name) and name not in trusted]
        if refused:
            raise UserError(
                f"{key}: {whose} names the code {', '.join(refused)}, which would be imported and run: {remedy}"
            )

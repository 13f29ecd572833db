"""User code that a config names: where Python searches it, the notice before its import, and who may name it."""

import importlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from encoders.joined.spec import PARTS as JOINED
from encoders.registry import is_path, registered
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.schema_train import TrainConfig

CALLBACKS, FORWARD_STEP = "train.callbacks", "train.forward_step"


def search_working_directory() -> None:
    """Append the working directory to Python's path, where it hides no installed package. The scripts and the
    `mimo-train` command leave it off."""
    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        return
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def code_named(plain: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the code that building and running a config imports, by key; nothing is imported here. `plain`: nested
    dicts. Values of wrong types, which have their own faults, name nothing."""
    named: dict[str, list[str]] = {}
    modules = plain.get("modules")
    for name, module in modules.items() if isinstance(modules, Mapping) else ():
        if isinstance(module, Mapping):
            named |= {key: [family] for key, family in _families(module.get("encoder"), f"modules.{name}.encoder")}
    train = plain.get("train")
    callbacks = train.get("callbacks") if isinstance(train, Mapping) else None
    if isinstance(callbacks, (list, tuple)) and callbacks:
        named[CALLBACKS] = [str(entry) for entry in callbacks]
    forward_step = train.get("forward_step") if isinstance(train, Mapping) else None
    if isinstance(forward_step, str) and forward_step:
        named[FORWARD_STEP] = [forward_step]
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
    """Announce on standard error the user code that is about to be imported; on rank 0, and once."""
    if os.environ.get("RANK", "0") == "0":
        for key, names in code_named(plain).items():
            _say(f"{key} names code that is imported: " + ", ".join(f"{name}{_origin(name)}" for name in names))


@cache
def _say(line: str) -> None:
    # `data` may be another package until `mimo_train.launch.import_guard`, which imports `config`, has checked.
    from data.text_format import shown

    sys.stderr.write(f"notice: {shown(line)}\n")
    sys.stderr.flush()


def _origin(name: str) -> str:
    return "" if is_path(name) else "".join(f" ({where})" for where in registered(name))


def require_trusted(plain: Mapping[str, Any], whose: str, trusted: Collection[str], remedy: str) -> None:
    """Require that a config of another origin names no untrusted code. Code that an installed package has registered is
    trusted.

    Args:
        plain: a config that the user has not written.
        whose: the file that it comes from, for the message.
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


def load_code(key: str, entry: str) -> Any:
    """Return the object that an entry `package.module:name` names; the working directory is searched last.

    Raises:
        ConfigError: the module cannot be imported, or has no such name.
    """
    search_working_directory()
    module, _, name = entry.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # user code can raise anything
        raise ConfigError([unusable_code(key, entry, error)]) from error


def unusable_code(key: str, entry: str, error: BaseException) -> Fault:
    """Return the config error of an entry whose use has raised `error`."""
    kind = "" if isinstance(error, (ImportError, AttributeError, TypeError)) else f"{type(error).__name__}: "
    return Fault(key, f"{entry!r} cannot be used: {kind}{error}")


def missing_code(train: TrainConfig) -> Iterator[Fault]:
    """Yield entries of `train` whose module does not exist. Modules are not imported, but their packages are."""
    entries = [(CALLBACKS, entry) for entry in train.callbacks]
    entries += [(FORWARD_STEP, train.forward_step)] if train.forward_step else []
    search_working_directory()
    for key, entry in entries:
        try:
            spec = find_spec(entry.partition(":")[0])
        except (Exception, SystemExit) as error:  # packages can raise anything
            yield unusable_code(key, entry, error)
            continue
        if spec is None:
            yield Fault(
                key,
                f"{entry!r} cannot be used: there is no such module. Correct the name, or install the module or put it "
                "in the working directory or PYTHONPATH",
            )

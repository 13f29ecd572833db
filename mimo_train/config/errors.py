"""User errors, and config faults with their keys."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mimo_train.config.removed import remedy_of_removed


class UserError(ValueError):
    """Base of this package's errors that a user can cause; the message contains the remedy. Commands print it as
    `error: ` lines without a traceback. `data.errors` and `encoders.errors` have their own bases."""


class PeersError(UserError):
    """An error that another rank has raised and prints; every rank raises it. `kind`: the other error's class name."""

    def __init__(self, text: str, kind: str = UserError.__name__):
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Fault:
    """An error of a run: the config key to change, and a sentence with the numbers."""

    key: str
    message: str
    meant: tuple[str, ...] = field(default=(), compare=False)
    """Keys that may be meant by an unknown one."""

    def __str__(self) -> str:
        # `data` may be another package until `mimo_train.launch.import_guard`, which imports this module, has run.
        from data.text_format import shown_lines

        return shown_lines(f"{self.key}: {self.message}" if self.key else self.message)


class ConfigError(UserError):
    """A run that cannot start, with all faults; `cfg`: the config with defaults for wrong values, or None."""

    def __init__(self, faults: Iterable[Fault], cfg: Any = None):
        self.faults, self.cfg = list(faults), cfg
        super().__init__("\n".join(str(fault) for fault in self.faults))


def unknown_key(prefix: str, name: str, fields: Iterable[str]) -> Fault:
    """Return the error of a key that is no field of its section."""
    # `encoders` may be another package until `mimo_train.launch.import_guard`, which imports this module, has run.
    from encoders.key_rules import near_names, nearest

    key, fields = f"{prefix}{name}", list(fields)
    if (remedy := remedy_of_removed(key)) is not None:
        return Fault(key, f"was a key of an earlier version. {remedy}")
    return Fault(
        key, f"unknown key. {nearest(name, fields)}", tuple(f"{prefix}{near}" for near in near_names(name, fields))
    )

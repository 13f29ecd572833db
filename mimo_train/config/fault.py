"""User errors, and faults of a config with their keys. Imports no torch."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


class UserError(ValueError):
    """Base of this package's errors that a user can cause; the message contains the remedy.

    Commands print it as `error: ` lines without a traceback. `data.errors` and `encoders.errors` have their own bases.
    """


class PeersError(UserError):
    """An error that another rank has found and prints; every rank raises it.

    Attributes:
        kind: name of the class that the other rank has raised.
    """

    def __init__(self, text: str, kind: str = UserError.__name__):
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a run: the config key to change, and a sentence with the numbers."""

    key: str
    message: str

    def __str__(self) -> str:
        # `data` may be another package until `mimo_train.launch.own_packages` has looked, which imports this module.
        from data.shown import shown_lines

        return shown_lines(f"{self.key}: {self.message}" if self.key else self.message)


class ConfigError(UserError):
    """A run that cannot start, with all faults."""

    def __init__(self, faults: Iterable[Fault]):
        self.faults = list(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


def nearest(word: str, choices: Iterable[str]) -> str:
    """A clause that names the nearest of `choices`, or all of them when none is near."""
    choices = list(choices)
    near = difflib.get_close_matches(word, choices, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; choose from {', '.join(choices)}" if choices else ""

"""Measured costs of layers, kept as JSON: what a device really computes in a second. Imports no torch."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mimo_train.config.fault import UserError

VERSION = 1


@dataclass(frozen=True)
class LayerCost:
    """One layer of one module, as one of `tp` ranks has it."""

    module: str
    tp: int
    tokens: int
    """Of one call."""
    forward_flops: float
    """Of one call on this rank."""
    backward_flops: float
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class Profile:
    """Costs of the layers of a run, measured on one device."""

    device: str
    precision: str
    layers: tuple[LayerCost, ...]

    def rates(self, module: str, tp: int) -> tuple[float, float]:
        """FLOPs in a second of a module's layers forward and backward, of the measured tp that is nearest."""
        own = [one for one in self.layers if one.module == module]
        near = min(own, key=lambda one: (abs(math.log(one.tp / tp)), one.tp))
        return near.forward_flops / near.forward_seconds, near.backward_flops / near.backward_seconds

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            UserError: it cannot be written.
        """
        plain = {"version": VERSION} | asdict(self)
        try:
            path.write_text(json.dumps(plain, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--profile: cannot write {path} ({error.strerror}): give another name") from error


def read_profile(path: Path, modules: Sequence[str], precision: str) -> Profile:
    """Read a profile of a run with these modules.

    Raises:
        UserError: there is none, it is damaged, or it is that of another run.
    """
    try:
        plain = json.loads(path.read_text())
        if plain["version"] != VERSION:
            raise ValueError(f"is of version {plain['version']}")
        layers = tuple(LayerCost(**one) for one in plain["layers"])
        profile = Profile(str(plain["device"]), str(plain["precision"]), layers)
        _require_numbers(layers)
    except OSError as error:
        raise UserError(f"--profile: cannot read {path} ({error.strerror}): make it with --measure") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--profile: {path} is no profile ({error}): make it with --measure") from error
    missing = [name for name in modules if name not in {layer.module for layer in layers}]
    if missing:
        raise UserError(f"--profile: {path} has no costs of {', '.join(missing)}: make it with --measure of this run")
    if profile.precision != precision:
        raise UserError(
            f"--profile: {path} is of {profile.precision}, and train.precision is {precision}: make it with --measure "
            "of this run"
        )
    return profile


def _require_numbers(layers: Sequence[LayerCost]) -> None:
    for layer in layers:
        numbers: dict[str, Any] = {key: value for key, value in asdict(layer).items() if key != "module"}
        for key, value in numbers.items():
            if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{key} of {layer.module} is {value!r}")

"""Measured costs of layers, kept as JSON: what a device really computes in a second. Imports no torch."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mimo_train.config.errors import UserError

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
        profile = _profile_of(json.loads(path.read_text()))
    except OSError as error:
        raise UserError(f"--profile: cannot read {path} ({error.strerror}): make it with --measure") from error
    except ValueError as error:
        raise UserError(f"--profile: {path} is no profile ({error}): make it with --measure") from error
    missing = [name for name in modules if name not in {layer.module for layer in profile.layers}]
    if missing:
        raise UserError(f"--profile: {path} has no costs of {', '.join(missing)}: make it with --measure of this run")
    if profile.precision != precision:
        raise UserError(
            f"--profile: {path} is of {profile.precision}, and train.precision is {precision}: make it with --measure "
            "of this run"
        )
    return profile


def _profile_of(plain: Any) -> Profile:
    """Raises ValueError for what is none."""
    values = _fields(plain, ("version", "device", "precision", "layers"), "it")
    if values["version"] != VERSION:
        raise ValueError(f"it is of version {values['version']!r}, not {VERSION}")
    if not isinstance(values["layers"], list):
        raise ValueError("its layers are no list")
    names = tuple(field.name for field in fields(LayerCost))
    layers = tuple(LayerCost(**_fields(one, names, f"layers[{at}]")) for at, one in enumerate(values["layers"]))
    _require_numbers(layers)
    return Profile(str(values["device"]), str(values["precision"]), layers)


def _fields(plain: Any, names: Sequence[str], what: str) -> dict[str, Any]:
    """An object of JSON with these keys and no others."""
    if not isinstance(plain, dict):
        raise ValueError(f"{what} is no object with {', '.join(names)}")
    if wrong := sorted(set(plain).symmetric_difference(names)):
        key = wrong[0]
        raise ValueError(f"{what} has no {key}" if key in names else f"{what} has {key!r}, which is not known")
    return plain


def _require_numbers(layers: Sequence[LayerCost]) -> None:
    for layer in layers:
        numbers: dict[str, Any] = {key: value for key, value in asdict(layer).items() if key != "module"}
        for key, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{key} of {layer.module} is {value!r}")

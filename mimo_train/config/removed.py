"""Keys that earlier versions had, and that change nothing in a checkpoint."""

import re
from collections.abc import Mapping
from typing import Any

REMOVED = {
    "placement.bridge": "Remove it",
    "data.stream": "Remove it",
    "data.bounds.sample_bytes": "Remove it",
    "log.prometheus": "Remove it",
    "log.prometheus_port": "Remove it",
}
"""What to do about each, which the error of a config that has it says. `modules.NAME` is any module."""


def remedy_of_removed(key: str) -> str | None:
    """What to do about a key that earlier versions had; None if they had none of this name."""
    return REMOVED.get(re.sub(r"^modules\.[^.]+", "modules.NAME", key))


def without_removed(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts of a config without the keys that earlier versions had."""
    kept = {name: value for name, value in plain.items() if remedy_of_removed(f"{prefix}{name}") is None}
    return {
        name: without_removed(value, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in kept.items()
    }

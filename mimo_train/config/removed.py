"""Keys that earlier versions had, and that change nothing in a checkpoint."""

from collections.abc import Mapping
from typing import Any

REMOVED = (
    "placement.bridge",
    "data.stream",
    "data.bounds.sample_bytes",
    "log.prometheus",
    "log.prometheus_port",
)


def without_removed(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts of a config without the keys that earlier versions had."""
    kept = {name: value for name, value in plain.items() if f"{prefix}{name}" not in REMOVED}
    return {
        name: without_removed(value, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in kept.items()
    }

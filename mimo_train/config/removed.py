"""Keys of earlier versions that change nothing in a checkpoint."""

import re
from collections.abc import Mapping
from typing import Any

REMOVED = {
    "placement.bridge": "Remove it",
    "data.stream": "Remove it",
    "data.bounds.sample_bytes": "Remove it",
    **dict.fromkeys(("data.bounds.sample_rate", "data.bounds.video_frames", "data.bounds.video_pixels"), "Remove it"),
    **dict.fromkeys(("data.bounds.record_depth", "data.bounds.turns"), "Remove it"),
    "log.grad_norms": "Set log.metrics=[grad_norms]",
    "log.memory": "Set log.metrics=[memory]",
    "log.num_zeros_in_grad": "Set log.metrics=[num_zeros_in_grad]",
    "log.params_norm": "Set log.metrics=[params_norm]",
    "log.prometheus": "Remove it",
    "log.prometheus_port": "Remove it",
    "log.router_losses_per_layer": "Set log.metrics=[router_losses_per_layer]",
    "log.straggler": "Set log.metrics=[straggler]",
    "optim.min_loss_scale": "Remove it. The least dynamic loss scale is 1",
    "profiling.record_shapes": "Remove it",
}
"""Remedy for each key, in the error of a config with it. `modules.NAME` is any module."""


def remedy_of_removed(key: str) -> str | None:
    """Return the remedy for a removed key; None for all other names."""
    return REMOVED.get(re.sub(r"^modules\.[^.]+", "modules.NAME", key))


def without_removed(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts of a config without removed keys."""
    kept = {name: value for name, value in plain.items() if remedy_of_removed(f"{prefix}{name}") is None}
    return {
        name: without_removed(value, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in kept.items()
    }

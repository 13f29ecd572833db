"""Keys and values of earlier versions: what replaces them in a config, and what they mean in a checkpoint's config."""

from collections.abc import Mapping
from typing import Any

REMOVED: dict[str, tuple[Any, str]] = {
    "placement.bridge": ("native", "Remove it"),
    "checkpoint.max_failed_saves": (3, "Remove it. The limit is 3"),
    "data.stream": (False, "Remove it"),
    "data.bounds.sample_bytes": (2**30, "Remove it"),
    "data.bounds.sample_rate": (384_000, "Remove it"),
    "data.bounds.video_bytes": (2**30, "Remove it"),
    "data.bounds.video_frames": (1_000_000, "Remove it"),
    "data.bounds.video_pixels": (100_000_000_000, "Remove it"),
    "data.bounds.record_bytes": (2**24, "Remove it"),
    "data.bounds.placeholders": (4096, "Remove it"),
    "data.bounds.record_depth": (64, "Remove it"),
    "data.bounds.turns": (1000, "Remove it"),
    "data.mix_new_weights": (False, "Remove it. Changed weights hold from the step that the run resumes from"),
    "log.grad_norms": (False, "Set log.metrics=[grad_norms]"),
    "log.memory": (False, "Set log.metrics=[memory]"),
    "log.module_times": (True, "Remove it"),
    "log.num_zeros_in_grad": (False, "Set log.metrics=[num_zeros_in_grad]"),
    "log.params_norm": (False, "Set log.metrics=[params_norm]"),
    "log.prometheus": (False, "Remove it"),
    "log.prometheus_port": (0, "Remove it"),
    "log.router_losses_per_layer": (False, "Set log.metrics=[router_losses_per_layer]"),
    "log.straggler": (False, "Set log.metrics=[straggler]"),
    "optim.min_loss_scale": (1.0, "Remove it. The least dynamic loss scale is 1"),
    "run.step_timeout_minutes": (0.0, "Remove it. Set run.timeout_minutes or run.hang_report_seconds"),
    "profiling.record_shapes": (False, "Remove it"),
    "profiling.torch": (False, "Set profiling.record=[torch]"),
    "profiling.nsys": (False, "Set profiling.record=[nsys]"),
    "profiling.memory_history": (False, "Set profiling.record=[memory_history]"),
    "profiling.step_start": (10, "Set profiling.steps=[FIRST, LAST]"),
    "profiling.step_end": (12, "Set profiling.steps=[FIRST, LAST]"),
}
"""Removed key -> (its default, the remedy in the error of a config that has it)."""

RENAMED = {"balance": {"patches": "images"}}
"""Key of a module -> its values of earlier versions, and their names now."""


def remedy_of_removed(key: str) -> str | None:
    """Return the remedy for a removed key; None for all other names."""
    entry = REMOVED.get(key)
    return None if entry is None else entry[1]


def without_removed(plain: Mapping[str, Any], prefix: str = "", *, only_defaults: bool = False) -> dict[str, Any]:
    """Return nested dicts of a config without removed keys, and with the new names of values; `only_defaults`: without
    removed keys that had their default."""
    kept = {}
    for name, value in plain.items():
        if prefix.startswith("modules.") and isinstance(value, str):
            value = RENAMED.get(name, {}).get(value, value)
        entry = REMOVED.get(f"{prefix}{name}")
        if entry is None or (only_defaults and value != entry[0]):
            is_section = isinstance(value, dict)
            kept[name] = (
                without_removed(value, f"{prefix}{name}.", only_defaults=only_defaults) if is_section else value
            )
    return kept

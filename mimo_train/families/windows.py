"""Layers with a sliding window in config.json."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import Config, Keys, Spelling, fault

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`."""


def every_layer(config: Config, layer: int) -> bool:
    """True for all layers."""
    return True


def late_layers(config: Config, layer: int) -> bool:
    """True from `max_window_layers` on."""
    return layer >= config["max_window_layers"]


def pattern_layers(config: Config, layer: int) -> bool:
    """True except for every layer of number `sliding_window_pattern`."""
    return bool((layer + 1) % config["sliding_window_pattern"])


@dataclass(frozen=True)
class Windows(Spelling):
    """Layers with a window of `sliding_window` tokens."""

    default: Callable[[Config, int], bool] | None = None
    """True for the layers with a window, if `layer_types` does not say it; None: no layer."""
    by_layer: bool = False
    """True if the class reads `layer_types`."""
    switched: bool = False
    """True if the windows are off without `use_sliding_window`."""

    def faults(self, config: Config) -> Iterator[Fault]:
        kinds, layers = config.get("layer_types"), config["num_hidden_layers"]
        if kinds is None:
            pattern = config.get("sliding_window_pattern")
            is_read = self.default is pattern_layers and config["sliding_window"]
            if is_read and (type(pattern) is not int or pattern < 1):
                yield fault("sliding_window_pattern", pattern, "a whole number of at least 1 or layer_types is needed")
            return
        if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
            yield fault("layer_types", kinds, f"one of {FULL} and {SLIDING} for each of {layers} layers can be built")
        elif SLIDING in kinds and not config.get("sliding_window"):
            yield fault("sliding_window", config.get("sliding_window"), f"layer_types has {SLIDING} layers")
        elif SLIDING in kinds and self.by_layer and self.switched and not config["use_sliding_window"]:
            yield fault("use_sliding_window", config["use_sliding_window"], f"layer_types has {SLIDING} layers")
        elif not self.by_layer:
            wanted = SLIDING if self._windowed(config) else FULL
            if set(kinds) != {wanted}:
                yield fault("layer_types", kinds, f"this family does not read it, and has {wanted} in all layers")

    def read(self, config: Config, keys: Keys) -> Keys:
        windowed, layers = self._windowed(config), range(config["num_hidden_layers"])
        if not windowed:
            return {"window": 0, "full_attention_layers": []}
        return {
            "window": config["sliding_window"],
            "full_attention_layers": [layer for layer in layers if layer not in windowed],
        }

    def write(self, spec: LlmSpec) -> Keys:
        if self.default is None:
            return {}
        kinds = [SLIDING if spec.window_of(layer) else FULL for layer in range(spec.num_layers)]
        keys: Keys = {"sliding_window": spec.window or None}
        if self.switched:
            keys["use_sliding_window"] = bool(spec.window)
        if self.default is late_layers:
            # Version 4 before 4.53 only knows this key: the layers from here on.
            keys["max_window_layers"] = kinds.index(SLIDING) if SLIDING in kinds else spec.num_layers
        return keys | ({"layer_types": kinds} if self.by_layer else {})

    def _windowed(self, config: Config) -> set[int]:
        layers = range(config["num_hidden_layers"])
        off = self.switched and not config["use_sliding_window"]
        if self.default is None or off or not config["sliding_window"]:
            return set()
        kinds = config.get("layer_types") if self.by_layer else None
        return {n for n in layers if (self.default(config, n) if kinds is None else kinds[n] == SLIDING)}

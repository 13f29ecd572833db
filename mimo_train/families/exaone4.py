"""EXAONE 4: norms behind both blocks alone, and of each head; if layers have windows, only these rotate."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.families.base import Config, Family, Keys, Spelling, fault
from mimo_train.families.olmo import OLMO2
from mimo_train.families.rope import Rope
from mimo_train.families.windows import Windows, pattern_layers


@dataclass(frozen=True)
class WindowsRotate(Spelling):
    """Layers that attend to all tokens do not rotate, if `sliding_window` is set."""

    @property
    def feature(self) -> str:
        return "positions in layers with a window only, if `sliding_window` is set"

    def faults(self, config: Config) -> Iterator[Fault]:
        pattern = config["sliding_window_pattern"]
        if config["sliding_window"] and not config.get("layer_types") and (type(pattern) is not int or pattern < 1):
            yield fault("sliding_window_pattern", pattern, "without layer_types a whole number of at least 1 is needed")

    def read(self, config: Config, keys: Keys) -> Keys:
        if not config["sliding_window"]:
            return {"no_rope_layers": []}
        layers = list(range(config["num_hidden_layers"]))
        return {"no_rope_layers": keys["full_attention_layers"] if keys["window"] else layers}


EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    (Windows(pattern_layers, by_layer=True), Rope(), WindowsRotate()),
    names=OLMO2.names,
    always={"pre_norms": False, "post_norms": True, "qk_norm": True},
)

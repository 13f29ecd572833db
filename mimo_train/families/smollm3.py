"""SmolLM3: Llama with layers whose queries and keys do not rotate."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import Config, Family, Keys, Spelling, fault
from mimo_train.families.rope import Rope
from mimo_train.families.usual import Biases
from mimo_train.families.windows import Windows


def _without_rope(config: Config, layer: int) -> bool:
    flags = config["no_rope_layers"]
    return (layer + 1) % config["no_rope_layer_interval"] == 0 if flags is None else not flags[layer]


@dataclass(frozen=True)
class LayersWithoutRope(Spelling):
    """A number for each layer in `no_rope_layers`, 0 where it does not rotate; or every layer of number
    `no_rope_layer_interval`."""

    def faults(self, config: Config) -> Iterator[Fault]:
        flags, layers = config["no_rope_layers"], config["num_hidden_layers"]
        interval = config["no_rope_layer_interval"]
        if flags is None and (type(interval) is not int or interval < 1):
            yield fault("no_rope_layer_interval", interval, "a whole number of at least 1 is needed")
        elif flags is not None and not (isinstance(flags, list) and len(flags) >= layers):
            yield fault("no_rope_layers", flags, f"a number for each of {layers} layers is needed")

    def read(self, config: Config, keys: Keys) -> Keys:
        return {"no_rope_layers": [n for n in range(config["num_hidden_layers"]) if _without_rope(config, n)]}

    def write(self, spec: LlmSpec) -> Keys:
        return {"no_rope_layers": [int(n not in spec.no_rope_layers) for n in range(spec.num_layers)]}


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    (
        LayersWithoutRope(),
        Windows(_without_rope, by_layer=True, switched=True),
        Rope(2e6),
        Biases(qkv="attention_bias", proj="attention_bias", mlp="mlp_bias"),
    ),
)

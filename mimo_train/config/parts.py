"""Names of modules and their parts, shared by configs, models and checkpoints. Imports no torch."""

LANGUAGE = "language"
"""Name of the module with the loss: fixed, as in Megatron-Core (MIMO_LANGUAGE_MODULE_KEY)."""

PARTS = {"encoder": "encoders.*", "projector": "input_projections.*", "llm": "*"}
"""Parts that `freeze` can name, with their patterns of parameter names; any other entry of `freeze` is a shell
pattern."""

ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linear layers of a transformer layer that have adapters where `lora.targets` is not given."""

ADAPTERS = ("lora_a", "lora_b", "lora_magnitude")
"""Names of an adapter's parameters, beside the `weight` of its linear layer, or under the name of its projection."""


def parts_of(module: str) -> tuple[str, ...]:
    """The parts of a module that `freeze` can name."""
    return ("llm",) if module == LANGUAGE else ("encoder", "projector")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTERS

"""Names of modules and of their parts, which configs, models and checkpoints have in common. Imports no torch."""

LANGUAGE = "language"
"""Name of the module with the loss: fixed, as in Megatron-Core (MIMO_LANGUAGE_MODULE_KEY)."""

PARTS = {"encoder": "encoders.*", "projector": "input_projections.*", "llm": "*"}
"""What `freeze` names as a whole, with the pattern of parameter names it stands for; anything else in it is a shell
pattern itself."""

ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linear layers of a transformer layer that can have adapters."""

ADAPTERS = ("lora_a", "lora_b")
"""Names of an adapter's parameters, beside the `weight` of its linear layer."""


def parts_of(module: str) -> tuple[str, ...]:
    """What `freeze` can name of a module as a whole."""
    return ("llm",) if module == LANGUAGE else ("encoder", "projector")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTERS

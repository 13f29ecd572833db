"""Names of modules and their parts, shared by configs, models and checkpoints."""

import re

from encoders.key_rules import nearest

LANGUAGE = "language"
"""Name of the module with the loss: fixed, as in Megatron-Core (MIMO_LANGUAGE_MODULE_KEY)."""

PARTS = {"encoder": "encoders.*", "projector": "input_projections.*", "llm": "*"}
"""Parts that `freeze` can name, with patterns of parameter names; other entries of `freeze` are shell patterns."""

ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linear layers of a transformer layer with adapters by default (`lora.targets`)."""

SAVED = {"embed_tokens": "embedding.word_embeddings.weight", "lm_head": "output_layer.weight"}
"""Parameters that can be trained next to adapters (`lora.modules_to_save`), by PEFT's names of their modules."""

ADAPTERS = ("lora_a", "lora_b", "lora_magnitude")
"""Names of an adapter's parameters, next to the `weight` of its linear layer or under the name of its projection."""


def parts_of(module: str) -> tuple[str, ...]:
    """Return the parts of a module that `freeze` can name."""
    return ("llm",) if module == LANGUAGE else ("encoder", "projector")


def why_no_parameter(module: str, entry: str) -> str:
    """Return why an entry of `freeze` cannot name a parameter of a module, with any encoder or model. Empty for parts
    and for patterns that may match; the other names are known when the model is built."""
    parts = parts_of(module)
    has = " and ".join(parts)
    if entry in PARTS:
        return "" if entry in parts else f"{entry!r} is no part of this module, it has {has}"
    literal = re.split(r"[*?\[]", entry, maxsplit=1)[0]
    if literal == entry and "." not in entry:
        near = nearest(entry, parts)
        neither = f"{entry!r} is neither a part of this module, which has {has}, nor a pattern of parameter names"
        return f"{neither}. {near}" if near.startswith("Did") else neither
    if module == LANGUAGE:
        return ""  # a hook may add a head with any name
    begins = (f"encoders.{module}.", "input_projections.0.")
    if any(literal.startswith(begin) or begin.startswith(literal) for begin in begins):
        return ""
    return f"{entry!r} matches no parameter: names of this module begin with {' or '.join(begins)}"


def is_adapter(name: str) -> bool:
    """True if a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTERS

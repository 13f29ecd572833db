"""Options of Megatron-Core that a layer of ours does not have: it refuses what it would otherwise ignore."""

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.config.errors import UserError


def require_neutral(layer: str, config: TransformerConfig, **values: Any) -> None:
    """Refuse a config that asks a layer for what it does not do.

    Args:
        layer: name of its class, for the message.
        values: of options, those with which there is nothing to do; a tuple has several of them.

    Raises:
        UserError: an option has another value, by its name.
    """
    for name, neutral in values.items():
        value = getattr(config, name, None)
        choices = neutral if isinstance(neutral, tuple) else (neutral,)
        if not any(value is choice or value == choice for choice in (*choices, None)):
            raise UserError(f"{layer} has no {name}, which is {value!r}: leave it at {choices[0]!r}")

"""Weights that an encoder of plain torch brings itself, at the start of a run."""

from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from encoders.errors import EncoderError
from encoders.plain.model import PlainEncoder
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.models.names import modules_of


def load_start_weights(model: list[MegatronModule]) -> bool:
    """Let every plain encoder of this rank load its weights (`PlainEncoder.load_weights`).

    Returns:
        Whether any was told to: an optimizer that has master copies must read the weights again.

    Raises:
        UserError: an encoder's weights cannot be loaded.
    """
    plain = [
        encoder
        for name, (module, *_) in modules_of(model).items()
        if name != LANGUAGE
        for encoder in unwrap_model(module).encoders.values()
        if isinstance(encoder, PlainEncoder)
    ]
    try:
        for encoder in plain:
            encoder.load_weights()
    except EncoderError as error:
        raise UserError(str(error)) from error
    return bool(plain)

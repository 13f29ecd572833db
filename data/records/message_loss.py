"""Fields by which a message of a record is included in the loss or excluded from it."""

from collections.abc import Mapping
from typing import Any

from data.errors import RecordError

_INCLUDES = ("loss", "weight", "train", "training", "trainable", "loss_weight", "loss_scale", "loss_mask")
_FIELDS = dict.fromkeys(_INCLUDES, True) | {"masked": False}
"""Name -> whether true or 1 includes the message (as OpenAI, ms-swift, Axolotl and torchtune spell it)."""
_OF_PARTS = ("train_detail", "training_detail")
LOSS_FIELDS = (*_FIELDS, *_OF_PARTS)


def split_loss(fields: Mapping[str, Any], role: str) -> tuple[Mapping[str, Any], bool]:
    """Return the other fields of a message, and False where its fields exclude it from the loss.

    Raises:
        RecordError: values other than true, false, 0 and 1, fields that contradict each other, or a message of another
            role than the assistant's that is included; the message continues behind the place of the turn.
    """
    if partial := next((name for name in _OF_PARTS if name in fields), None):
        raise RecordError(f": {partial} is not supported. A message is learned as a whole or not at all: set weight=0")
    given = {name: fields[name] for name in _FIELDS if name in fields}
    if not given:
        return fields, True
    for name, value in given.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise RecordError(f": {name} is {repr(value)[:80]}, expected true, false, 0 or 1")
    included = {bool(value) == _FIELDS[name] for name, value in given.items()}
    if len(included) > 1:
        raise RecordError(f": {' and '.join(given)} contradict each other. Keep one of them")
    if True in included and role != "assistant":
        name = next(iter(given))
        raise RecordError(f": {name} includes a {role} message in the loss. Only assistant messages are learned")
    return {name: value for name, value in fields.items() if name not in given}, True in included

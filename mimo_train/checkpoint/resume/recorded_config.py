"""The config that a checkpoint was trained with. Imports no torch.

A checkpoint is data: whoever made it may not name code that runs here, unless the user does too."""

from collections.abc import Collection
from typing import Any

from data.storage.url import Place
from mimo_train.checkpoint.damage import damaged
from mimo_train.checkpoint.folders import RECORD, read_record
from mimo_train.config.compose import from_dict
from mimo_train.config.removed import without_removed
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.user_code import require_trusted

_REMEDY = (
    "if it is yours, or you trust whoever made the checkpoint, say so with --trust-code; an encoder that an installed "
    "package registers needs no such word (docs/your-encoder.md)"
)


def recorded_config(folder: Place, *, trust_code: bool) -> ConfigContainer:
    """The config in the record of a complete checkpoint, without callbacks and forward step, which only training uses,
    and without the keys of earlier versions.

    Args:
        trust_code: import the encoders that it names by their paths.

    Raises:
        UserError: the record is damaged, or names code that is not trusted.
    """
    plain = _plain(folder, read_record(folder, "config"))
    try:
        if not trust_code:
            require_trusted(plain, str(folder / RECORD), (), _REMEDY)
        return from_dict(plain)
    except RecursionError as error:
        raise damaged(folder, f"{RECORD} nests its config without end") from error


def config_if_trusted(folder: Place, record: dict[str, Any], trusted: Collection[str]) -> ConfigContainer:
    """As `recorded_config`, of a record that was read already; the user's own config names the code `trusted`."""
    plain = _plain(folder, record)
    require_trusted(plain, str(folder / RECORD), trusted, "the config of this run does not name it")
    return from_dict(plain)


def _plain(folder: Place, record: dict[str, Any]) -> dict[str, Any]:
    plain = record["config"]
    if not isinstance(plain, dict):
        raise damaged(folder, f"{RECORD} holds no config, but {type(plain).__name__}")
    plain = without_removed(plain)
    train = plain.get("train")
    return {**plain, "train": {**train, "callbacks": [], "forward_step": ""}} if isinstance(train, dict) else plain

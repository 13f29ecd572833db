"""Build the samples of .bin and .idx files from the config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from data.errors import DataError
from data.indexed.file import WHOLE, Part
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_data import VideoConfig, split_parts

if TYPE_CHECKING:
    from data.indexed.dataset import TokenDataset
    from data.order.sources import Source


def of_tokens(sources: Sequence[Source]) -> bool:
    """True if the sources are .bin and .idx files, False for tar shards. Raises DataError for a mix."""
    from data.indexed.find import is_indexed

    kinds = {}
    for source in sources:
        try:
            kinds[source.key] = is_indexed(source.shards)
        except DataError as error:
            raise type(error)(str(error).replace("data.shards", source.key, 1)) from error
    if len(set(kinds.values())) > 1:
        indexed, other = (next(key for key, kind in kinds.items() if kind is wanted) for wanted in (True, False))
        raise DataError(
            f"{other}: is not of .bin and .idx files, and {indexed} is: the sources of a run are of one kind"
        )
    return any(kinds.values())


def token_dataset(
    cfg: ConfigContainer, tokenizer: Any, sources: Sequence[Source], *, held_out: bool, fraction: float
) -> TokenDataset:
    """Build the samples of .bin and .idx files.

    Args:
        held_out: read in order, with the texts.
        fraction: fraction of the sources held out from training; 0: the whole sources are the set.

    Raises:
        DataError: a file cannot be used, or a key does not apply to such files.
    """
    from data.indexed.dataset import TokenDataset

    data, key = cfg.data, sources[0].key
    if cfg.encoders:
        raise DataError(
            f"{key}: .bin and .idx files are texts alone, for a run without encoders, and modules has "
            f"{', '.join(cfg.encoders)}: build shards of the texts (docs/data.md#texts)"
        )
    if cfg.traits.form != "turns":
        raise DataError(
            f"{key}: .bin and .idx files are texts, and train.task={cfg.train.task} reads {cfg.traits.form} of "
            "answers. Use shards of records"
        )
    if named := next((source.key for source in sources if source.fields is not None), None):
        fields_key = f"{named.removesuffix('.shards')}.fields"
        raise DataError(f"{fields_key}: is for records, and {named} is of .bin and .idx files: leave it out")
    if data.fields:
        raise DataError(
            f"data.fields: is for records, and {key} is of .bin and .idx files: leave it out; sources and held-out "
            "sets of shards take their own (data.mix[N].fields, data.validation.NAME.fields)"
        )
    for name, is_set in (("null_captions", data.null_captions == "skip"), ("video", data.video != VideoConfig())):
        if is_set:
            raise DataError(f"data.{name}: is for records, and {key} is of .bin and .idx files: leave it out")
    trained_part, held_part = parts_of(cfg)
    return TokenDataset(
        sources,
        tokenizer=tokenizer,
        sequence_length=data.sequence_length,
        seed=cfg.run.seed,
        shuffle=data.shuffle and not held_out,
        shuffle_block=data.shuffle_block,
        part=trained_part if not held_out else held_part if fraction else WHOLE,
        separate=data.separate_documents,
        keep_text=held_out,
        read_retries=data.read_retries,
    )


def parts_of(cfg: ConfigContainer) -> tuple[Part, Part]:
    """Return (documents to train on, held-out documents) of every file, as fractions."""
    if cfg.data.split:
        return split_parts(cfg.data.split)
    trained = 1.0 - cfg.data.validation_fraction
    return (0.0, trained), (trained, 1.0)


def require_none_for_tokens(cfg: ConfigContainer, key: str) -> None:
    """Raise DataError for keys that only apply to .bin and .idx files, if `key` names tar shards."""
    data = cfg.data
    if data.split:
        raise DataError(
            f"data.split: is of the documents of .bin and .idx files, and {key} is not of these: set data.split= "
            "(empty), and data.validation_fraction for samples of shards"
        )
    if data.separate_documents:
        raise DataError(
            f"data.separate_documents: is for .bin and .idx files, and {key} is not of these, whose samples always are "
            "apart: leave it out"
        )

"""Datasets of Megatron-Energon in a config: their metadata becomes keys of `data`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.index.energon import energon_fields, energon_part, read_metadataset
from data.index.find_shards import split_commas
from data.text_format import plural
from mimo_train.config.errors import ConfigError, Fault

_TRAIN, _HELD_OUT, _TEST = "train", "val", "test"


def fill_in_energon(plain: dict[str, Any]) -> None:
    """Fill in `data` of a composed config from Energon datasets.

    A metadataset in `data.shards` becomes `data.mix`, a folder gets its split, and field maps become `data.fields`.

    Raises:
        ConfigError: a feature of a dataset is not supported.
    """
    data = plain.get("data")
    if not isinstance(data, dict):
        return
    for key in ("shards", "validation_shards"):
        try:
            _fill_in_metadataset(data, key)
        except DataError as error:
            raise ConfigError([Fault(f"data.{key}", str(error))]) from error
    folders: dict[str, tuple[dict[str, Any], Path | None]] = {}
    for key, split, place in _places(data):
        name = "validation_shards" if key == "data.validation_shards" else "shards"
        parts = split_commas(place[name])
        if len(parts) > 1 and (several := [part for part in parts if energon_part(part)]):
            message = f"{several[0]} is an energon dataset, next to other shards: make each a source of data.mix"
            raise ConfigError([Fault(key, message)])
        folder, part_name = (energon_part(place[name]) if len(parts) == 1 else None) or (None, "")
        folders[key] = place, folder
        if folder is not None and not part_name:
            place[name] += f":{split}"
    if any(folder for _, folder in folders.values()) and not data.get("fields"):
        _fill_in_fields(data, folders)


def _places(data: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (key, default split, dict with its value) of every key that names shards."""
    if isinstance(data.get("shards"), str) and data["shards"]:
        yield "data.shards", _TRAIN, data
    if isinstance(data.get("validation_shards"), str) and data["validation_shards"]:
        yield "data.validation_shards", _HELD_OUT, data
    mix = data.get("mix")
    for at, source in enumerate(mix if isinstance(mix, list) else []):
        if isinstance(source, dict) and isinstance(source.get("shards"), str):
            yield f"data.mix[{at}].shards", _TRAIN, source
    for section, split in (("validation", _HELD_OUT), ("test", _TEST)):
        sets = data.get(section)
        for name, source in (sets if isinstance(sets, dict) else {}).items():
            if isinstance(source, dict) and isinstance(source.get("shards"), str):
                yield f"data.{section}.{name}.shards", split, source


def _fill_in_metadataset(data: dict[str, Any], key: str) -> None:
    named = data.get(key)
    if not isinstance(named, str) or not named.endswith((".yaml", ".yml")):
        return
    training = key == "shards"
    sources = read_metadataset(Path(named).expanduser(), _TRAIN if training else _HELD_OUT)
    if len(sources) == 1:
        data[key] = sources[0].shards
    elif not training:
        raise DataError(f"{named}: {plural(len(sources), 'source')}: name each of them in data.validation")
    elif data.get("mix"):
        raise DataError(f"{named} is a mixture, and data.mix is given too: leave out one of them")
    else:
        data[key] = ""
        data["mix"] = [
            {"name": item.name, "shards": item.shards} | ({} if item.weight is None else {"weight": item.weight})
            for item in sources
        ]


def _fill_in_fields(data: dict[str, Any], folders: dict[str, tuple[dict[str, Any], Path | None]]) -> None:
    """Set `data.fields` if all datasets agree, else the fields of each source and of each named set. `folders`: key ->
    (dict with the key, the dataset)."""
    fields_by_folder: dict[str, dict[str, Any]] = {}
    for key, (_, folder) in folders.items():
        try:
            fields_by_folder[key] = energon_fields(folder) if folder is not None else {}
        except DataError as error:
            raise ConfigError([Fault(key, str(error))]) from error
    named = [key for key, (place, _) in folders.items() if place is not data]
    unnamed = [key for key in fields_by_folder if key not in named]
    first = unnamed[0] if unnamed else ""
    values = list(fields_by_folder.values())
    common = values[0] if all(fields == values[0] for fields in values) else fields_by_folder.get(first, {})
    for key, fields in fields_by_folder.items():
        place = folders[key][0]
        if fields == common or place.get("fields"):
            continue
        if key in unnamed or not fields:
            raise ConfigError(
                [
                    Fault(
                        key,
                        f"its fields are {fields or 'those of names'}, those of {first} {common or 'of names'}: one "
                        "data.fields holds for both: name them in data.mix and data.validation, or make records of one "
                        "of them (shards build --columns)",
                    )
                ]
            )
        place["fields"] = fields
    if common:
        data["fields"] = common

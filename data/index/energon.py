"""Datasets of Megatron-Energon on disk: folders with `.nv-meta`, and metadatasets, which blend such folders.

Of `split.yaml`, `dataset.yaml` and `.info.yaml`, anything unsupported is rejected with its name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braceexpand import braceexpand

from data.errors import DataError
from data.records.members import read_fields

FOLDER = ".nv-meta"
_FIELDS = {
    "image": "image",
    "audio": "audio",
    "caption": "caption",
    "text": "text",
    "context": "question",
    "answers": "answer",
    "label": "label",
    "label_name": "label",
}
"""Name in a field map -> name in `data.fields`."""
_CLASSES = ("CaptioningSample", "VQASample", "TextSample", "ImageClassificationSample", "CrudeWebdataset")
"""Supported kinds; also their dataset and factory classes."""
_ENDING = re.compile(r"(Sample|Webdataset|WebdatasetFactory)$")
_REFERENCE = (
    "path",
    "split_part",
    "weight",
    "subflavor",
    "subflavors",
    "split_config",
    "dataset_config",
    "repetitions",
)


@dataclass(frozen=True)
class Blended:
    """A source of a metadataset. `shards`: as in `data.shards`; weight None: its number of samples."""

    name: str
    shards: str
    weight: float | None


def energon_part(text: str) -> tuple[Path, str] | None:
    """Return (folder, split or "") of an energon dataset `FOLDER` or `FOLDER:SPLIT`; None for anything else."""
    folder, colon, split = text.rpartition(":")
    for path, name in ((Path(text).expanduser(), ""), (Path(folder).expanduser(), split if colon else "")):
        if (path / FOLDER).is_dir() and (name or str(path) != folder):
            return path, name
    return None


def energon_shards(folder: Path, split: str = "") -> list[Path]:
    """Return the tars of a split, or of all, in the order of `split.yaml`. Raises DataError if that is unsupported."""
    place = folder / FOLDER / "split.yaml"
    plain = _mapping(place)
    _only(plain, ("split_parts", "exclude"), place)
    parts, left_out = plain.get("split_parts"), plain.get("exclude") or []
    if not isinstance(parts, dict) or not all(isinstance(value, list) for value in (*parts.values(), left_out)):
        raise DataError(f"{place}: split_parts must have a list of tars for every split, and exclude be a list")
    if split and split not in parts:
        raise DataError(f"{place}: no split {split!r}; it has {', '.join(map(str, parts)) or 'none'}")
    if samples := [name for name in left_out if ".tar/" in str(name)]:
        raise DataError(f"{place}: exclude names the sample {samples[0]}: only whole tars are left out")
    chosen = [names for part, names in parts.items() if part == split or not split]
    excluded = {name for text in left_out for name in braceexpand(str(text))}
    tars = dict.fromkeys(name for names in chosen for text in names for name in braceexpand(str(text)))
    shards = [folder / name for name in tars if name not in excluded]
    if not shards:
        raise DataError(f"{place}: no tar in {f'the split {split!r}' if split else 'any split'}")
    return shards


def energon_fields(folder: Path) -> dict[str, Any]:
    """Return the dataset's `data.fields`. Raises DataError if its kind or field map is unsupported."""
    place = folder / FOLDER / "dataset.yaml"
    plain = _mapping(place)
    kind = plain.get("sample_type", plain)
    name = kind.get("__class__", "") if isinstance(kind, dict) else ""
    _only(plain, ("__module__", "__class__", "sample_type", "field_map", "subflavors", "subflavor"), place)
    stem = _ENDING.sub("", str(name))
    if stem not in {_ENDING.sub("", class_name) for class_name in _CLASSES} or (
        isinstance(kind, dict) and kind.get("__module__") != "megatron.energon"
    ):
        supported = ", ".join(_CLASSES)
        class_path = f"{kind.get('__module__', '')}.{name}" if isinstance(kind, dict) else kind
        raise DataError(f"{place}: the kind {class_path} is not read; read are {supported} of megatron.energon")
    mapped = plain.get("field_map")
    if stem == "Crude" or mapped is None:
        if stem == "Crude" and mapped is None:
            return {}
        raise DataError(f"{place}: {'a field_map of crude samples' if mapped else 'no field_map'}: not read")
    if not isinstance(mapped, dict):
        raise DataError(f"{place}: field_map must say of every field where it is")
    if unknown := [field_name for field_name in mapped if field_name not in _FIELDS]:
        raise DataError(f"{place}: field_map: the field {unknown[0]!r} is not read; read are {', '.join(_FIELDS)}")
    if "label" in mapped and "label_name" in mapped:
        mapped = {field_name: value for field_name, value in mapped.items() if field_name != "label"}
    fields = {_FIELDS[field_name]: value for field_name, value in mapped.items()}
    try:
        read_fields(fields)
    except DataError as error:
        raise DataError(f"{place}: field_map: {error}") from error
    return fields


def read_metadataset(path: Path, split: str) -> list[Blended]:
    """Return the sources of a metadataset's split, including nested ones. Raises DataError if that is unsupported."""
    plain = _mapping(path)
    supported = ("Metadataset", "MetadatasetV2")
    if plain.get("__class__") not in supported or plain.get("__module__") != "megatron.energon":
        raise DataError(f"{path}: no metadataset of megatron.energon: __class__ must be {' or '.join(supported)}")
    _only(plain, ("__module__", "__class__", "splits"), path)
    splits = plain.get("splits")
    if not isinstance(splits, dict) or split not in splits:
        has = ", ".join(map(str, splits)) if isinstance(splits, dict) else "none"
        raise DataError(f"{path}: no split {split!r}; it has {has}")
    blended = _blended(splits[split], path, split, plain["__class__"] == "Metadataset")
    weights = [item.weight for item in blended]
    if any(weight is None for weight in weights) and not all(weight is None for weight in weights):
        raise DataError(f"{path}: splits.{split}: some sources have weights and others are concatenated: not read")
    again = [item.name for item in blended]
    return [
        Blended(item.name if again.count(item.name) == 1 else f"{item.name}-{at}", item.shards, item.weight)
        for at, item in enumerate(blended)
    ]


def _blended(blend: Any, path: Path, split: str, is_old: bool) -> list[Blended]:
    if not isinstance(blend, dict):
        raise DataError(f"{path}: splits.{split} must be a path or a blend of paths, is {blend!r}")
    kinds = [name for name in ("path", "blend", "concatenate", "blend_epochized", "datasets") if name in blend]
    if len(kinds) != 1:
        others = ", ".join(map(str, blend)) or "nothing"
        raise DataError(f"{path}: splits.{split} has {others}: read are path, blend, blend_epochized and concatenate")
    kind = kinds[0]
    if kind == "path":
        return _referred(blend, path, split)
    _only(blend, (kind, "weight", "repetitions"), path)
    if not isinstance(blend[kind], list) or not blend[kind]:
        raise DataError(f"{path}: splits.{split}.{kind} must be a list of sources")
    if kind == "datasets" and not is_old:
        raise DataError(f"{path}: splits.{split}.datasets is of the older Metadataset: write blend")
    blended: list[Blended] = []
    for item in blend[kind]:
        inner = _blended(item, path, split, is_old)
        if kind in ("blend", "datasets"):
            weight = _number(item, "weight", 1.0, path)
            sizes = [1.0 if len(inner) == 1 else inside.weight for inside in inner]
            # Samples of a concatenation are weighted by their number.
            counts = [_count(inside) if size is None else size for inside, size in zip(inner, sizes, strict=True)]
            blended += [
                Blended(inside.name, inside.shards, weight * size / math.fsum(counts))
                for inside, size in zip(inner, counts, strict=True)
            ]
        elif kind == "blend_epochized":
            again = _number(item, "repetitions", 1.0, path)
            if len(inner) > 1:
                raise DataError(f"{path}: splits.{split}: a blend inside of blend_epochized is not read")
            blended += [Blended(inside.name, inside.shards, again * _count(inside)) for inside in inner]
        else:
            blended += inner
    return blended


def _referred(entry: Mapping[str, Any], path: Path, split: str) -> list[Blended]:
    _only(entry, _REFERENCE, path)
    for name in ("split_config", "dataset_config"):
        if entry.get(name) not in (None, "split.yaml" if name == "split_config" else "dataset.yaml"):
            raise DataError(f"{path}: {name} {entry[name]!r}: only the usual file is read")
    at = str(entry["path"])
    if re.match(r"[a-z][a-z0-9+.-]*://", at):
        raise DataError(f"{path}: {at}: metadatasets are read of local folders: copy it, or name its tars in data.mix")
    part = entry.get("split_part") or split
    place = (path.parent / at).resolve()
    if place.is_file():
        return read_metadataset(place, part)
    if not (place / FOLDER).is_dir():
        raise DataError(f"{path}: {place} is no energon dataset: it has no folder {FOLDER}")
    return [Blended(re.sub(r"[^A-Za-z0-9_.-]", "_", place.name), f"{place}:{part}", None)]


def _count(source: Blended) -> float:
    folder, _, split = source.shards.rpartition(":")
    base = Path(folder) / FOLDER
    place = next((base / name for name in (".info.yaml", ".info.json") if (base / name).exists()), base / ".info.yaml")
    counts = _mapping(place).get("shard_counts")
    try:
        assert isinstance(counts, dict)
        return float(sum(int(counts[str(shard.relative_to(folder))]) for shard in energon_shards(Path(folder), split)))
    except (KeyError, AssertionError, ValueError, TypeError) as error:
        raise DataError(f"{place}: shard_counts does not count every tar of the split {split!r}") from error


def _number(entry: Mapping[str, Any], name: str, default: float, path: Path) -> float:
    value = entry.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or not math.isfinite(value):
        raise DataError(f"{path}: {name} must be a number above 0, is {value!r}")
    return float(value)


def _only(plain: Mapping[str, Any], allowed: Sequence[str], place: Path) -> None:
    """Raise DataError for a key that would have no effect."""
    if others := [name for name in plain if name not in allowed]:
        raise DataError(f"{place}: {others[0]} is not read: {', '.join(allowed)} are")


def _mapping(place: Path) -> dict[str, Any]:
    import yaml

    try:
        text = place.read_text(encoding="utf-8")
        plain = json.loads(text) if place.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise DataError(f"{place}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"{place}: is no {place.suffix[1:].upper()}: {error}") from error
    if not isinstance(plain, dict):
        raise DataError(f"{place}: has no keys")
    return plain

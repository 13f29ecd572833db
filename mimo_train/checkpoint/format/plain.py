"""Nested plain values (states of random generators, for example) as JSON and tensors; dtypes by name."""

import enum
import json
from collections.abc import Collection
from typing import Any

import numpy
import torch

from mimo_train.checkpoint.format.files import Damage
from mimo_train.checkpoint.format.index import SIZES

_TAG = "$"
"""Key of a dict that encodes a value that JSON lacks."""


def pack(value: Any, classes: Collection[type] = ()) -> tuple[str, list[torch.Tensor]]:
    """Return plain values as JSON and tensors.

    Args:
        classes: enumerations and named tuples that may occur.

    Returns:
        (text, tensors in host memory that it refers to).

    Raises:
        TypeError: a value of another type.
    """
    tensors: list[torch.Tensor] = []
    return json.dumps(_packed(value, {one.__name__: one for one in classes}, tensors)), tensors


def unpack(text: str, tensors: list[torch.Tensor], classes: Collection[type] = ()) -> Any:
    """Return the value that `pack` was given. Raises Damage if the text is not from `pack`, or names another class."""
    try:
        return _unpacked(json.loads(text), {one.__name__: one for one in classes}, tensors)
    except (ValueError, RecursionError, KeyError, TypeError, IndexError) as error:
        raise Damage(f"holds no plain values ({error})") from error


def _packed(value: Any, classes: dict[str, type], tensors: list[torch.Tensor]) -> Any:
    if type(value) in (str, int, float, bool, type(None)):
        return value
    if isinstance(value, torch.Tensor | numpy.ndarray):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
        if tensor.dtype not in NAMES:
            raise TypeError(f"a tensor of {tensor.dtype} cannot be stored")
        tensors.append(tensor)
        return {_TAG: kind, "value": len(tensors) - 1}
    if isinstance(value, torch.device):
        return {_TAG: "device", "value": str(value)}
    if type(value) is list:
        return [_packed(one, classes, tensors) for one in value]
    if type(value) is tuple:
        return {_TAG: "tuple", "value": [_packed(one, classes, tensors) for one in value]}
    if type(value) is dict:
        pairs = [[_packed(key, classes, tensors), _packed(one, classes, tensors)] for key, one in value.items()]
        return {_TAG: "dict", "value": pairs}
    name = type(value).__name__
    if classes.get(name) is type(value):
        if isinstance(value, enum.Enum):
            return {_TAG: "enum", "of": name, "value": value.name}
        assert isinstance(value, tuple), name
        return {_TAG: "named", "of": name, "value": [_packed(one, classes, tensors) for one in value]}
    raise TypeError(f"{type(value)} is no plain value")


def _unpacked(value: Any, classes: dict[str, type], tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(one, classes, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    kind, inner = value[_TAG], value["value"]
    if kind == "tensor":
        return tensors[inner]
    if kind == "array":
        return tensors[inner].numpy()
    if kind == "device":
        return torch.device(inner)
    if kind == "enum":
        return classes[value["of"]][inner]  # type: ignore[index]  # an enumeration
    whole = [_unpacked(one, classes, tensors) for one in inner]
    if kind == "tuple":
        return tuple(whole)
    if kind == "named":
        return classes[value["of"]](*whole)
    if kind == "dict":
        return dict(whole)
    raise KeyError(kind)


TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}

assert {name: dtype.itemsize for name, dtype in TYPES.items()} == SIZES

"""State of a rank in a checkpoint (random generators, the step to repeat): nested plain values as JSON and tensors."""

import enum
import json
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import Call, Caller, RerunDiagnostic, RerunMode, RerunState

from mimo_train.checkpoint.format.files import Damage
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.read import Reader
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.format.write import DTYPE_NAMES, Part

CLASSES: dict[str, type] = {kind.__name__: kind for kind in (Call, Caller, RerunDiagnostic, RerunMode, RerunState)}
"""Enumerations and named tuples in the state for repeating a step."""

_TAG = "$"
"""Key of a dict that encodes a value that JSON lacks."""


def parts_of_rank(name: str, state: dict[str, Any]) -> list[Part]:
    """Return a state of this rank as parts of a checkpoint. Raises TypeError if a value is not plain."""
    text, tensors = pack(state)
    as_bytes = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    # `state_of_rank` counts them, and files have no empty tensors.
    assert all(tensor.numel() for tensor in tensors), f"{name} has a tensor without elements"
    return [
        Part(Key(_module(), f"{name}.{number}", WEIGHT), Span.of_whole(tuple(tensor.shape)), tensor.reshape(-1))
        for number, tensor in enumerate([as_bytes, *tensors])
    ]


def state_of_rank(reader: Reader, name: str) -> Any:
    """Return the state that this rank has stored by `parts_of_rank`. Raises Damage if it is something else."""
    keys = [key for key in reader.index.pieces if key.module == _module() and key.name.rpartition(".")[0] == name]
    text, *tensors = [reader.whole(key) for key in sorted(keys, key=lambda key: int(key.name.rpartition(".")[2]))]
    return unpack(text.numpy().tobytes().decode(), tensors)


def _module() -> str:
    return f"rank_{dist.get_rank():05d}"


def pack(value: Any) -> tuple[str, list[torch.Tensor]]:
    """Return plain values as JSON, and the tensors in host memory that it refers to. Raises TypeError for a value of
    another type."""
    tensors: list[torch.Tensor] = []
    return json.dumps(_packed(value, tensors)), tensors


def unpack(text: str, tensors: list[torch.Tensor]) -> Any:
    """Return the value that `pack` was given. Raises Damage if the text is not from `pack`, or names another class."""
    try:
        return _unpacked(json.loads(text), tensors)
    except (ValueError, RecursionError, KeyError, TypeError, IndexError) as error:
        raise Damage(f"holds no plain values ({error})") from error


def _packed(value: Any, tensors: list[torch.Tensor]) -> Any:
    if type(value) in (str, int, float, bool, type(None)):
        return value
    if type(value) is list:
        return [_packed(item, tensors) for item in value]
    if isinstance(value, torch.Tensor | numpy.ndarray):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"a tensor of {tensor.dtype} cannot be stored")
        tensors.append(tensor)
        return {_TAG: kind, "value": len(tensors) - 1}
    if isinstance(value, torch.device):
        return {_TAG: "device", "value": str(value)}
    if type(value) is tuple:
        return {_TAG: "tuple", "value": _packed([*value], tensors)}
    if type(value) is dict:
        return {_TAG: "dict", "value": [_packed([*pair], tensors) for pair in value.items()]}
    name = type(value).__name__
    if CLASSES.get(name) is not type(value):
        raise TypeError(f"{type(value)} is no plain value")
    if isinstance(value, enum.Enum):
        return {_TAG: "enum", "of": name, "value": value.name}
    assert isinstance(value, tuple), name
    return {_TAG: "named", "of": name, "value": _packed([*value], tensors)}


def _unpacked(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, tensors) for item in value]
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
        return CLASSES[value["of"]][inner]  # type: ignore[index]  # an enumeration
    items = [_unpacked(item, tensors) for item in inner]
    if kind == "tuple":
        return tuple(items)
    if kind == "named":
        return CLASSES[value["of"]](*items)
    if kind == "dict":
        return dict(items)
    raise KeyError(kind)

"""Defaults of the config classes of `transformers`, read from their source: importing a class takes 5 seconds, and
torch."""

import ast
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from encoders.errors import EncoderError


@cache
def class_defaults(model_type: str) -> Mapping[str, Any]:
    """Return the defaults that the config class of a model type declares as plain values. Raise EncoderError if the
    installed `transformers` has no such class."""
    spec = find_spec("transformers")
    if spec is not None and spec.origin is not None:
        folder, name = Path(spec.origin).parent / "models", model_type
        while name:  # the classes of the parts of a model are in its file
            for file in sorted((folder / name).glob("configuration_*.py")):
                if model_type in (classes := _classes(file)):
                    return classes[model_type]
            name = name.rpartition("_")[0]
    raise EncoderError(f"the installed transformers has no config class for model_type {model_type!r}")


@cache
def _classes(file: Path) -> dict[str, dict[str, Any]]:
    """Return the defaults of the config classes of a file, by model type."""
    classes = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            values: dict[str, Any] = {}
            for entry in node.body:
                if isinstance(entry, ast.Assign | ast.AnnAssign) and entry.value is not None:
                    target = entry.target if isinstance(entry, ast.AnnAssign) else entry.targets[0]
                    with suppress(Exception):  # plain values and their products have no names
                        value = eval(compile(ast.Expression(entry.value), str(file), "eval"), {"__builtins__": {}})
                        values[ast.unparse(target)] = value
            classes[values.get("model_type", node.name)] = values
    return classes

"""Directories of pretrained weights that are not on this machine, for checks that do without them."""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from data.text_format import shown
from encoders.joined.spec import PARTS as JOINED


def leave_out_absent(plain: dict[str, Any]) -> None:
    """Empty the keys whose directory does not exist, and say so on standard error.

    Args:
        plain: nested dicts, as they are composed.
    """
    for section, key, full in _directory_keys(plain):
        directory = section.get(key)
        if isinstance(directory, str) and directory and not Path(directory).exists():
            section[key] = ""
            _say(f"{full}: {directory} is not on this machine. Sizes are those of the config.")


def _directory_keys(plain: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    yield plain, "pretrained", "pretrained"
    modules = plain.get("modules")
    for name, module in modules.items() if isinstance(modules, dict) else ():
        if isinstance(module, dict):
            yield module, "pretrained", f"modules.{name}.pretrained"
            for part, keys in (("lora", ("adapter",)), ("encoder", [f"{one}_pretrained" for one in JOINED])):
                if isinstance(module.get(part), dict):
                    yield from ((module[part], key, f"modules.{name}.{part}.{key}") for key in keys)


@cache
def _say(line: str) -> None:
    sys.stderr.write(f"notice: {shown(line)}\n")

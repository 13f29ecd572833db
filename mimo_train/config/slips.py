"""Slips of the pen in YAML and overrides, which would mean something else than was written, or nothing."""

import json
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import yaml

from mimo_train.config.errors import Fault

PLACED = ("encoder", "llm", "projector")
"""Groups whose files go to a part of a module, which the pick must name."""

UNSET = "???"
"""OmegaConf's mark for a value that is not given yet: merged over another value, it is dropped."""


def override_slips(overrides: Sequence[str], groups: Collection[str], picked: Collection[str]) -> Iterator[Fault]:
    """
    Args:
        groups: names of all groups.
        picked: groups that the file picks from, those with a place as `encoder@modules.images.encoder`.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        key = key.lstrip("+").replace(" ", "")
        group = key.partition("@")[0]
        if value.strip(" '\"") == UNSET:
            yield Fault(key, f"{UNSET} is no value: give one, or leave the override out")
        elif group not in groups or key[:1] == "~" or "=" not in override:
            yield from _unreadable(key, value)
        elif value.strip() in ("", "null") or value.lstrip().startswith("["):
            yield Fault(key, f"picks one file of the group {group}, is {value or 'empty'}: name one, or leave it out")
        elif key in PLACED and key not in picked:
            places = sorted(place for place in picked if place.startswith(f"{key}@"))
            forms = places or [f"{key}@modules.NAME.{key}"]
            yield Fault(key, f"needs its place in the config: {' or '.join(f'{form}={value}' for form in forms)}")


def wrong_removals(error: Exception, choices: Sequence[str], file: str) -> Iterator[Fault]:
    """Faults of overrides with `~`, of which Hydra says in `error` that it has nothing to delete, as if `file` were
    wrong."""
    if "Could not delete" not in str(error):
        return
    for choice in choices:
        key, separator, value = choice.partition("=")
        # Of a group, Hydra names the value too.
        name, whole = key.removeprefix("~"), choice.removeprefix("~")
        if name in ("", key) or not any(f"'{one}'" in str(error) for one in (name, whole)):
            continue
        if separator and "does not exist" not in str(error):
            yield Fault(key, f"removes it only where it is {value}, and it is not: write {key} alone")
        else:
            yield Fault(
                key,
                f"removes what neither {file} nor a file that it picks has, so that the defaults apply already: leave "
                "it out, or name another part",
            )


_BRACKETS = re.compile(r"""(?<![\w."'])[\w.]+\[[^][]*\]""")
"""A word with brackets behind it, such as `json[caption]` of `data.fields`."""


def _unreadable(key: str, value: str) -> Iterator[Fault]:
    """A value of an override that is no YAML: brackets inside of a map or list stand in quotes, and a text such as
    `*.tar`."""
    if _is_yaml(value):
        return
    # As Python gives bytes of the command line that are none of the encoding.
    if any("\udc80" <= character <= "\udcff" for character in value):
        shown, encoding = value.encode("utf-8", "backslashreplace").decode(), sys.getfilesystemencoding()
        remedy = "another name" if encoding == "utf-8" else "LC_ALL=C.UTF-8 without PYTHONUTF8=0, or another name"
        yield Fault(
            key, f"{shown} has bytes that are no text in {encoding}, the encoding of this process: use {remedy}"
        )
        return
    is_text = not value.lstrip().startswith(("{", "["))
    what = "it" if is_text else "what has brackets"
    quoted = json.dumps(value) if is_text else _BRACKETS.sub(lambda found: f'"{found[0]}"', value)
    remedy = "write it as YAML has it, {key: value, ...} or [value, ...], with quotes around what has brackets"
    if _is_yaml(quoted):
        given = shlex.quote(f"{key}={quoted}")
        remedy = f"{what} stands in quotes, and all of it in others for the shell: {given}"
    yield Fault(key, f"{value} cannot be read: {remedy}")


def _is_yaml(text: str) -> bool:
    try:
        yaml.compose(text)
    except (yaml.YAMLError, RecursionError):
        return False
    return True


def left_open(plain: Any, key: str = "") -> Iterator[Fault]:
    """Values of nested dicts and lists that are still to be given."""
    if plain == UNSET:
        yield Fault(key, f"is {UNSET}, which stands for a value to be given: give one")
    elif isinstance(plain, list):
        for value in plain:
            yield from left_open(value, key)
    elif isinstance(plain, dict):
        for name, value in plain.items():
            yield from left_open(value, f"{key}.{name}" if key else str(name))


def value_slips(plain: Mapping[Any, Any], key: str = "") -> Iterator[Fault]:
    """Keys of nested dicts that mean nothing as they are written."""
    for name, value in plain.items():
        if value is None and ":" in str(name):
            said = str(name).replace(":", ": ", 1)
            yield Fault(key, f"{str(name)!r} has no value: write a space after the colon, {{{said}}}")
        elif isinstance(value, dict):
            yield from value_slips(value, f"{key}.{name}" if key else str(name))
    if key.endswith(".lora") and plain and not {"rank", "adapter"} & plain.keys():
        yield Fault(f"{key}.rank", f"missing beside {', '.join(map(str, plain))}: give a rank, or 0 for no adapters")
    if key.endswith(".encoder") and not isinstance(plain.get("family", ""), str):
        yield Fault(f"{key}.family", f"must be the name of a family, is {plain['family']!r}")

"""The YAML that a run is composed of, before anything reads it: that it is data, and of a size that can be read.

A few lines of aliases stand for more memory than a machine has, brackets inside each other end the parser, and a search
path of Hydra's may name a package, which is then imported.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from mimo_train.config.errors import Fault
from mimo_train.config.run_files import base_path, content_of, defaults_of, shipped_configs

MOST_BYTES, MOST_VALUES, MOST_DEPTH = 4_000_000, 100_000, 50
"""Bounds of one file or override: its length, its values once aliases are written out, mappings and lists inside each
other. The largest shipped run has 300 values, 5 deep."""

RESOLVER = re.compile(r"\$\{[^}]*[:$]")
"""An interpolation that calls something, `${oc.env:NAME}`, or may after another one in it, instead of naming a key,
`${run.seed}`."""


def source_faults(path: Path, overrides: Sequence[str]) -> Iterator[Fault]:
    """What is wrong with the files of a run, `path` and those that it extends or picks, and its overrides."""
    for override in overrides:
        key, _, value = override.partition("=")
        wrong = _why_unread(value)
        if wrong:
            yield Fault(key, wrong)
        elif key.lstrip("+~").partition(".")[0].partition("/")[0] == "hydra":
            yield Fault(key, f"{_HYDRA}: remove it")
    choices, roots = [override.partition("=")[::2] for override in overrides], [path.parent, shipped_configs()]
    waiting, seen, extended = [path], set(), {path}
    while waiting or choices:
        if not waiting:
            waiting, choices = [*_picked(choices, roots)], []
            continue
        file = waiting.pop().resolve()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        wrong = _why_unread_file(file)
        if wrong:
            yield Fault(file.name, wrong)
            continue
        content = content_of(file)
        if "hydra" in content:
            yield Fault(file.name, f"hydra: {_HYDRA}: remove it")
        if file in extended:  # groups are looked for next to a file of the run
            bases = {base for entry in defaults_of(content) if (base := base_path(file, entry)) is not None}
            extended |= bases
            roots += [base.parent for base in bases]
            waiting += bases
        waiting += _picked(_entries(content), (file.parent, *roots))


def resolver_faults(plain: Any, key: str = "") -> Iterator[Fault]:
    """Texts of nested dicts and lists that call something when they are resolved: what they give would be saved with
    the run."""
    if isinstance(plain, str) and RESOLVER.search(plain):
        yield Fault(
            key,
            f"is {plain!r}, and a config calls nothing and reads no environment, which would be saved with the run: "
            "write the value, or give it as an override ($NAME on the command line is your shell's)",
        )
    elif isinstance(plain, list):
        for value in plain:
            yield from resolver_faults(value, key)
    elif isinstance(plain, dict):
        for name, value in plain.items():
            yield from resolver_faults(value, f"{key}.{name}" if key else str(name))


_HYDRA = "keys of Hydra itself, such as a search path, are not taken from a run"


def _why_unread_file(file: Path) -> str:
    try:
        if file.stat().st_size > MOST_BYTES:
            return f"has {file.stat().st_size} bytes, more than {MOST_BYTES}: this is no config"
        return _why_unread(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        return f"cannot be read: {error}"


def _why_unread(text: str) -> str:
    """Why YAML is not read; empty if nothing is wrong. Errors of syntax are left to the one who reads it."""
    if len(text) > MOST_BYTES:
        return f"has {len(text)} characters, more than {MOST_BYTES}"
    sizes: dict[str, int] = {}
    outer: list[tuple[str | None, int]] = [(None, 0)]
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            size: int = 1
            anchor: Any = getattr(event, "anchor", None)
            if isinstance(event, yaml.CollectionStartEvent):
                outer.append((anchor, 1))
                if len(outer) > MOST_DEPTH:
                    return f"has more than {MOST_DEPTH} mappings and lists inside each other"
                continue
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, size = outer.pop()
            elif isinstance(event, yaml.AliasEvent):
                if anchor not in sizes:
                    return f"the alias *{anchor} stands inside of what it stands for, or for nothing"
                anchor, size = None, sizes[anchor]
            elif not isinstance(event, yaml.ScalarEvent):
                continue
            if anchor is not None:
                sizes[anchor] = size
            outer[-1] = (outer[-1][0], outer[-1][1] + size)
            if outer[-1][1] > MOST_VALUES:
                return f"has more than {MOST_VALUES} values, aliases written out"
    except (yaml.YAMLError, RecursionError):
        return ""
    return ""


def _entries(content: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(group, choice) of a defaults list; without a group for a file of the same group."""
    for entry in defaults_of(content):
        if isinstance(entry, dict):
            yield from entry.items()
        else:
            yield "", entry


def _picked(entries: Any, roots: Sequence[Path]) -> Iterator[Path]:
    """Files that a defaults list or overrides may pick, whether they are there or not."""
    for group, choice in entries:
        folder = str(group).replace(" ", "").removeprefix("override").removeprefix("optional").partition("@")[0]
        for one in choice if isinstance(choice, list) else [choice]:
            if isinstance(one, str) and one and "\0" not in one and len(one) < 200:
                name = f"{folder.lstrip('+~/')}/{one.partition('@')[0]}".lstrip("/")
                yield from (root / f"{name}.yaml" for root in roots)

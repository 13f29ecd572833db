"""How two sections of a config differ: one of now, and one as a checkpoint's record holds it. Imports no torch."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Set
from typing import Any


def key_changes(was: Mapping[str, Any], section: Any, prefix: str, free: Set[str] = frozenset()) -> Iterator[str]:
    """Sentences with key, old and new value, one for each difference; sections inside of it are compared too.

    Args:
        was: as a record holds it. A key that it lacks was added later, and means its default.
        section: a dataclass.
        prefix: its key.
        free: names of keys that are not compared, at any depth.
    """
    now, default = plain(section), _plain_defaults(type(section))
    for name in now:
        old, value = was.get(name, default.get(name)), getattr(section, name)
        if name in free:
            continue
        if dataclasses.is_dataclass(value) and isinstance(old, dict):
            yield from key_changes(old, value, f"{prefix}.{name}", free)
        elif old != now[name]:
            yield f"{prefix}.{name} was {old}, is {now[name]}"
    for name in was.keys() - now.keys() - free:
        yield f"{prefix}.{name} was {was[name]}, and is no key of this version"


def plain(section: Any) -> dict[str, Any]:
    """A dataclass as a record holds it: a tuple has become a list, a number as a key a text."""
    return json.loads(json.dumps(dataclasses.asdict(section)))


def _plain_defaults(kind: type) -> dict[str, Any]:
    """Defaults of a section's keys; those without one are left out."""
    found = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
            found[field.name] = plain(value) if dataclasses.is_dataclass(value) else value
    return json.loads(json.dumps(found))

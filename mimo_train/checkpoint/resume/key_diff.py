"""How two sections of a config differ: one of now, and one as a checkpoint's record holds it. Imports no torch."""

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any


def key_changes(was: Mapping[str, Any], section: Any, prefix: str, free: Set[str] = frozenset()) -> Iterator[str]:
    """Sentences with key, old and new value, one for each difference; sections inside of it, and in its lists and
    mappings, are compared too.

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
        yield from _changes(old, value, now[name], f"{prefix}.{name}", free)
    for name in was.keys() - now.keys() - free:
        yield f"{prefix}.{name} was {was[name]}, and is no key of this version"


def _changes(old: Any, value: Any, now: Any, key: str, free: Set[str]) -> Iterator[str]:
    """Sentences about one value: `old` of the record, `value` of now, and `now` the same as a record holds it."""
    if dataclasses.is_dataclass(value) and isinstance(old, dict):
        yield from key_changes(old, value, key, free)
    elif isinstance(value, list) and isinstance(old, list) and _of_sections(value, old):
        for at, (was, one) in enumerate(zip(old, value, strict=False)):
            yield from _changes(was, one, now[at], f"{key}[{at}]", free)
        yield from (f"{key}[{at}] was {old[at]}, and is away" for at in range(len(value), len(old)))
        yield from (f"{key}[{at}] is new: {now[at]}" for at in range(len(old), len(value)))
    elif isinstance(value, dict) and isinstance(old, dict) and _of_sections(value.values(), old.values()):
        own = {str(name): one for name, one in value.items()}
        for name in (name for name in own if name in old):
            yield from _changes(old[name], own[name], now[name], f"{key}.{name}", free)
        yield from (f"{key}.{name} was {old[name]}, and is away" for name in old if name not in own)
        yield from (f"{key}.{name} is new: {now[name]}" for name in own if name not in old)
    elif old != now:
        yield f"{key} was {old}, is {now}"


def _of_sections(values: Collection[Any], old: Collection[Any]) -> bool:
    """Whether sections are in a list or mapping; of an empty one its record tells."""
    return any(map(dataclasses.is_dataclass, values)) or (not values and any(isinstance(one, dict) for one in old))


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

"""Keys of mixtures and of held-out sets."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.errors import DataError
from data.records.members import read_fields
from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, key, value_faults

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
TAKEN = ("loss", "exact_match", "samples", "rewards", "logps")
"""Reserved names of held-out sets: `eval/loss` and `eval/rewards/margins` belong to the set without a name."""


@dataclass
class SourceConfig(Section):
    """Shards that are mixed with others."""

    shards: str = ""
    """As `data.shards`. Required."""
    weight: float | None = key(None, at_least=0)
    """Share of the samples, relative to all weights; 0: none for now. Without any, the sample counts are the
    weights."""
    name: str = ""
    """Name in metrics; empty: the last part of `shards`."""
    fields: dict[str, Any] = field(default_factory=dict)
    """As `data.fields`, which applies if this is empty."""


@dataclass
class MixChange(Section):
    """Other weights from a step on."""

    after_step: int = key(at_least=1)
    """Step after which the weights hold."""
    weights: dict[str, float] = key(factory=dict, at_least=0)
    """Weights by source name. Other sources keep theirs."""


@dataclass
class HeldOutConfig(Section):
    """A held-out or test set with a name."""

    shards: str = ""
    """As `data.shards`. Required."""
    fields: dict[str, Any] = field(default_factory=dict)
    """As `data.fields`, which applies if this is empty."""
    interval: int = key(0, at_least=0)
    """Steps between its evaluations; 0: `train.eval_interval`. Not for test sets."""
    samples: int = key(0, at_least=0)
    """Samples per evaluation; 0: `train.eval_samples`."""
    metrics: list[str] = field(default_factory=list)
    """Metrics of generated answers; empty: `train.eval_metrics`."""


def fields_faults(fields: Mapping[str, Any], key: str) -> Iterator[Fault]:
    """Yield faults of `data.fields`, or of a source's fields; `key`: the config key."""
    try:
        read_fields(fields)
    except DataError as error:
        name, _, message = str(error).partition(": ")
        yield Fault(f"{key}.{name}", message)


def source_names(mix: Sequence[SourceConfig]) -> list[str]:
    """Return the names of sources in metrics and messages."""
    return [source.name or _name_of(source.shards) for source in mix]


def _name_of(shards: str) -> str:
    """Return the last part of a path without wildcards or braces."""
    parts = [part.partition("@")[0] for part in re.split(r"[/\\]", shards.split(",")[0].strip())]
    plain = [part for part in parts if _NAME.fullmatch(part) and part not in (".", "..")]
    return re.sub(r"\.(tar|parquet|idx|bin)$", "", plain[-1]) if plain else ""


def mix_faults(mix: Sequence[SourceConfig], schedule: Sequence[MixChange], shards: str) -> Iterator[Fault]:
    """Yield faults of `data.mix` and `data.mix_schedule`; `shards`: `data.shards`."""
    if schedule and not mix:
        yield Fault("data.mix_schedule", "requires data.mix, which is empty. Remove it, or set data.mix")
    if not mix:
        return
    if shards:
        yield Fault("data.shards", f"is {shards}, and data.mix is given too: set data.shards= and data.demo= (empty)")
    names = source_names(mix)
    for at, (source, name) in enumerate(zip(mix, names, strict=True)):
        yield from value_faults(source, f"data.mix[{at}]")
        yield from fields_faults(source.fields, f"data.mix[{at}].fields")
        if not source.shards.strip():
            yield Fault(f"data.mix[{at}].shards", "is empty: give a folder, a glob or a brace range")
        elif not _NAME.fullmatch(name):
            yield Fault(f"data.mix[{at}].name", f"must be of letters, digits and _.-, is {name!r}: give one")
        elif names.index(name) < at:
            yield Fault(f"data.mix[{at}].name", f"{name!r} is the name of data.mix[{names.index(name)}] too: give one")
    weights = [source.weight for source in mix]
    set_weights = [weight for weight in weights if weight is not None]
    if 0 < len(set_weights) < len(weights):
        at = weights.index(None)
        yield Fault(
            f"data.mix[{at}].weight",
            "is missing, but other sources have one. Set a weight for every source, or for none",
        )
    elif set_weights and not any(set_weights):
        yield Fault("data.mix", "every weight is 0. Set one above 0")
    elif schedule and not set_weights:
        yield Fault("data.mix_schedule", "requires a weight for every source in data.mix")
    yield from _schedule_faults(schedule, dict(zip(names, (weight or 0.0 for weight in weights), strict=True)))


def _schedule_faults(schedule: Sequence[MixChange], weights: Mapping[str, float]) -> Iterator[Fault]:
    now = dict(weights)
    for at, change in enumerate(schedule):
        place = f"data.mix_schedule[{at}]"
        wrong = [*value_faults(change, place)]
        yield from wrong
        if wrong:
            return
        if at and change.after_step <= schedule[at - 1].after_step:
            yield Fault(f"{place}.after_step", f"must be above {schedule[at - 1].after_step} of the one before it")
        if unknown := [name for name in change.weights if name not in weights]:
            yield Fault(f"{place}.weights", f"data.mix has no source {unknown[0]!r}: it has {', '.join(weights)}")
        elif not change.weights:
            yield Fault(f"{place}.weights", "is empty: give weights by the names of sources")
        now |= change.weights
        if not any(now.values()):
            yield Fault(f"{place}.weights", "every weight is 0 from this step on. Set one above 0")


def named_set_faults(key: str, sets: Mapping[str, HeldOutConfig]) -> Iterator[Fault]:
    """Yield faults of `data.validation` or `data.test`, which `key` names."""
    for name, item in sets.items():
        if not _NAME.fullmatch(name) or name in TAKEN:
            yield Fault(
                key, f"names are of letters, digits and _.-, and not {', '.join(TAKEN)}; one is {name!r}: give another"
            )
            continue
        yield from value_faults(item, f"{key}.{name}")
        yield from fields_faults(item.fields, f"{key}.{name}.fields")
        if not item.shards.strip():
            yield Fault(f"{key}.{name}.shards", "is empty: give a folder, a glob or a brace range")
        if key == "data.test" and item.interval:
            yield Fault(
                f"{key}.{name}.interval",
                f"is {item.interval}, but test sets are evaluated once, after the last step. Move the set to "
                "data.validation, or remove the key",
            )


def validation_faults(
    validation: Mapping[str, HeldOutConfig], shards: str, held_out_by: str, names: Sequence[str]
) -> Iterator[Fault]:
    """Yield faults of held-out sets together; `shards`: `data.validation_shards`; `held_out_by`: key that holds out
    training samples, or empty; `names`: of the sources of a mixture."""
    if held_out_by and shards:
        yield Fault(
            held_out_by,
            f"holds out training samples, and data.validation_shards is {shards}: set one of them to 0 or empty; "
            "further sets go into data.validation",
        )
    both = [name for name, count in Counter([*names, *validation]).items() if count > 1]
    if held_out_by and both:
        yield Fault(
            "data.validation", f"{both[0]!r} is a source too, whose held-out samples have its name: give another"
        )
    if held_out_by and (taken := [name for name in names if name in TAKEN]):
        yield Fault(
            "data.mix", f"a source is named {taken[0]!r}, as what is measured of the held-out ones: give another"
        )

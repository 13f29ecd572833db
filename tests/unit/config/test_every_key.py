"""Every key of a config with values of every kind gives a fault with a key, or a value in its declared range. There is
no traceback and no endless loop."""

import copy
import dataclasses
import math
import re
import signal
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from encoders.key_rules import RULES, rules_of
from encoders.projectors.spec import ProjectorSpec
from encoders.registry import FAMILIES
from encoders.transformers_media.spec import ProcessorSpec
from mimo_train.config import compose
from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_checkpoint import LoadConfig
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.layout.run import config_faults

NAN, INF, ESCAPE = math.nan, math.inf, "\x1b[31mred\x1b[0m"
KINDS = (None, True, -1, 0, 1, 0.5, 1.5, -0.5, NAN, INF, 1e300, 10**20, "abc", "", ESCAPE, [], [-1], [NAN], {"a": 1})
KINDS += ([[1]],)

SECONDS = 2
"""Process time limit for one value: a thousand times the usual time."""


def sections(cls: type) -> Iterator[type]:
    """Yield a dataclass of the config, and those inside."""
    yield cls
    for field in dataclasses.fields(cls):
        for inside in (field.default_factory, *typing.get_args(field.type)):
            if dataclasses.is_dataclass(inside):
                yield from sections(inside)


ALL = {*sections(ConfigContainer), *sections(ModuleConfig), *sections(ProjectorSpec), LlmSpec}
# Keys of media halves and of encoders of transformers come from their directories.
ALL |= {family.spec for family in FAMILIES.values() if not issubclass(family.spec, ProcessorSpec)}


@pytest.mark.parametrize("cls", sorted(ALL, key=lambda cls: cls.__name__))
def test_every_number_declares_its_range_and_its_default_is_in_it(cls):
    for field in dataclasses.fields(cls):
        if field.type not in (int, float, int | None, float | None, list[int], list[float], dict[str, int]):
            continue
        rules = field.metadata.get(RULES)
        assert rules is not None and rules.bounds(), f"{cls.__name__}.{field.name}"
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        assert not rules.complaint(default), f"{cls.__name__}.{field.name}"


type Path = tuple[str | int, ...]


def keys(plain: Any, path: Path = ()) -> Iterator[Path]:
    for name, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
        if isinstance(plain, dict) or isinstance(value, dict):
            yield (*path, name)
        if isinstance(value, dict | list):
            yield from keys(value, (*path, name))


def at(value: Any, path: Path) -> Any:
    """Return the value at a path in a config or in plain values."""
    for one in path:
        value = getattr(value, str(one)) if dataclasses.is_dataclass(value) else value[one]
    return value


def faults_of(plain: dict[str, Any]) -> tuple[ConfigContainer | None, list[Fault]]:
    try:
        cfg = compose.from_dict(plain)
    except ConfigError as error:
        return None, error.faults
    return cfg, config_faults(cfg)


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    plain = compose.to_dict(compose.load("vlm_digits"))
    plain["modules"]["images"]["optim"]["groups"] = {"encoder": {"lr": 1e-3, "min_lr": 1e-5, "weight_decay": 0.1}}
    plain["checkpoint"]["load_modules"] = {"images": dataclasses.asdict(LoadConfig(path="runs/other"))}
    return plain


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    def too_long(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, too_long)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


IMAGES = {
    "clip_b16": "resampler64",
    "siglip_so400m_384": "mlp",
    "siglip2_so400m_naflex": "mlp",
    "dinov2_large": "mlp",
    "dinov3_vitl16": "mlp",
    "clip_dinov2": "mlp",
    "qwen2_5_vl_vit": "mlp_merge2",
}
OTHERS = (
    ("mixed_tiny", "llm@modules.language.llm=gpt_tiny_moe"),
    *(
        ("vlm_digits", f"encoder@modules.images.encoder={name}", f"projector@modules.images.projector={projector}")
        for name, projector in IMAGES.items()
    ),
    ("mixed_tiny", "encoder@modules.audio.encoder=qwen2_audio"),
)
"""Shipped configs with dataclasses that `vlm_digits` lacks."""
SOURCES = {
    "mix": [{"shards": "a", "weight": 1.0}, {"shards": "b", "weight": 2.0}],
    "shards": "",
    "validation_shards": "",
    "demo": "",
}
SOURCES |= {"mix_schedule": [{"after_step": 5, "weights": {"a": 2.0}}], "validation": {"b": {"shards": "c"}}}
OF_FOLDERS: dict[str, dict[str, dict[str, Any]]] = {
    "mixed_tiny": {
        "images": {
            "encoder": {
                "family": "qwen3_vit",
                "patch_size": 16,
                "max_pixels": 131072,
                "deepstack": [1],
                "deepstack_width": 96,
            },
            "projector": {"kind": "mlp", "merge": 2, "activation": "gelu"},
        },
    },
}
"""Modules that shipped configs only take from a model's directory, instead of their own."""


def cases(run: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield plain configs without faults."""
    yield run
    mixture = copy.deepcopy(run)
    mixture["data"] |= copy.deepcopy(SOURCES)
    yield mixture
    for name, *overrides in OTHERS:
        yield compose.to_dict(compose.load(name, (*overrides, "data.sequence_length=2048")))
    for name, modules in OF_FOLDERS.items():
        plain = compose.to_dict(compose.load(name, ("data.sequence_length=4096",)))
        for module, parts in modules.items():
            plain["modules"][module] |= copy.deepcopy(parts)
        yield compose.to_dict(compose.from_dict(plain))


def test_every_key_with_every_kind_of_value(run):
    """Each dataclass is tried in the first config that has it; inherited keys are tried in the base class."""
    wrong: list[str] = []
    tried, seen, owners = 0, set[tuple[type, str]](), set[str]()
    for plain in cases(run):
        base, faults = faults_of(plain)
        assert base is not None and not faults, [*map(str, faults)]
        earlier = set(seen)
        for path in [*keys(plain)]:
            owner, name = at(base, path[:-1]), str(path[-1])
            if not dataclasses.is_dataclass(owner) and plain is not run:
                owner = at(base, path[:-2])  # a list or a mapping: its owner
            owners.add(type(owner).__name__)
            bases = (cls for cls in type(owner).__mro__ if name in vars(cls).get("__annotations__", {}))
            key = next(bases, type(owner)), name
            if key not in earlier:
                seen.add(key)
                tried += 1
                wrong += complaints(plain, path)
    assert not wrong, "\n".join(wrong)
    assert tried > 350
    assert not {one.__name__ for one in ALL} - owners


def complaints(plain: dict[str, Any], path: Path) -> Iterator[str]:
    """Yield errors in the handling of one key's values."""
    key, holds, name = ".".join(map(str, path)), at(plain, path[:-1]), path[-1]
    for value in KINDS:
        was = holds[name]
        if type(was) is type(value) and was == value:
            continue
        holds[name] = value
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            cfg, found = faults_of(plain)
        except Exception as error:
            yield f"{key}={value!r}: {error!r}"
            continue
        finally:
            holds[name] = was
        if any(not fault.key or not fault.message or "\x1b" in str(fault) for fault in found):
            yield f"{key}={value!r}: {[*map(str, found)]!r}"
        named = [re.sub(r"\[(\d+)\]", r".\1", fault.key) for fault in found]
        if cfg is None and not any(key.startswith(one) or one.startswith(key) for one in named):
            yield f"{key}={value!r} is of another type, and only {named} are named"
        if not found and not fits(cfg, path, value):
            yield f"{key}={value!r} is accepted"


def fits(cfg: Any, path: Path, value: Any) -> bool:
    """True if an accepted value is valid for the key."""
    owner, name = at(cfg, path[:-1]), path[-1]
    if not dataclasses.is_dataclass(owner):
        return True
    field, taken = next(one for one in dataclasses.fields(owner) if one.name == name), getattr(owner, str(name))
    if field.type in (int, float, bool):
        return type(taken) is field.type and not isinstance(value, list | dict) and not rules_of(field).complaint(taken)
    if rules_of(field).complaint(taken):
        return False
    return ESCAPE not in str(taken) and isinstance(taken, list) == isinstance(value, list)


def test_all_wrong_types_are_named_at_once(run):
    plain = copy.deepcopy(run)
    plain["train"]["iters"], plain["optim"]["lr"] = "many", []
    plain["train"]["compile"], plain["modules"]["images"]["compile"] = True, False  # as YAML reads yes and no
    plain["modules"]["images"]["encoder"]["patch_size"] = {}
    found = {fault.key: fault.message for fault in faults_of(plain)[1]}
    assert found == {
        "train.iters": "must be a whole number, is 'many'",
        "train.compile": "must be none or layers, is True",
        "modules.images.compile": "must be empty or none or layers, is False",
        "optim.lr": "must be a number, is []",
        "modules.images.encoder.patch_size": "must be a whole number, is {}",
    }


def test_a_number_above_what_any_key_may_be_is_told_that_bound(run):
    plain = copy.deepcopy(run)
    plain["train"]["iters"] = 3 * 10**9
    assert [*map(str, faults_of(plain)[1])] == ["train.iters: must be at most 2147483647, is 3000000000"]

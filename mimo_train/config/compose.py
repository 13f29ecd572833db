"""YAML files and overrides -> one `ConfigContainer`, or every fault with its key. Hydra composes."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from encoders.errors import EncoderError
from encoders.joined.spec import JoinedSpec
from encoders.projectors.spec import ProjectorSpec
from encoders.registry import Family, family_of, is_path
from mimo_train.config.energon import fill_in_energon
from mimo_train.config.errors import ConfigError, Fault, nearest
from mimo_train.config.pretrained.absent import leave_out_absent
from mimo_train.config.pretrained.directory import Directory
from mimo_train.config.pretrained.fill_in import directories, fill_in, fill_in_joined, replaced_parts
from mimo_train.config.run_files import (
    SUFFIXES,
    composed_files,
    content_of,
    parsed,
    picked_groups,
    run_files,
    search_folders,
    shipped_configs,
)
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.slips import left_open, override_slips, value_slips, wrong_removals
from mimo_train.config.sources import resolver_faults, source_faults
from mimo_train.config.typed import structured
from mimo_train.config.user_code import say_imports, search_working_directory
from mimo_train.config.yaml_numbers import without_marks

_IN_LIST = re.compile(r"\[\d+\]|\.\d+(\.|$)")
"""In the keys of values inside a list, as `data.mix[0].weight`."""

RECIPES = "recipes"
"""Folder in that of the shipped configs, with whole runs of models that people use and a `layout/` group of their own;
these are named with it, `recipes/NAME`."""


def load(config: str, overrides: Sequence[str] = (), *, without_data: bool = False) -> ConfigContainer:
    """Compose `config` (a shipped name such as `vlm_digits` or `recipes/siglip2_qwen3`, or a path to a YAML file) with
    `key=value` overrides.

    An override with dots sets a value (`train.iters=10`); one that names a group picks a file of it
    (`layout=two_processes`, `encoder@modules.images.encoder=vit_tiny`).

    Args:
        without_data: leave out directories of pretrained weights that do not exist.

    Raises:
        ConfigError: unknown file, group choice, key or family, or a value of the wrong type; with the nearest names.
    """
    path = _find(config)
    faults = list(source_faults(path, overrides))
    if faults:
        raise ConfigError(faults)
    files = run_files(path)
    choices, values, slips = _sort_overrides(overrides, files)
    faults = [*slips, *_gaps(files, values)]
    cfg = None
    try:
        plain = _composed(path, choices, values)
        try:
            _fill_in_all(plain, files, choices, values, without_data)
            cfg, wrong = _read(plain)
        except ConfigError as error:  # keys are looked at all the same
            wrong = [*error.faults, *_read(plain)[1]]
    except ConfigError as error:
        wrong = error.faults
    known = {fault.key for fault in faults}
    faults += [fault for fault in wrong if fault.key not in known]
    if faults or cfg is None:
        has_every_choice = all("." in slip.key for slip in slips)
        raise ConfigError(faults, cfg if has_every_choice else None)
    return cfg


def _fill_in_all(
    plain: dict[str, Any], files: Sequence[Path], choices: Sequence[str], values: Sequence[str], without_data: bool
) -> None:
    """Fill in what directories and Energon datasets say, in place."""
    if without_data:
        leave_out_absent(plain)
    found = directories(plain)
    if found:
        replaced = replaced_parts(found)
        _require_no_choice(choices, replaced, found)
        picked = [key for key in picked_groups(files) if key.partition("@")[2] in replaced]
        without = _composed(files[-1], [*choices, *(f"~{key}" for key in picked)], values)
        plain.clear()
        plain.update(without)
        if without_data:
            leave_out_absent(plain)
        fill_in(plain, found, tokenizer_is_given=_tokenizer_is_given(files, values))
    fill_in_joined(plain)
    fill_in_energon(plain)


def _gaps(files: Sequence[Path], values: Sequence[str]) -> Iterable[Fault]:
    """Faults of values that a file leaves open, and neither one that extends it nor an override gives: merged over a
    default they would be dropped."""
    gaps: dict[str, Fault] = {}
    for file in files:
        content = content_of(file)
        gaps = {key: gap for key, gap in gaps.items() if not _sets(content, key)}
        gaps |= {gap.key: gap for gap in left_open(content)}
    given = [value.partition("=")[0] for value in values]
    return [gap for key, gap in gaps.items() if key not in given]


def _sets(content: Any, key: str) -> bool:
    """True if the content of a file has the dotted `key`."""
    for name in key.split("."):
        if not isinstance(content, dict) or name not in content:
            return False
        content = content[name]
    return True


def _composed(path: Path, choices: Sequence[str], values: Sequence[str]) -> dict[str, Any]:
    """Nested dicts of the file, with Hydra's overrides and values."""
    try:
        composed = composed_files(path, tuple(choices))
        of_lists = [value for value in values if _IN_LIST.search(value.partition("=")[0])]
        given = OmegaConf.create()
        for key, _, value in (value.partition("=") for value in values if value not in of_lists):
            OmegaConf.update(given, key, parsed(value))
        merged = OmegaConf.merge(composed, given)
        for one in of_lists:  # a merge would take the place of the list
            at, _, value = one.partition("=")
            try:
                OmegaConf.update(merged, at, parsed(value))
            except IndexError as error:
                raise ConfigError([_no_entry(merged, at)]) from error
        calls = list(resolver_faults(OmegaConf.to_container(merged, resolve=False)))
        if calls:
            raise ConfigError(calls)
        plain = without_marks(OmegaConf.to_container(merged, resolve=True))
    except MissingConfigException as error:
        raise ConfigError([_missing_choice(error, path)]) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        named = [*wrong_removals(error, choices, path.name), *_lists_for_mappings(path, values)]
        raise ConfigError(named or [Fault(path.name, " ".join(str(error).split()))]) from error
    assert isinstance(plain, dict), type(plain)
    return {str(key): value for key, value in plain.items()}


def _lists_for_mappings(path: Path, values: Sequence[str]) -> Iterable[Fault]:
    """Faults of the file and of overrides that have something else where a mapping belongs: the error about merging a
    list with one does not say where it is."""
    try:
        given = [yaml.safe_load(path.read_text()), OmegaConf.to_container(OmegaConf.from_dotlist([*values]))]
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError):
        return
    for plain in given:
        own = {key: value for key, value in plain.items() if key != "defaults"} if isinstance(plain, dict) else {}
        yield from (fault for fault in _read(own)[1] if fault.message.startswith("must be a mapping"))


def _no_entry(merged: DictConfig | ListConfig, at: str) -> Fault:
    """Of a value for an entry that a list does not have; `data.mix[2].weight` and `data.mix.2.weight` are the same."""
    found: Any = merged
    where = name = ""
    for name in re.findall(r"[^.\[\]]+", at):
        if isinstance(found, ListConfig) and int(name) >= len(found):
            break
        found, where = found[int(name) if isinstance(found, ListConfig) else name], f"{where}.{name}"
    return Fault(at, f"{where[1:]} has no entry {name}: it has {len(found)}, counted from 0")


def _require_no_choice(choices: Sequence[str], replaced: Sequence[str], found: Mapping[str, Directory]) -> None:
    """Raises ConfigError where a group is picked on the command line for a part that comes from a directory."""
    for choice in choices:
        place = choice.partition("=")[0].partition("@")[2]
        if place in replaced:
            key = found[place.split(".")[1]].key
            raise ConfigError([Fault(key, f"takes the place of {choice.lstrip('+')}: remove one of them")])


def _tokenizer_is_given(files: Sequence[Path], values: Sequence[str]) -> bool:
    """Whether a file of the run itself or an override sets `data.tokenizer`, and not only a group."""
    return any(value.startswith("data.tokenizer=") for value in values) or any(
        _sets(content_of(file), "data.tokenizer") for file in files
    )


def from_dict(plain: dict[str, Any]) -> ConfigContainer:
    """A `ConfigContainer` from nested dicts, as `load` composes them and `config.yaml` of a run holds them. Encoders of
    users that it names are imported, which is said before.

    Raises:
        ConfigError: every unknown key and every value of a wrong type, each by its full key.
    """
    cfg, faults = _read(plain)
    if faults or cfg is None:
        raise ConfigError(faults, cfg)
    return cfg


def _read(plain: dict[str, Any]) -> tuple[ConfigContainer | None, list[Fault]]:
    """Return the config of nested dicts, with defaults in the place of what is wrong, and every fault; None if a part
    of it cannot be built."""
    say_imports(plain)
    slips = {fault.key: fault for fault in (*left_open(plain), *value_slips(plain))}
    faults = dict(slips)
    train, modules = plain.get("train"), plain.get("modules")
    if isinstance(train, Mapping) and train.get("epochs") and "iters" not in train:
        plain = {**plain, "train": {**train, "iters": 0}}  # without its default
    parts: dict[tuple[str, str], Any] = {}
    if isinstance(modules, Mapping):
        modules = {name: {} if module is None else module for name, module in modules.items()}
        for name, module in modules.items():
            if not isinstance(name, str) or not name.isidentifier():
                text = f"the name of a module is a word of letters, digits and _, one is {name!r}"
                faults.setdefault("modules", Fault("modules", text))
            elif isinstance(module, Mapping):
                parts |= {(name, part): module[part] for part in _PARTS if module.get(part) is not None}
                modules[name] = {key: value for key, value in module.items() if key not in _PARTS}
    cfg, wrong = structured(ConfigContainer, {**plain, "modules": modules or {}}, "")
    is_whole = cfg is not None
    for (name, part), keys in parts.items():
        prefix = f"modules.{name}.{part}"
        spec, more = _encoder(keys, prefix) if part == "encoder" else structured(ProjectorSpec, keys, prefix)
        wrong += more
        is_whole &= spec is not None and name in cfg.modules
        if is_whole:
            setattr(cfg.modules[name], part, spec)
    for fault in wrong:
        if not any(fault.key.startswith((f"{slip}.", f"{slip}[")) for slip in slips):
            faults.setdefault(fault.key, fault)
    return cfg if is_whole else None, list(faults.values())


_PARTS = ("encoder", "projector")
"""Keys of a module whose classes depend on other keys."""


def to_dict(cfg: ConfigContainer) -> dict[str, Any]:
    """Nested dicts of plain values; `from_dict` reads them back."""
    plain = dataclasses.asdict(cfg)
    for module in plain["modules"].values():
        for part in ("encoder", "projector", "llm"):
            if module[part] is None:
                del module[part]
    if plain["train"]["epochs"]:
        plain["train"]["iters"] = 0  # it follows from the data
    return plain


def to_yaml(cfg: ConfigContainer) -> str:
    """The resolved config as YAML."""
    return yaml.safe_dump(to_dict(cfg), sort_keys=False)


def is_config(name: str) -> bool:
    """Whether `name` is that of a YAML file or of a shipped config."""
    return Path(name).suffix in SUFFIXES or name in _shipped()


def _shipped() -> dict[str, Path]:
    """Files of the shipped configs by their names."""
    folder = shipped_configs()
    files = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob(f"{RECIPES}/*.yaml"))]
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def _find(config: str) -> Path:
    path = Path(config)
    if path.suffix in SUFFIXES:
        if path.is_file() and path.suffix == ".yml":
            raise ConfigError([Fault("CONFIG", f"expected a file that ends in .yaml, got {config}. Rename it")])
        if path.is_file():
            return path.resolve()
        raise ConfigError([Fault("CONFIG", f"no file {config}: give an existing YAML file or a shipped name")])
    shipped = _shipped()
    if config in shipped:
        return shipped[config]
    raise ConfigError([Fault("CONFIG", f"no shipped config named {config!r}{nearest(config, shipped)}")])


def _missing_choice(error: MissingConfigException, path: Path) -> Fault:
    """The fault of a group file that does not exist, such as encoder/vit_tny."""
    group, _, choice = (error.missing_cfg_file or "").partition("/")
    if not choice or not error.options:
        return Fault(path.name, " ".join(str(error).split()))
    return Fault(group, f"no {group} named {choice!r}{nearest(choice, error.options)}")


def _sort_overrides(overrides: Sequence[str], files: Sequence[Path]) -> tuple[list[str], list[str], list[Fault]]:
    """Hydra's overrides (group choices, and what begins with ~), values to set as they are written, and the faults of
    overrides that are neither."""
    roots = search_folders(files)
    groups = {folder.name for root in roots for folder in root.iterdir() if folder.is_dir()} - {RECIPES}
    picked = picked_groups(files)
    named = picked | {key.partition("@")[0] for key in picked}
    choices: list[str] = []
    values: list[str] = []
    faults: list[Fault] = []
    for override in overrides:
        key, separator, value = override.partition("=")
        name = key.lstrip("+")
        slips = list(override_slips([override], groups, picked))
        faults += slips
        if slips:
            continue
        if key[:1] == "~":
            choices.append(override)
        elif not separator or not name:
            faults.append(Fault(override, "an override reads key=value, for example train.iters=100"))
        elif (group := name.partition("@")[0]) in groups and "." not in group:
            options = {file.stem for root in roots for file in (root / group).glob("*.yaml")}
            if value.strip("'\"") not in options and "/" not in value:
                faults.append(Fault(group, f"no {group} named {value!r}{nearest(value, sorted(options))}"))
                continue
            # A group that the file does not pick from is added to it.
            is_picked = name.replace(" ", "") in named
            choices.append(override if is_picked or key != name else f"+{override}")
        else:
            # An empty value is the empty string, not YAML's null.
            values.append(f"{name}={value}" if value else f'{name}=""')
    return choices, values, faults


def _family(encoder: dict[str, Any]) -> Family:
    """The family of an encoder's keys. Raises EncoderError as `family_of`."""
    name = str(encoder.get("family", "vit"))
    if is_path(name):
        search_working_directory()
    return family_of(name)


def _encoder(plain: Any, prefix: str) -> tuple[Any, list[Fault]]:
    """The spec of an encoder, with those of the encoders that are joined in it, and faults of their values."""
    try:
        cls = _family(plain if isinstance(plain, dict) else {}).spec
    except EncoderError as error:
        return None, [Fault(f"{prefix}.family", str(error))]
    spec, faults = structured(cls, plain, prefix)
    if isinstance(spec, JoinedSpec):
        for part, keys in spec.parts.items():
            if isinstance(keys, dict):
                found, wrong = _encoder(plain[part], f"{prefix}.{part}")
                setattr(spec, part, found)
                faults += wrong
    return spec, faults

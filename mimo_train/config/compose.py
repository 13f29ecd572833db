"""Composes YAML files and overrides into one `ConfigContainer` with Hydra, or reports every error with its key."""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from encoders.key_rules import nearest
from mimo_train.config.energon import fill_in_energon
from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.pretrained.directory import Directory, leave_out_absent
from mimo_train.config.pretrained.fill_in import directories, fill_in, fill_in_joined, replaced_parts
from mimo_train.config.pretrained.hub import locate, named, names_in_run, names_of, replace_names
from mimo_train.config.read_values import shown_plain, structured
from mimo_train.config.run_files import (
    SUFFIXES,
    Contents,
    composed_files,
    parsed,
    picked_groups,
    read_run_files,
    search_folders,
    shipped_configs,
    without_marks,
)
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.user_code import say_imports

RECIPES = "recipes"
"""Folder of shipped configs with whole runs of public models and their own `layout/` group; named `recipes/NAME`."""

NO_GROUPS = {RECIPES, "cluster"}
"""Folders of shipped configs whose files are not choices of a group: `cluster` has templates of manifests."""


Values = list[tuple[str, Any]]
"""(dotted key, value) of overrides, in order."""


def load(
    config: str, overrides: Sequence[str] = (), *, without_data: bool = False, weights: bool = True
) -> ConfigContainer:
    """Compose `config` with `key=value` overrides.

    `config` is a shipped name such as `vlm_digits` or `recipes/siglip2_qwen3`, or a path to a YAML file. An override
    with dots sets a value (`train.iters=10`). One that names a group picks a file of it (`layout=two_processes`,
    `encoder@modules.images.encoder=vit_tiny`).

    Args:
        without_data: leave out directories of pretrained weights that do not exist.
        weights: download the weights of models that are named as on the Hugging Face hub, not only their small files.

    Raises:
        ConfigError: unknown file, group choice, key or family, or a value of the wrong type, with the nearest names; or
            a model cannot be downloaded.
    """
    path = _find(config)
    files = read_run_files(path)
    choices, values, faults = _sort_overrides(overrides, files)
    has_every_choice = all("." in fault.key for fault in faults)
    cfg = None
    try:
        plain = _composed(path, choices, values)
        try:
            _fill_in_all(plain, files, choices, values, without_data, weights)
            cfg, wrong = _read(plain)
        except ConfigError as error:  # report wrong keys too
            wrong = [*error.faults, *_read(plain)[1]]
    except ConfigError as error:
        wrong = error.faults
    by_key: dict[str, Fault] = {}
    for fault in [*faults, *wrong]:
        by_key.setdefault(fault.key, fault)
    if by_key or cfg is None:
        raise ConfigError(by_key.values(), cfg if has_every_choice else None)
    return cfg


def _fill_in_all(
    plain: dict[str, Any],
    files: Contents,
    choices: Sequence[str],
    values: Values,
    without_data: bool,
    weights: bool,
) -> None:
    names = names_of(plain)
    folders, faults = locate(names, names_in_run(plain) if names else {}, weights=weights)
    if faults and not without_data:
        raise ConfigError(faults)
    replace_names(plain, folders)
    if without_data:
        leave_out_absent(plain)
    by_module = directories(plain)
    if by_module:
        replaced = replaced_parts(by_module)
        _require_no_choice(choices, replaced, by_module)
        removals = [f"~{key}" for key in picked_groups(files) if key.partition("@")[2] in replaced]
        without = _composed([*files][-1], [*choices, *removals], values)
        plain.clear()
        plain.update(without)
        replace_names(plain, folders)
        if without_data:
            leave_out_absent(plain)
        has_tokenizer = any(key == "data.tokenizer" for key, _ in values) or any(
            _sets(file, "data", "tokenizer") for file in files.values()
        )
        fill_in(plain, by_module, tokenizer_is_given=has_tokenizer)
    fill_in_joined(plain)
    fill_in_energon(plain)


def _sets(content: Mapping[Any, Any], section: str, name: str) -> bool:
    keys = content.get(section)
    return isinstance(keys, Mapping) and name in keys


def _composed(path: Path, choices: Sequence[str], values: Values) -> dict[str, Any]:
    """Return nested dicts of the file, with Hydra's overrides and values by dotted keys. Raises ConfigError if Hydra
    cannot compose them, or if a value calls something."""
    try:
        plain: Any = OmegaConf.to_container(composed_files(path, tuple(choices)), resolve=False)
        for key, value in values:
            _set(plain, key, value)
        texts = dict(_interpolations(plain))
        if calls := [Fault(key, _CALLS.format(text)) for key, text in texts.items() if RESOLVER.search(text)]:
            raise ConfigError(calls)
        if texts:
            plain = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    except MissingConfigException as error:
        raise ConfigError([_missing_choice(error, path)]) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        message = " ".join(str(error).split())
        # Hydra does not name the key of a list that should be a mapping.
        misfits = [fault for fault in _misfits(path) if fault.message.startswith("must be a mapping")]
        raise ConfigError(misfits or [Fault(path.name, message)]) from error
    return {str(key): value for key, value in without_marks(plain).items()}


def _set(plain: Any, key: str, value: Any) -> None:
    """Set the value of a dotted key in nested dicts and lists; `data.mix[2].weight` equals `data.mix.2.weight`. A
    mapping is merged with the existing one. Raises ConfigError if a list has no such entry, or a parent is neither
    mapping nor list."""
    names = re.findall(r"[^.\[\]]+", key)
    container: Any = plain
    for depth, name in enumerate(names):
        place, index = ".".join(names[:depth]), name
        if isinstance(container, list):
            if not name.isdecimal() or int(name) >= len(container):
                text = f"{place} has no entry {name}: it has {len(container)}, counted from 0"
                raise ConfigError([Fault(key, text)])
            index = int(name)
        elif not isinstance(container, dict):
            value = shown_plain(without_marks(container))
            raise ConfigError([Fault(key, f"{place} is {value}, which has no keys. Set {place} itself")])
        elif depth < len(names) - 1 and container.get(name) is None:
            container[name] = {}
        if depth == len(names) - 1:
            _merge(container, index, value)
        else:
            container = container[index]


def _merge(container: Any, name: Any, value: Any) -> None:
    existing = container[name] if isinstance(container, list) else container.get(name)
    if isinstance(value, dict) and isinstance(existing, dict):
        for key, item in value.items():
            _merge(existing, key, item)
    else:
        container[name] = value


RESOLVER = re.compile(r"\$\{[^}]*[:$]")
"""An interpolation that calls something, `${oc.env:NAME}`, or may do so after a nested one; `${run.seed}` is a key."""

_CALLS = (
    "is {!r}, but a config cannot call anything or read the environment, which would be saved with the run. Write the "
    "value, or give it as an override ($NAME on the command line is your shell's)"
)


def _interpolations(plain: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, text) of the texts that OmegaConf has to resolve."""
    if isinstance(plain, str) and "${" in plain:
        yield key, plain
    elif isinstance(plain, list):
        for item in plain:
            yield from _interpolations(item, key)
    elif isinstance(plain, dict):
        for name, item in plain.items():
            yield from _interpolations(item, f"{key}.{name}" if key else str(name))


def _misfits(path: Path) -> list[Fault]:
    try:
        content = without_marks(parsed(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    if not isinstance(content, dict):
        return []
    return _read({key: value for key, value in content.items() if key != "defaults"})[1]


def _require_no_choice(choices: Sequence[str], replaced: Sequence[str], directories: Mapping[str, Directory]) -> None:
    """Raise ConfigError if the command line picks a group for a part that comes from a directory."""
    for choice in choices:
        place = choice.partition("=")[0].partition("@")[2]
        if place in replaced:
            key = directories[place.split(".")[1]].key
            raise ConfigError([Fault(key, f"takes the place of {choice.lstrip('+')}: remove one of them")])


def from_dict(plain: dict[str, Any]) -> ConfigContainer:
    """Build a `ConfigContainer` from nested dicts, as `load` composes them and a run's `config.yaml` holds them. User
    encoders that it names are imported, after a notice.

    Raises:
        ConfigError: every unknown key and every value of a wrong type, each by its full key.
    """
    cfg, faults = _read(plain)
    if faults or cfg is None:
        raise ConfigError(faults, cfg)
    return cfg


def _read(plain: dict[str, Any]) -> tuple[ConfigContainer | None, list[Fault]]:
    """Return the config of nested dicts, with defaults for wrong values, or None; and every error."""
    say_imports(plain)
    train = plain.get("train")
    if isinstance(train, Mapping) and train.get("epochs") and "iters" not in train:
        plain = {**plain, "train": {**train, "iters": 0}}  # without its default
    return structured(ConfigContainer, plain, "")


def to_dict(cfg: ConfigContainer) -> dict[str, Any]:
    """Return nested dicts of plain values, in record form: `from_dict` reads them back, once the names of models on the
    hub are folders again."""
    plain = dataclasses.asdict(cfg)
    for module in plain["modules"].values():
        for part in ("encoder", "projector", "llm"):
            if module[part] is None:
                del module[part]
    if plain["train"]["epochs"]:
        plain["train"]["iters"] = 0  # it follows from the data
    return named(plain)


def leaves(plain: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested dicts; an empty dict is a value."""
    if isinstance(plain, Mapping) and plain:
        for name, value in plain.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, plain


def to_yaml(cfg: ConfigContainer) -> str:
    return yaml.safe_dump(to_dict(cfg), sort_keys=False)


def is_config(name: str) -> bool:
    """True if `name` is a YAML file or a shipped config."""
    return Path(name).suffix in SUFFIXES or name in _shipped()


def _shipped() -> dict[str, Path]:
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
    raise ConfigError([Fault("CONFIG", f"no shipped config named {config!r}. {nearest(config, shipped)}")])


def _missing_choice(error: MissingConfigException, path: Path) -> Fault:
    group, _, choice = (error.missing_cfg_file or "").partition("/")
    if not choice or not error.options:
        return Fault(path.name, " ".join(str(error).split()))
    return Fault(group, f"no {group} named {choice!r}. {nearest(choice, error.options)}")


def _sort_overrides(overrides: Sequence[str], files: Contents) -> tuple[list[str], Values, list[Fault]]:
    """Return Hydra's overrides (group choices and those with ~), the others as (key, value), and errors."""
    roots = search_folders(files)
    groups = {folder.name for root in roots for folder in root.iterdir() if folder.is_dir()} - NO_GROUPS
    picked = picked_groups(files)
    choices: list[str] = []
    values: Values = []
    faults: list[Fault] = []
    for override in overrides:
        key, separator, value = override.partition("=")
        name = key.lstrip("+").replace(" ", "")
        group = name.partition("@")[0]
        if key[:1] == "~":
            choices.append(override)
        elif not separator or not re.search(r"[^.\[\]]", name):
            faults.append(Fault(override, "an override reads key=value, for example train.iters=100"))
        elif group in groups:
            options = {file.stem for root in roots for file in (root / group).glob("*.yaml")}
            if message := _choice_error(name, value, options, picked):
                faults.append(Fault(group if message.startswith("no ") else name, message))
                continue
            # A group that the file does not pick from is added to it.
            is_picked = name in picked | {place.partition("@")[0] for place in picked}
            choices.append(override if is_picked or key[:1] == "+" else f"+{override}")
        else:
            try:
                values.append((name, parsed(value) if value else ""))  # empty is the empty text, not YAML's null
            except (yaml.YAMLError, ValueError, RecursionError):
                text = value.encode("utf-8", "backslashreplace").decode()  # it may have undecodable bytes
                faults.append(Fault(name, f"{text} cannot be read as YAML. {_YAML_REMEDY}"))
    return choices, values, faults


_YAML_REMEDY = (
    "Write {key: value, ...} or [value, ...], with quotes around texts such as '*.tar' or 'json[a]', and quotes around "
    "all of it for the shell"
)

_PLACED = ("encoder", "llm", "projector")
"""Groups whose files belong to a part of a module, which the choice must name."""


def _choice_error(name: str, value: str, options: Collection[str], picked: Collection[str]) -> str:
    """Return the error of a group choice; empty if there is none. `name`: the group with its place; `options`: its
    files; `picked`: groups that the files of the run pick from, some with a place."""
    group = name.partition("@")[0]
    if value.strip() in ("", "null") or value.lstrip().startswith("["):
        return f"picks one file of the group {group}, is {value or 'empty'}. Name one, or leave it out"
    if name in _PLACED and name not in picked:
        places = sorted(place for place in picked if place.startswith(f"{name}@")) or [f"{name}@modules.NAME.{name}"]
        return f"requires its place in the config. Write {' or '.join(f'{place}={value}' for place in places)}"
    if value.strip("'\"") not in options and "/" not in value:
        return f"no {group} named {value!r}. {nearest(value, sorted(options))}"
    return ""

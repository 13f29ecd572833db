"""The files of one run, as nested values: its own, those that it extends, and the group files that Hydra picks.

A number keeps its source text, so that a text key gets `1e5` and not 100000.0. So does `???`, which OmegaConf would
drop when it merges files.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from omegaconf import _utils as omegaconf_utils

from mimo_train.config.errors import ConfigError, Fault

SUFFIXES = (".yaml", ".yml")

UNSET = "???"
"""A value that is still to be set."""

_UNSET_MARK = "\0unset\0"
_NUMBER_MARK = re.compile("\0number ([^\0]*)\0")

Contents = Mapping[Path, Mapping[Any, Any]]
"""Content of each file of a run, after the files that it extends; the run's own is the last."""


def shipped_configs() -> Path:
    """Return the folder of the shipped configs: next to the packages in a checkout, inside the package in a wheel."""
    package = Path(__file__).resolve().parents[1]
    return next(folder for folder in (package.parent / "configs", package / "configs") if folder.is_dir())


def read_run_files(path: Path) -> Contents:
    """Read a file and those that it extends.

    Raises:
        ConfigError: a file is missing, cannot be read, extends itself, or sets options of Hydra.
    """
    contents: dict[Path, Mapping[Any, Any]] = {}
    _read_file(path, (), contents)
    return contents


def _read_file(path: Path, extending: tuple[Path, ...], contents: dict[Path, Mapping[Any, Any]]) -> None:
    if path in extending:
        raise ConfigError([Fault("defaults", f"{path} extends itself, through {extending[-1]}. Remove one entry")])
    content = content_of(path)
    if "hydra" in content:  # a search path of Hydra may import a package
        raise ConfigError([Fault(path.name, "a run cannot set keys of Hydra, such as a search path. Remove hydra:")])
    for entry in _defaults_of(content):
        base = _base_path(path, entry)
        if base is not None:
            _read_file(base, (*extending, path), contents)
        elif isinstance(entry, str) and entry != "_self_":
            text = f"{path} extends {entry!r}, but there is no such file in {path.parent} and no such shipped config"
            remedy = "Give the name of a config or the path of a YAML file"
            raise ConfigError([Fault("defaults", f"{text}. {remedy}")])
    contents.setdefault(path, content)


def content_of(path: Path) -> dict[Any, Any]:
    """Return the content of a YAML file; empty if it is not a mapping or not YAML, which composing reports.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_FAST_LOADER)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Fault(path.name, f"cannot be read: {error}")]) from error
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _defaults_of(content: Mapping[Any, Any]) -> list[Any]:
    entries = content.get("defaults")
    return entries if isinstance(entries, list) else []


def _base_path(path: Path, entry: Any) -> Path | None:
    """Return the file that an entry of the defaults of `path` extends; None for other entries. The entry is a path from
    the folder of `path` (`base`, `../team/base.yaml`), an absolute path, or the name of a shipped config."""
    if not isinstance(entry, str) or entry in ("", "_self_"):
        return None
    name = entry if Path(entry).suffix == ".yaml" else f"{entry}.yaml"
    try:
        files = [(folder / name).resolve() for folder in (path.parent, shipped_configs())]
        return next((file for file in files if file.is_file() and file != path), None)
    except (OSError, ValueError):  # invalid file name
        return None


def search_folders(files: Contents) -> list[Path]:
    """Return the folders to search for groups, the nearest first, the shipped ones last."""
    return list(dict.fromkeys([*(file.parent for file in reversed([*files])), shipped_configs()]))


def picked_groups(files: Contents) -> set[str]:
    """Return the groups that the defaults of these files pick from, with places, as `llm@modules.language.llm`."""
    entries = [entry for content in files.values() for entry in _defaults_of(content) if isinstance(entry, dict)]
    keys = [str(key) for entry in entries for key in entry]
    return {key.removeprefix("override ").removeprefix("optional ").replace(" ", "").lstrip("/") for key in keys}


def composed_files(path: Path, choices: tuple[str, ...]) -> DictConfig:
    """Compose a file with those that it extends, and with the group files that they and `choices` pick. Numbers and
    `???` are marked; `without_marks` reads them."""
    files = read_run_files(path)
    folders = ",".join(f"'file://{_quoted(folder)}'" for folder in [*search_folders(files)[1:], Path("/")])
    GlobalHydra.instance().clear()
    with (
        _marking_loader(files),
        initialize_config_dir(version_base="1.3", config_dir=str(path.parent), job_name="mimo_train"),
    ):
        return hydra_compose(path.stem, overrides=[*choices, f"hydra.searchpath=[{folders}]"])


def _quoted(folder: Path) -> str:
    return str(folder).replace("'", "\\'")


def parsed(text: str) -> Any:
    """Return the value of an override, with numbers marked."""
    return yaml.load(text, Loader=_loader({}))


def _loader(files: Contents) -> Any:
    """Return OmegaConf's YAML loader with marks; in `files`, `defaults` name extended files by their full paths."""

    class Loader(omegaconf_utils.get_yaml_loader()):  # type: ignore[misc]
        def construct_document(self, node: yaml.Node) -> Any:
            content, path = super().construct_document(node), Path(self.name)
            if path in files and isinstance(content, dict) and isinstance(content.get("defaults"), list):
                content["defaults"] = [_full_entry(path, entry) for entry in content["defaults"]]
            return content

    Loader.add_constructor("tag:yaml.org,2002:int", _marked_number)
    Loader.add_constructor("tag:yaml.org,2002:float", _marked_number)
    Loader.add_constructor("tag:yaml.org,2002:str", _marked_text)
    return Loader


def _full_entry(path: Path, entry: Any) -> Any:
    """Return an entry of `defaults` that Hydra finds from any file: Hydra's search path ends with the root."""
    if isinstance(entry, dict):
        return {_from_root(str(key)): _text_of_marks(choice) for key, choice in entry.items()}
    base = _base_path(path, _text_of_marks(entry))
    return entry if base is None else f"{base.with_suffix('')}@_global_"


def _from_root(key: str) -> str:
    """Return the absolute name of a group; a relative one is below the folder of the file."""
    words = key.split(" ")
    return " ".join([*words[:-1], f"/{words[-1].lstrip('/')}"])


@contextmanager
def _marking_loader(files: Contents) -> Iterator[None]:
    """Make OmegaConf read files with `_loader`; neither it nor Hydra has a setting for that."""
    original, loader = omegaconf_utils.get_yaml_loader, _loader(files)
    omegaconf_utils.get_yaml_loader = lambda: loader
    try:
        yield
    finally:
        omegaconf_utils.get_yaml_loader = original


class _WrittenNumber:
    """A number that prints as it was written."""

    written: str

    def __repr__(self) -> str:
        return self.written


class WrittenInt(_WrittenNumber, int):
    """A whole number that prints as it was written."""


class WrittenFloat(_WrittenNumber, float):
    """A fractional number that prints as it was written."""


def _marked_number(loader: Any, node: yaml.Node) -> int | float | str:
    """Read a number as a marked text if it would print differently: OmegaConf's containers reject our classes."""
    text = str(loader.construct_scalar(node))
    if ":" in text:  # YAML 1.1 reads 12:30 as 750, a number of base 60
        return text
    number = _number_of(text)
    return number if str(number) == text else f"\0number {text}\0"


def _marked_text(loader: Any, node: yaml.Node) -> str:
    text = str(loader.construct_scalar(node))
    return _UNSET_MARK if text == UNSET else text


def _number_of(text: str) -> int | float:
    """Return the number of a text that YAML resolves to one; 0012 is 12, not base 8 as in YAML 1.1."""
    digits = text.replace("_", "").lower()
    if re.fullmatch(r"[-+]?\d+", digits):
        return int(digits)
    if re.match(r"[-+]?0[xb]", digits):
        return int(digits, 0)
    return float(digits.replace(".inf", "inf").replace(".nan", "nan"))


def without_marks(value: Any) -> Any:
    """Return nested dicts and lists with `WrittenInt`, `WrittenFloat` and `???` instead of marked texts."""
    if isinstance(value, dict):
        return {_text_of_marks(key): without_marks(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_marks(item) for item in value]
    mark = _NUMBER_MARK.fullmatch(value) if isinstance(value, str) else None
    if mark is None:
        return _text_of_marks(value)
    number = _number_of(mark[1])
    written = (WrittenInt if isinstance(number, int) else WrittenFloat)(number)
    written.written = mark[1]
    return written


def _text_of_marks(value: Any) -> Any:
    return _NUMBER_MARK.sub(r"\1", value).replace(_UNSET_MARK, UNSET) if isinstance(value, str) else value

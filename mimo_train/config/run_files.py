"""Files that one run is composed of by Hydra: its own, and those that it extends by `defaults`, wherever they are."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf import _utils as omegaconf_utils

from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.yaml_numbers import add_number_marks, marks_as_text

SUFFIXES = (".yaml", ".yml")


def shipped_configs() -> Path:
    """Folder of the shipped configs: next to the packages in a checkout, inside the package in a wheel."""
    package = Path(__file__).resolve().parents[1]
    return next(folder for folder in (package.parent / "configs", package / "configs") if folder.is_dir())


def content_of(path: Path) -> dict[Any, Any]:
    """The content of a YAML file; empty if it is no mapping or cannot be read, which composing reports."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def defaults_of(content: dict[Any, Any]) -> list[Any]:
    """The defaults list of a file."""
    entries = content.get("defaults")
    return entries if isinstance(entries, list) else []


def base_path(path: Path, entry: Any) -> Path | None:
    """The file that an entry of the defaults of `path` extends: `base`, `../team/base.yaml` or an absolute path, from
    the folder of `path`, or the name of a shipped config; None for every other entry."""
    if not isinstance(entry, str) or entry == "_self_" or not entry or len(entry) > 1000 or "\0" in entry:
        return None
    name = entry if Path(entry).suffix == ".yaml" else f"{entry}.yaml"
    files = [(folder / name).resolve() for folder in (path.parent, shipped_configs())]
    return next((file for file in files if file.is_file() and file != path), None)


def run_files(path: Path) -> list[Path]:
    """The files of a run, each behind those that it extends; `path` is the last.

    Raises:
        ConfigError: a file extends itself, or one that is not there.
    """
    return list(dict.fromkeys(_in_order(path, ())))


def _in_order(path: Path, extending: tuple[Path, ...]) -> Iterator[Path]:
    if path in extending:
        raise ConfigError([Fault("defaults", f"{path} extends itself, through {extending[-1]}. Remove one entry")])
    for entry in defaults_of(content_of(path)):
        base = base_path(path, entry)
        if base is not None:
            yield from _in_order(base, (*extending, path))
        elif isinstance(entry, str) and entry != "_self_":
            raise ConfigError(
                [
                    Fault(
                        "defaults",
                        f"{path} extends {entry!r}, and there is no such file in {path.parent} and no such shipped "
                        "config. Give the name of a config or the path of a YAML file",
                    )
                ]
            )
    yield path


def search_folders(files: Sequence[Path]) -> list[Path]:
    """Folders in which groups are looked for, the nearest first, that of the shipped ones last."""
    return list(dict.fromkeys([*(file.parent for file in reversed(files)), shipped_configs()]))


def picked_groups(files: Sequence[Path]) -> set[str]:
    """Groups that the defaults of these files pick from, with their places, as `llm@modules.language.llm`."""
    keys = [
        str(key)
        for file in files
        for entry in defaults_of(content_of(file))
        if isinstance(entry, dict)
        for key in entry
    ]
    return {key.removeprefix("override ").removeprefix("optional ").replace(" ", "").lstrip("/") for key in keys}


def composed_files(path: Path, choices: tuple[str, ...]) -> DictConfig:
    """Compose a file with those that it extends, and with the group files that they and `choices` pick. Numbers are
    marked (`yaml_numbers`)."""
    files = run_files(path)
    folders = ",".join(f"'file://{_quoted(folder)}'" for folder in [*search_folders(files)[1:], Path("/")])
    GlobalHydra.instance().clear()
    with (
        _run_loader(files),
        initialize_config_dir(version_base="1.3", config_dir=str(path.parent), job_name="mimo_train"),
    ):
        composed = hydra_compose(path.stem, overrides=[*choices, f"hydra.searchpath=[{folders}]"])
    OmegaConf.set_struct(composed, False)
    return composed


def _quoted(folder: Path) -> str:
    return str(folder).replace("'", "\\'")


def parsed(text: str) -> Any:
    """The value of an override, with numbers marked."""
    return yaml.load(text, Loader=_loader(()))


def _loader(files: Sequence[Path]) -> Any:
    """OmegaConf's YAML loader with numbers marked; in `files`, `defaults` name what is extended by its whole path."""

    class Loader(omegaconf_utils.get_yaml_loader()):  # type: ignore[misc]
        def construct_document(self, node: yaml.Node) -> Any:
            content, path = super().construct_document(node), Path(self.name)
            if path in files and isinstance(content, dict) and isinstance(content.get("defaults"), list):
                content["defaults"] = [_whole(path, entry) for entry in content["defaults"]]
            return content

    add_number_marks(Loader)
    return Loader


def _whole(path: Path, entry: Any) -> Any:
    """An entry of `defaults` as Hydra finds it from any file: Hydra's search path ends with the root."""
    if isinstance(entry, dict):
        return {_from_root(str(key)): marks_as_text(choice) for key, choice in entry.items()}
    base = base_path(path, marks_as_text(entry))
    return entry if base is None else f"{base.with_suffix('')}@_global_"


def _from_root(key: str) -> str:
    """The name of a group, which else is one below the folder of the file."""
    words = key.split(" ")
    return " ".join([*words[:-1], f"/{words[-1].lstrip('/')}"])


@contextmanager
def _run_loader(files: Sequence[Path]) -> Iterator[None]:
    """Let OmegaConf read files by `_loader`: neither it nor Hydra has a setting for that."""
    original, loader = omegaconf_utils.get_yaml_loader, _loader(files)
    omegaconf_utils.get_yaml_loader = lambda: loader
    try:
        yield
    finally:
        omegaconf_utils.get_yaml_loader = original

"""Packages that their registry has as a source distribution only: got without running any of their code, and built here
where nothing in them is compiled. Standard library only."""

import shutil
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

COMPILED = {".c", ".cc", ".cpp", ".cxx", ".cu", ".f", ".f90", ".go", ".pyx", ".rs"}
BACKENDS = ("setuptools.build_meta", "hatchling.build", "flit_core.buildapi", "poetry.core.masonry.api", "mesonpy")
STAND_IN = """
import os, sys
from email.parser import HeaderParser

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    with open("PKG-INFO") as file:
        text = file.read()
    fields = HeaderParser().parsestr(text)
    name = "%s-%s.dist-info" % (fields["Name"].replace("-", "_"), fields["Version"])
    os.mkdir(os.path.join(metadata_directory, name))
    with open(os.path.join(metadata_directory, name, "METADATA"), "w") as file:
        file.write(text)
    return name

__legacy__ = sys.modules[__name__]
"""
"""In the place of a build backend, it answers what pip asks before it saves a source distribution. The real one would
first install what the package is built with, a torch for instance."""


@dataclass(frozen=True)
class Source:
    """A source distribution.

    Attributes:
        compiled: whether it has sources of a compiled language.
        build: what it is built with.
    """

    path: Path
    name: str
    version: str
    metadata: str
    compiled: bool
    build: tuple[str, ...]


def write_stand_in(folder: Path) -> None:
    """Writes the stand-in for build backends, to be put on PYTHONPATH."""
    for backend in BACKENDS:
        *packages, module = backend.split(".")
        inside = folder.joinpath(*packages)
        inside.mkdir(parents=True, exist_ok=True)
        (inside / f"{module}.py").write_text(STAND_IN)


def read(path: Path) -> Source:
    """
    Raises:
        ValueError: the archive is no source distribution.
    """
    files: dict[str, str] = {}
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for name in filter(_wanted, names):
                files[name.partition("/")[2]] = archive.read(name).decode()
    else:
        with tarfile.open(path) as archive:
            names = archive.getnames()
            for name in filter(_wanted, names):
                files[name.partition("/")[2]] = archive.extractfile(name).read().decode()
    if "PKG-INFO" not in files:
        raise ValueError(f"{path.name} is no source distribution: it has no PKG-INFO")
    fields = HeaderParser().parsestr(files["PKG-INFO"])
    build = tomllib.loads(files.get("pyproject.toml", "")).get("build-system", {}).get("requires", [])
    return Source(
        path=path,
        name=fields["Name"],
        version=fields["Version"],
        metadata=_with_requirements(files),
        compiled=any(Path(name).suffix in COMPILED for name in names),
        # Backends of today bring wheel along, but a setup.py may import it without saying so.
        build=tuple(dict.fromkeys([*build, "setuptools", "wheel"])),
    )


def _wanted(name: str) -> bool:
    parts = name.split("/")
    return (
        parts[1:] in (["PKG-INFO"], ["pyproject.toml"]) or parts[-2:-1] != [] and name.endswith("egg-info/requires.txt")
    )


def _with_requirements(files: dict[str, str]) -> str:
    """PKG-INFO, and in it what the package requires, which setuptools long kept in its own file."""
    text = files["PKG-INFO"]
    requires = next((content for name, content in files.items() if name.endswith("requires.txt")), "")
    if "\nRequires-Dist:" in text or not requires:
        return text
    lines, marker = [], ""
    for line in filter(None, map(str.strip, requires.splitlines())):
        if line.startswith("["):
            extra, _, condition = line.strip("[]").partition(":")
            marker = None if extra else f" ; {condition}"
        elif marker is not None:
            lines.append(f"Requires-Dist: {line}{marker}")
    head, _, rest = text.partition("\n\n")
    return "\n".join([head, *lines]) + "\n\n" + rest


def write_metadata_wheel(source: Source, folder: Path) -> None:
    """A wheel with nothing but metadata, by which pip finds out what `source` requires."""
    stem = f"{source.name.replace('-', '_')}-{source.version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", source.metadata)
        wheel.writestr(
            f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: mimo\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def copy(source: Source, folder: Path) -> Path:
    """The source distribution, in `folder`."""
    return Path(shutil.copy2(source.path, folder))

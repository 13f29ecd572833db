"""A registry in a folder: packages of a few bytes, a project that needs them, and a build backend of a few lines."""

import io
import tarfile
import zipfile
from pathlib import Path

BACKEND = '''
"""Makes a wheel of every .py file beside pyproject.toml, or of a path file."""
import email.parser, os, tomllib, zipfile

def _wheel(folder, editable):
    if os.path.exists("native.c"):  # wants a header that a wheel of CUDA brings
        assert any(os.path.exists(f"{place}/cublas.h") for place in os.environ["CPATH"].split(":")), "no header"
    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    requires = [f"Requires-Dist: {line}" for line in project.get("dependencies", [])]
    for extra, lines in project.get("optional-dependencies", {}).items():
        requires += [f"Provides-Extra: {extra}", *(f"Requires-Dist: {line}; extra == '{extra}'" for line in lines)]
    name, version = project["name"], project["version"]
    metadata = "\\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *requires])
    name = f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        if editable:
            wheel.writestr("project.pth", os.getcwd())
        else:
            for file in os.listdir("."):
                if file.endswith(".py"):
                    wheel.write(file)
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata + "\\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return name

def build_wheel(folder, config_settings=None, metadata_directory=None):
    return _wheel(folder, False)

def build_editable(folder, config_settings=None, metadata_directory=None):
    return _wheel(folder, True)
'''
"""flit_core.buildapi of the folder; the name is one that pip is answered for without it."""

PROJECT = """
[build-system]
requires = ["flit_core==1.0"]
build-backend = "flit_core.buildapi"

[project]
name = "mimo-train"
version = "0.1.0"
requires-python = ">=3.12"
dependencies = ["torch==2.0", "megatron-core==1.0", "alpha==1.0", "pure"]

[project.optional-dependencies]
demo = ["native"]
dev = ["big"]
track = ["beta"]
"""


def wheel(folder: Path, name: str, version: str, *requires: str, files: dict[str, str | bytes] | None = None) -> Path:
    """Writes a wheel of `files`, by default one module of that name with its version."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, content in (files or {f"{name}.py": f"version = {version!r}\n"}).items():
            archive.writestr(path, content)
        archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata) + "\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
        return Path(archive.filename)


def sources(folder: Path, name: str, version: str, requires: str, build: str, *extra: str) -> Path:
    """Writes a source distribution that `flit_core` builds, with further empty files."""
    project = f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = ["{requires}"]\n'
    system = f'[build-system]\nrequires = ["flit_core", "{build}"]\nbuild-backend = "flit_core.buildapi"\n'
    info = f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\nRequires-Dist: {requires}\n"
    files = {"pyproject.toml": system + project, "PKG-INFO": info, f"{name}.py": f"version = {version!r}\n"}
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, content in (files | dict.fromkeys(extra, "")).items():
            member = tarfile.TarInfo(f"{name}-{version}/{file}")
            member.size, member.mtime = len(content.encode()), 2**30
            archive.addfile(member, io.BytesIO(content.encode()))
    return path


def registry(folder: Path) -> Path:
    """Fills a folder with what `PROJECT` needs, and more."""
    folder.mkdir()
    wheel(folder, "flit_core", "1.0", files={"flit_core/__init__.py": "", "flit_core/buildapi.py": BACKEND})
    wheel(folder, "nvidia-cublas", "1.0", files={"nvidia/cu13/include/cublas.h": ""})
    wheel(folder, "torch", "2.0", "nvidia-cublas", files={"torch/__init__.py": "", "torch/distributed/run.py": ""})
    wheel(folder, "megatron-core", "1.0", files={"megatron/core/models/mimo.py": ""})
    wheel(folder, "alpha", "1.0", "beta", "gamma; sys_platform == 'win32'", "delta; platform_machine == 'aarch64'")
    for name, version in (("beta", "1.0"), ("beta", "2.0"), ("delta", "1.0"), ("tool", "1.0")):
        wheel(folder, name, version)
    for name in ("setuptools", "wheel", "pip"):
        wheel(folder, name, "99.0", files={f"of_{name}.py": ""})
    wheel(folder, "big", "1.0", files={"big.py": "version = '1.0'\n", "big.bin": bytes(range(256)) * 1000})
    sources(folder, "pure", "1.0", "beta>=1", "tool")
    sources(folder, "native", "1.0", "alpha", "torch", "native.c")
    return folder

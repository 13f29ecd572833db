"""Collects every wheel that a run needs, for a machine without a network. Run through scripts/wheels.sh.

There, MIMO_WHEELS=DIR makes every script install from DIR alone. MIMO_EXTRAS chooses extras of pyproject.toml, as for
the scripts. With --have, packages of the list are left out, which that machine must then have: its own
`python3 -m pip list --format=freeze`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pieces
import sources

ROOT = Path(__file__).resolve().parents[2]
PIP = "26.3"
"""It chooses packages without downloading them. Where it cannot be had, Python's own may download them twice."""
AS_THERE = """
import json, sys
from pip._internal.cli import cmdoptions
from pip._vendor.packaging import markers
cmdoptions.check_dist_restriction = lambda *_, **__: None
there, here = json.loads(sys.argv.pop(1)), markers.default_environment
markers.default_environment = lambda: here() | there
from pip._internal.cli.main import main
sys.exit(main())
"""
"""pip, which would judge `sys_platform == ...` by the machine it runs on, and which, before 24.1, refuses to choose for
another machine without installing."""
NO_WHEEL = re.compile(r"^ERROR: No matching distribution found for ([^\s(]+)", re.MULTILINE)
SATISFIED = re.compile(r"^Requirement already satisfied: ([A-Za-z0-9._-]+)", re.MULTILINE)


class Failed(Exception):
    """Wheels cannot be collected; the message says why."""


def main() -> int:
    """Collect what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/wheels.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the files go; made if it is not there")
    parser.add_argument("--have", metavar="LIST", help="a file of lines name==version, or - for the standard input")
    parser.add_argument("--pieces", metavar="MB", type=float, help="cut larger files into pieces of at most so many MB")
    parser.add_argument("--python", default="3.12", metavar="3.X", help="version of Python there (default: 3.12)")
    parser.add_argument(
        "--platform",
        default="manylinux_2_28_x86_64",
        help="of wheels there: manylinux_2_N_x86_64 or ..._aarch64, N of its glibc 2.N (default: %(default)s)",
    )
    options = parser.parse_args()
    if not re.fullmatch(r"3\.1[2-9]", options.python):
        parser.error(f"--python is {options.python!r}: give 3.12 or later")
    if not re.fullmatch(r"manylinux_2_\d+_(x86_64|aarch64)", options.platform):
        parser.error(f"--platform is {options.platform!r}: give manylinux_2_N_x86_64 or manylinux_2_N_aarch64")
    if options.pieces is not None and options.pieces * 10**6 < 1:
        parser.error(f"--pieces is {options.pieces:g}: give the MB of a piece, such as 50")
    extras = [extra for extra in os.environ.get("MIMO_EXTRAS", "demo,dev").split(",") if extra]
    try:
        have = read_list(options.have)
        with tempfile.TemporaryDirectory(prefix="mimo-wheels-") as scratch:
            collector = Collector(Path(scratch), options.python, options.platform, have)
            collector.resolve(requirements(extras))
            manifest = collector.download(options.folder)
    except (Failed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finish(options.folder, manifest | {"extras": ",".join(extras)}, options.pieces)
    return 0


def requirements(extras: Sequence[str]) -> list[str]:
    """What a run and the installation of this checkout need.

    Raises:
        Failed: an extra is unknown.
    """
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())
    known = text["project"].get("optional-dependencies", {})
    unknown = [extra for extra in extras if extra not in known]
    if unknown:
        raise Failed(f"MIMO_EXTRAS names {', '.join(unknown)}: pyproject.toml has {', '.join(known)}")
    chosen = [line for extra in extras for line in known[extra]]
    return ["pip", *text["build-system"]["requires"], *text["project"].get("dependencies", []), *chosen]


def normal(name: str) -> str:
    """The name of a package as all its spellings share it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def what(wheel: str) -> tuple[str, str]:
    """(package, version) of a wheel, by its file's name."""
    name, version, *_ = wheel.split("-")
    return normal(name), version


def read_list(name: str | None) -> dict[str, str]:
    """Package -> version of a list as pip prints it.

    Raises:
        Failed: it is none.
    """
    if name is None:
        return {}
    text = sys.stdin.read() if name == "-" else Path(name).read_text()
    found, unclear = {}, []
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        package, _, version = line.partition("==")
        # A package that was installed from a file: the file's name has the version.
        file = re.match(r"([A-Za-z0-9._-]+) @ .*/[^/]+?-(\d[^-/]*)(?:-[^/]*\.whl|\.tar\.gz)$", line)
        if re.fullmatch(r"[A-Za-z0-9._-]+", package) and re.fullmatch(r"[^\s;]+", version):
            found[normal(package)] = version
        elif file:
            found[normal(file[1])] = file[2]
        else:
            unclear.append(line)
    if not found:
        raise Failed(f"--have {name}: no line is name==version, as `python3 -m pip list --format=freeze` prints them")
    for line in unclear:
        print(f"--have: without a version, so it does not count: {line}", file=sys.stderr)
    return found


class Collector:
    """Finds and downloads the packages for a machine.

    Args:
        scratch: an empty folder.
        have: package -> version, of those that are there already.
    """

    def __init__(self, scratch: Path, python: str, platform: str, have: dict[str, str]):
        self._scratch, self._have, self._python_version, self._platform = scratch, have, python, platform
        self._built, self._stand_in = scratch / "built", scratch / "stand_in"
        self._built.mkdir()
        sources.write_stand_in(self._stand_in)
        self._sources: dict[str, sources.Source] = {}
        self._chosen: dict[str, str] = {}
        self._expected: dict[str, str] = {}
        glibc, machine = re.fullmatch(r"manylinux_2_(\d+)_(.+)", platform).groups()
        older = [f"manylinux_2_{minor}_{machine}" for minor in range(int(glibc), 4, -1)]
        tags = [*older, *(f"manylinux{name}_{machine}" for name in ("2014", "2010", "1")), f"linux_{machine}"]
        self._target = ["--python-version", python, "--implementation", "cp", "--only-binary", ":all:"]
        self._target += [option for tag in tags for option in ("--platform", tag)]
        self._markers = {
            "python_version": python,
            "python_full_version": f"{python}.0",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": machine,
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }
        venv.create(scratch / "venv", with_pip=True)
        self._python = scratch / "venv/bin/python"
        self._pip("install", "--quiet", f"pip=={PIP}")
        for name, version in have.items():
            if name != "pip":
                self._pretend(name, version)

    def _pretend(self, name: str, version: str) -> None:
        """Lets pip believe that a package is installed."""
        (site,) = (self._scratch / "venv/lib").glob("python3*/site-packages")
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def _pip(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess:
        command = [self._python, "-P", "-c", AS_THERE, json.dumps(self._markers), "--disable-pip-version-check"]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
        return subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, check=False)

    def resolve(self, wanted: Sequence[str]) -> None:
        """Choose a version of every package that is needed and not there.

        Raises:
            Failed: there is no choice that suits all.
        """
        wanted = [one for one in wanted if not (one == "pip" and "pip" in self._have)]
        report = self._scratch / "report.json"
        while True:
            build = [line for source in self._sources.values() if source.compiled for line in source.build]
            found = self._pip(
                "install", "--dry-run", "--report", report, "--find-links", self._built, *self._target, *wanted, *build
            )
            if found.returncode == 0:
                break
            missing = NO_WHEEL.search(found.stderr)
            if missing is None or not self._take_source(missing[1]):
                raise Failed(f"pip cannot choose the packages:\n{found.stderr.strip()}")
        for one in json.loads(report.read_text())["install"]:
            self._chosen[normal(one["metadata"]["name"])] = one["metadata"]["version"]
        for name in map(normal, SATISFIED.findall(found.stdout)):
            if name in self._have and name not in {"pip", *self._chosen}:
                self._expected[name] = self._have[name]

    def _take_source(self, requirement: str) -> bool:
        """Get a package that has no wheel as its sources; whether there was one, and it is new."""
        name = re.match(r"[A-Za-z0-9._-]+", requirement)[0]
        if normal(name) in self._sources:
            return False
        folder = self._scratch / "sources" / normal(name)
        folder.mkdir(parents=True)
        options = ("--no-deps", "--no-build-isolation", "--no-binary", name, "--dest", folder)
        self._pip("download", *options, requirement, PYTHONPATH=str(self._stand_in), PIP_USE_PEP517="1")
        archives = list(folder.iterdir())
        if not archives:
            return False
        source = sources.read(archives[0])
        if not source.compiled:
            self._pip("wheel", "--no-deps", "--wheel-dir", self._built, source.path)
        built = [one.name for one in self._built.iterdir() if what(one.name) == (normal(source.name), source.version)]
        if not any(one.endswith("-none-any.whl") for one in built):
            sources.write_metadata_wheel(source, self._built)
            source = replace(source, compiled=True)
        self._sources[normal(name)] = source
        return True

    def download(self, folder: Path) -> dict:
        """Put every file into `folder`, and remove those of an earlier collection that are no longer needed.

        Returns:
            The manifest, without its files' checksums: `names`, `expected`, `build`, `sources`, ...

        Raises:
            Failed: a file could not be downloaded.
        """
        folder.mkdir(parents=True, exist_ok=True)
        before = pieces.read_manifest(folder)["files"]
        if not pieces.faults(folder):
            pieces.join(folder, folder)  # what is there need not be downloaded again
        exact = [f"{name}=={version}" for name, version in self._chosen.items() if not self._is_compiled(name)]
        print(f"{len(self._chosen)} packages; downloading into {folder}", file=sys.stderr)
        if exact:
            names = self._scratch / "exact.txt"
            names.write_text("\n".join(exact))
            found = self._pip(
                "download", "--no-deps", "--find-links", self._built, *self._target, "--dest", folder, "-r", names
            )
            if found.returncode:
                raise Failed(f"pip cannot download the packages:\n{found.stderr.strip()}")
        for name in self._chosen:
            if self._is_compiled(name):
                sources.copy(self._sources[name], folder)
        now = [file.name for file in folder.glob("*.whl") if what(file.name) in self._chosen.items()]
        now += [self._sources[name].path.name for name in self._chosen if self._is_compiled(name)]
        assert len(now) == len(self._chosen), (now, self._chosen)
        for old in before:
            for part in [old, *old.get("pieces", [])]:
                if part["name"] not in now:
                    (folder / part["name"]).unlink(missing_ok=True)
        compiled = [source for name, source in self._sources.items() if name in self._chosen and source.compiled]
        return {
            "python": self._python_version,
            "platform": self._platform,
            "expected": self._expected,
            "sources": [f"{source.name}=={source.version}" for source in compiled],
            "build": sorted({line for source in compiled for line in source.build}),
            "names": sorted(now),
        }

    def _is_compiled(self, name: str) -> bool:
        return name in self._sources and self._sources[name].compiled


def finish(folder: Path, manifest: dict, megabytes: float | None) -> None:
    """Cut what is too large, write the manifest, say what there is."""
    manifest["files"] = []
    for name in manifest.pop("names"):
        path = folder / name
        file = pieces.describe(path)
        if megabytes is not None and file["size"] > megabytes * 10**6:
            file["pieces"] = pieces.split(path, int(megabytes * 10**6))
        manifest["files"].append(file)
    (folder / pieces.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    size = sum(file["size"] for file in manifest["files"]) / 10**6
    cut = [file for file in manifest["files"] if "pieces" in file]
    machine = f"Python {manifest['python']}, {manifest['platform']}"
    print(f"{folder}: {len(manifest['files'])} files, {size:,.1f} MB, for {machine}")
    for file in cut:
        print(f"  in {len(file['pieces'])} pieces: {file['name']} ({file['size'] / 10**6:,.1f} MB)")
    if manifest["expected"]:
        listed = ", ".join(f"{name} {version}" for name, version in sorted(manifest["expected"].items()))
        print(f"  left out, the machine has them: {listed}")
    for source in manifest["sources"]:
        print(f"  no wheel exists of {source}: its sources are there, and will be built where it is installed, with")
        print(
            f"    a compiler and what else they need; {', '.join(manifest['build'])} are in the folder or there already"
        )
    print(f"copy {folder} and this checkout to the machine, and start any script there with MIMO_WHEELS={folder}")


if __name__ == "__main__":
    sys.exit(main())

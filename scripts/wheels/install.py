"""Installs this checkout from a folder of wheels, with no index and no network. Run by scripts/env.sh.

install.py suits DIR               whether this interpreter can make the environment; if not, says why
install.py see PYTHON DIR          lets the environment of PYTHON see this interpreter's packages, if DIR counts on them
install.py install DIR EXTRAS      into this interpreter's environment; exit code 3 where its sentences say all
"""

import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CUDA = Path("/usr/local/cuda")
"""Where a toolkit is, unless CUDA_HOME says otherwise."""


def suits(folder: Path) -> str:
    """Why this interpreter cannot make an environment for these wheels; "" if it can."""
    import pieces

    found = pieces.read_manifest(folder)
    here, wanted = "{}.{}".format(*sys.version_info), found.get("python")
    if (wanted or here) != here or sys.version_info < (3, 12):
        return f"it is Python {here}, and not {wanted or '3.12 or later'}"
    if find_spec("venv") is None:
        return "it has no module venv"
    missing = [name for name in sorted(found["expected"]) if _version(name) is None]
    return f"it lacks {', '.join(missing)}, which the wheels leave out (scripts/wheels.sh --have)" if missing else ""


def see(python: str, folder: Path) -> None:
    """Put this interpreter's folders of packages behind those of the environment of `python`."""
    import pieces

    if not pieces.read_manifest(folder)["expected"]:
        return
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in folders]
    (Path(site) / "packages_of_the_machine.pth").write_text("".join(lines))


def install(folder: Path, extras: str) -> int:
    """Returns the exit code: 3 where the folder is not what it should be, and every fault has been named."""
    import tomllib

    import pieces

    found = pieces.read_manifest(folder)
    faults = [f"MIMO_WHEELS: {fault}: copy it to {folder} again" for fault in pieces.faults(folder)]
    without = [name for name in extras.split(",") if name not in found.get("extras", extras).split(",")]
    if without:
        faults.append(
            f"MIMO_WHEELS: the wheels in {folder} are for the extras {found['extras']}, not for {','.join(without)}: "
            f"collect them again with MIMO_EXTRAS={extras}, or start with MIMO_EXTRAS={found['extras']}"
        )
    joined = Path(sysconfig.get_path("data")) / "joined-wheels"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull
    # Transformer Engine would first look for itself on the network.
    environment["NVTE_PYTORCH_FORCE_BUILD"] = "TRUE"
    if CUDA.is_dir():  # an nvcc on PATH may be a program that calls the one in there, and its folder no toolkit
        environment.setdefault("CUDA_HOME", str(CUDA))
    pip = next(folder.glob("pip-*.whl"), None)
    if find_spec("pip") is None and pip is None and find_spec("ensurepip") is None:
        faults.append(f"MIMO_WHEELS: this Python has no pip, and there is no pip-*.whl in {folder}: put one there")
    for fault in faults:
        print(f"mimo-train: {fault}", file=sys.stderr)
    if faults:
        return 3
    if find_spec("pip") is None and pip is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(pip), os.environ.get("PYTHONPATH", "")]))
    elif find_spec("pip") is None:
        subprocess.run([sys.executable, "-P", "-m", "ensurepip"], check=True, capture_output=True)
    try:
        command = [sys.executable, "-P", "-m", "pip", "--isolated", "--disable-pip-version-check", "install"]
        command += ["--no-index", "--no-build-isolation", "--find-links", str(folder)]
        command += ["--find-links", str(joined)] if pieces.join(folder, joined) else []
        command += [] if sys.stderr.isatty() else ["--quiet"]
        build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
        for what in ([*build, *found["build"]], ["-e", f"{ROOT}[{extras}]"]):
            if headers := [*filter(None, [os.environ.get("CPATH")]), *_headers()]:
                environment["CPATH"] = os.pathsep.join(headers)
            done = subprocess.run([*command, *what], env=environment, check=False)
            if done.returncode:
                _say_differences(found["expected"])
                return 1
    finally:
        for path in joined.glob("*"):
            path.unlink()
        if joined.exists():
            joined.rmdir()
    return 0


def _headers() -> list[str]:
    """Folders of headers in wheels of CUDA, for what is compiled: a toolkit may lack those of its libraries."""
    return [str(path) for folder in sys.path for path in sorted(Path(folder).glob("nvidia/*/include"))]


def _say_differences(expected: dict[str, str]) -> None:
    """Packages that the machine has in another version than the list said that the wheels were chosen by."""
    others = {
        name: _version(name) for name, listed in expected.items() if _version(name) != re.sub(r"\+.*", "", listed)
    }
    if others:
        listed = ", ".join(f"{name} {there} (not {expected[name]})" for name, there in others.items())
        print(f"mimo-train: other versions are here than the list of --have said: {listed}", file=sys.stderr)


def _version(name: str) -> str | None:
    try:
        return re.sub(r"\+.*", "", version(name))
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "suits":
        reason = suits(Path(arguments[0]))
        print(reason)
        sys.exit(bool(reason))
    if command == "see":
        see(arguments[0], Path(arguments[1]))
    else:
        sys.exit(install(Path(arguments[0]), arguments[1]))

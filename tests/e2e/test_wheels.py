"""scripts/wheels.sh and MIMO_WHEELS: an environment without a network."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.e2e.fake_python import REPOSITORY, TOOLS
from tests.e2e.tiny_packages import PROJECT, registry, wheel
from tests.hang import HANG_SECONDS

BASE = str(Path(sys.base_prefix, "bin", f"python{sysconfig.get_python_version()}"))
NO_NETWORK = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple"}


class Machine:
    """A checkout of a project in a folder, with one Python on PATH and nothing of this machine's settings of pip.

    Args:
        python: the interpreter; default: one without packages.
    """

    def __init__(self, folder: Path, project: str = PROJECT, python: str = BASE):
        self.root, self.bin = folder / "checkout", folder / "bin"
        self.bin.mkdir(parents=True)
        shutil.copytree(REPOSITORY / "scripts", self.root / "scripts")
        (self.root / "pyproject.toml").write_text(project)
        for tool in (*TOOLS, "flock"):
            (self.bin / tool).symlink_to(shutil.which(tool))
        (self.bin / "python3.12").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
        (self.bin / "python3.12").chmod(0o755)
        self.env = {"PATH": str(self.bin), "HOME": str(folder), "PIP_CONFIG_FILE": os.devnull}

    def run(self, command: str, **variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [shutil.which("bash"), "-c", command],
            cwd=self.root, env=self.env | variables, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    return registry(tmp_path_factory.mktemp("index") / "packages")


@pytest.fixture(scope="module")
def collected(index, tmp_path_factory) -> tuple[Machine, Path, str]:
    """A machine with a registry, what it has collected, with the larger file in pieces, and what it said."""
    machine = Machine(tmp_path_factory.mktemp("there"))
    folder = machine.root.parent / "wheels"
    result = collect(machine, index, f"{folder} --pieces 0.1")
    assert result.returncode == 0, result.stderr
    return machine, folder, result.stdout


def collect(machine: Machine, index: Path, arguments: str, **variables: str) -> subprocess.CompletedProcess:
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)} | variables
    return machine.run(f"scripts/wheels.sh {arguments}", **env)


def names(folder: Path) -> set[str]:
    return {path.name.split("-")[0] for path in folder.iterdir()} - {"wheels.json"}


def test_every_wheel_is_there_and_sources_where_there_is_none(collected):
    _, folder, said = collected
    files = {path.name for path in folder.iterdir()}
    assert {"alpha-1.0-py3-none-any.whl", "beta-2.0-py3-none-any.whl", "flit_core-1.0-py3-none-any.whl"} <= files
    assert "pure-1.0-py3-none-any.whl" in files, "built here: nothing in it is compiled"
    assert "native-1.0.tar.gz" in files and "native-1.0-py3-none-any.whl" not in files
    assert "setuptools-99.0-py3-none-any.whl" in files, "native may be built with it"
    assert not {"gamma", "delta"} & names(folder), "of other machines"
    assert [f"big-1.0-py3-none-any.whl.{n:03d}-of-003" in files for n in (1, 2, 3)] == [True] * 3
    assert "big-1.0-py3-none-any.whl" not in files
    assert max(path.stat().st_size for path in folder.glob("big*")) == 100_000
    assert (
        "no wheel exists of native==1.0" in said
        and "flit_core, setuptools, torch" in said
        and "in 3 pieces: big-1.0" in said
    )
    assert str(folder) in said.splitlines()[-1] and "MIMO_WHEELS" in said


def test_an_empty_environment_is_installed_from_them_alone(collected, index, tmp_path):
    _, folder, _ = collected
    other = tmp_path / "other"
    other.mkdir()
    wheel(other, "beta", "3.0")
    machine = Machine(tmp_path / "offline")
    env = NO_NETWORK | {"MIMO_WHEELS": str(folder), "PIP_FIND_LINKS": str(other)}
    code = "import alpha, beta, big, native, pure; print(alpha.version, beta.version, native.version, pure.version)"
    result = machine.run(f". scripts/env.sh && $MIMO_PYTHON -c '{code}'", **env)
    assert (result.returncode, result.stdout) == (0, "1.0 2.0 1.0 1.0\n"), result.stderr
    assert [line for line in result.stderr.splitlines() if "WARNING" not in line][-1].endswith(" s")
    assert not (machine.root / ".venv/joined-wheels").exists()
    again = machine.run(". scripts/env.sh", **env)
    assert (again.returncode, again.stderr) == (0, "")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda piece: piece.unlink(), "big-1.0-py3-none-any.whl.002-of-003 is missing, piece 2 of 3"),
        (
            lambda piece: piece.write_bytes(b"x" + piece.read_bytes()[1:]),
            "is damaged: its checksum is another, piece 2",
        ),
        (lambda piece: piece.write_bytes(piece.read_bytes()[:-7]), "has 99993 bytes, not 100000, piece 2 of 3"),
        (lambda piece: (piece.parent / "beta-2.0-py3-none-any.whl").unlink(), "beta-2.0-py3-none-any.whl is missing"),
    ],
    ids=["missing", "damaged", "short", "a whole file"],
)
def test_what_got_lost_on_the_way_is_named(collected, tmp_path, damage, words):
    folder = shutil.copytree(collected[1], tmp_path / "wheels")
    damage(folder / "big-1.0-py3-none-any.whl.002-of-003")
    result = Machine(tmp_path / "offline").run(". scripts/env.sh", MIMO_WHEELS=str(folder), **NO_NETWORK)
    assert result.returncode == 1
    fault = result.stderr.splitlines()[-1]
    assert "MIMO_WHEELS" in fault and words in fault and f"copy it to {folder} again" in fault, result.stderr


def test_extras_that_were_not_collected_are_named(collected, tmp_path):
    env = {"MIMO_WHEELS": str(collected[1]), "MIMO_EXTRAS": "demo,track"}
    result = Machine(tmp_path / "offline").run(". scripts/env.sh", **env)
    assert result.returncode == 1
    assert "are for the extras demo,dev, not for track: collect them again with MIMO_EXTRAS=" in result.stderr


def test_a_folder_that_is_not_there_is_named(tmp_path):
    result = Machine(tmp_path).run(". scripts/env.sh", MIMO_WHEELS="nowhere")
    assert result.returncode == 1
    assert f"MIMO_WHEELS is {tmp_path}/checkout/nowhere, which is no folder" in result.stderr


def test_packages_that_the_machine_has_are_left_out_and_must_be_there(collected, index, tmp_path):
    machine = collected[0]
    folder = tmp_path / "wheels"
    (tmp_path / "list").write_text(
        "# a list\nbeta==1.0\ntorch==2.0+cu130\nwheel @ file:///x/wheel-99.0-py3-none-any.whl\n"
    )
    result = collect(machine, index, f"{folder} --have {tmp_path}/list")
    assert result.returncode == 0, result.stderr
    assert not {"beta", "torch", "wheel"} & names(folder) and "alpha" in names(folder)
    assert "the machine has them: beta 1.0, torch 2.0+cu130, wheel 99.0" in result.stdout

    result = Machine(tmp_path / "without").run(". scripts/env.sh", MIMO_WHEELS=str(folder))
    assert result.returncode == 1
    assert "it lacks beta, torch, wheel, which the wheels leave out" in result.stderr

    subprocess.run([BASE, "-m", "venv", "--without-pip", tmp_path / "has"], check=True)
    (site,) = (tmp_path / "has/lib").glob("python3*/site-packages")
    for name in ("beta-1.0", "torch-2.0", "nvidia_cublas-1.0", "wheel-99.0"):
        shutil.unpack_archive(index / f"{name}-py3-none-any.whl", site, "zip")
    machine = Machine(tmp_path / "with", python=str(tmp_path / "has/bin/python"))
    code = "import alpha, beta, torch; print(beta.version, torch.__file__, alpha.__file__)"
    result = machine.run(f". scripts/env.sh && $MIMO_PYTHON -c '{code}'", MIMO_WHEELS=str(folder), **NO_NETWORK)
    assert result.returncode == 0, result.stderr
    version, torch, alpha = result.stdout.split()
    assert version == "1.0" and torch.startswith(str(site)) and alpha.startswith(str(machine.root))


def test_another_machine_s_packages_are_chosen_by_its_markers(collected, index, tmp_path):
    result = collect(collected[0], index, f"{tmp_path}/wheels --platform manylinux_2_35_aarch64 --python 3.13")
    assert result.returncode == 0, result.stderr
    assert "delta" in names(tmp_path / "wheels") and "gamma" not in names(tmp_path / "wheels")
    result = Machine(tmp_path / "offline").run(". scripts/env.sh", MIMO_WHEELS=f"{tmp_path}/wheels")
    assert result.returncode == 1 and "and not 3.13" in result.stderr


def test_a_second_collection_keeps_what_is_needed_and_removes_what_is_not(collected, index, tmp_path):
    folder = shutil.copytree(collected[1], tmp_path / "wheels")
    (folder / "mine.txt").touch()
    less = tmp_path / "less"
    shutil.copytree(index, less, ignore=shutil.ignore_patterns("big*"))
    result = collect(collected[0], less, str(folder), MIMO_EXTRAS="demo")
    assert result.returncode == 0, result.stderr
    assert not list(folder.glob("big*")) and (folder / "mine.txt").exists() and "beta" in names(folder)


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "words"),
    [
        ("x --python 3.9", {}, 2, "--python is '3.9': give 3.12 or later"),
        ("x --platform win", {}, 2, "--platform is 'win': give manylinux_2_N_x86_64"),
        ("x --pieces 0", {}, 2, "--pieces is 0"),
        ("x --have nowhere", {}, 1, "nowhere"),
        ("x --have pyproject.toml", {}, 1, "no line is name==version, as `python3 -m pip list --format=freeze`"),
        ("x", {"MIMO_EXTRAS": "demo,gpus"}, 1, "MIMO_EXTRAS names gpus: pyproject.toml has demo, dev, track"),
        ("x --have - <<<alpha==1.0", {"PIP_FIND_LINKS": "/nowhere"}, 1, "pip cannot choose the packages"),
    ],
)
def test_what_cannot_be_collected_is_named(collected, index, arguments, variables, code, words):
    result = collect(collected[0], index, arguments, **variables)
    assert result.returncode == code and words in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


LEFT_OUT = ("mimo-train", "uv", "webdataset", "braceexpand", "omegaconf", "antlr4-python3-runtime")


@pytest.mark.skipif(not os.environ.get("MIMO_REAL_WHEELS"), reason="MIMO_REAL_WHEELS=1 runs it")
def test_a_run_starts_from_real_wheels(tmp_path):
    """This checkout, on a machine that has everything but some packages: one has no wheel in the registry."""
    probe = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path, "braceexpand==0.1.7"]
    if subprocess.run(probe, capture_output=True, timeout=HANG_SECONDS, check=False).returncode:
        pytest.skip("no registry of packages can be reached")
    base = tmp_path / "base"
    subprocess.run([BASE, "-m", "venv", "--without-pip", base], check=True)
    (site,) = (base / "lib").glob("python3*/site-packages")
    has = link_packages(site)
    (tmp_path / "list").write_text("\n".join(f"{name}=={version}" for name, version in has.items()))
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    path = {"PATH": f"{Path(BASE).parent}:/usr/bin:/bin", "HOME": os.environ["HOME"]}
    command = [REPOSITORY / "scripts/wheels.sh", tmp_path / "wheels", "--have", tmp_path / "list", "--pieces", "0.05"]
    result = subprocess.run(command, env=path | pip, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert result.returncode == 0, result.stderr
    assert {"webdataset", "omegaconf", "antlr4_python3_runtime", "hatchling"} <= names(tmp_path / "wheels")
    assert "in 2 pieces: webdataset-1.0.2-py3-none-any.whl" in result.stdout

    checkout = tmp_path / "checkout"
    ignore = shutil.ignore_patterns(".*", "runs", "__pycache__")
    shutil.copytree(REPOSITORY, checkout, ignore=ignore)
    env = {"PATH": f"{base}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "MIMO_WHEELS": str(tmp_path / "wheels")}
    steps = ("gpt_tiny", "train.iters=2", "data.validation_shards=", f"run.dir={tmp_path}/run", "run.device=cpu")
    result = subprocess.run(
        [checkout / "scripts/train_gpt.sh", *steps],
        env=env | NO_NETWORK, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    installed = {path.name.split("-")[0] for path in (checkout / ".venv").glob("lib/*/site-packages/*.dist-info")}
    assert {"webdataset", "omegaconf", "mimo_train"} <= installed and "torch" not in installed


def link_packages(site: Path) -> dict[str, str]:
    """Links what this environment has into another, but for `LEFT_OUT`; returns package -> version."""
    here, has, skipped = Path(sysconfig.get_path("purelib")), {}, {"__pycache__"}
    for found in distributions(path=[str(here)]):
        if found.metadata["Name"].lower() in LEFT_OUT:
            skipped |= {path.parts[0] for path in found.files}
        else:
            has[found.metadata["Name"]] = found.version
    for path in here.iterdir():
        if path.name not in skipped and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    return has

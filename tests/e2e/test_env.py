"""scripts/env.sh: which interpreter it takes, and when it installs."""

import os
import signal
import time
import tomllib

import pytest

from tests.e2e.fake_python import Checkout
from tests.hang import HANG_SECONDS

STRICT = "set -euo pipefail; . scripts/env.sh; echo $MIMO_PYTHON"
INSTALL = "-m uv pip install"
BROKEN_SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path, "flock")


@pytest.fixture
def ready(checkout):
    """A checkout whose environment has been set up."""
    checkout.program("python3.12")
    assert checkout.run(STRICT).returncode == 0
    return checkout


def test_sets_up_an_environment_and_says_so_in_two_lines(checkout):
    checkout.program("python3.12")
    result = checkout.run(STRICT)
    assert (result.returncode, result.stdout) == (0, f"{checkout.venv}/bin/python\n"), result.stderr
    before, after = result.stderr.splitlines()
    assert "setting up" in before and "python3.12" in before
    assert "ready after" in after
    assert (checkout.calls("-m venv"), checkout.calls(INSTALL)) == (1, 1)
    assert checkout.calls(f"-e {checkout.root}[demo,dev]") == 1


def test_a_ready_environment_is_used_without_a_word(ready):
    result = ready.run(STRICT)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{ready.venv}/bin/python\n", "")
    assert ready.calls("-m ") == 0


def test_an_interpreter_that_does_not_run_is_skipped(checkout):
    checkout.program("python3.12", BROKEN_SHIM)
    checkout.program("python3")
    result = checkout.run(STRICT)
    assert result.returncode == 0, result.stderr
    assert f"{checkout.bin}/python3 " in result.stderr


def test_a_python_of_pyenv_is_found_behind_its_shims(checkout):
    checkout.program("python3.12", BROKEN_SHIM)
    python = checkout.program(checkout.root.parent / "pyenv/versions/3.12.9/bin/python3")
    result = checkout.run(STRICT)
    assert result.returncode == 0, result.stderr
    assert str(python) in result.stderr


@pytest.mark.parametrize("command", [STRICT, ". scripts/env.sh"])
def test_without_python_there_is_one_sentence(checkout, command):
    checkout.program("python3", "#!/bin/sh\nexit 1\n")  # too old
    result = checkout.run(command)
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    assert "no Python 3.12 or later" in result.stderr and "install" in result.stderr


@pytest.mark.parametrize(
    ("first", "then", "installed"),
    [
        ("demo,dev", "demo,dev,track", "demo,dev,track"),
        ("demo,dev,track", "demo,dev", ""),
        ("demo,dev", "gpu", "demo,dev,gpu"),
        ("dev,demo", "demo", ""),
    ],
)
def test_extras_are_added_and_never_fought_over(checkout, first, then, installed):
    checkout.program("python3.12")
    assert checkout.run(STRICT, MIMO_EXTRAS=first).returncode == 0
    result = checkout.run(STRICT, MIMO_EXTRAS=then)
    assert result.returncode == 0, result.stderr
    assert checkout.calls(INSTALL) == bool(installed)
    assert checkout.calls(f"-e {checkout.root}[{installed}]") == bool(installed)
    for extras in (first, then):
        assert checkout.run(STRICT, MIMO_EXTRAS=extras).stderr == ""


def test_changed_dependencies_are_installed_with_all_extras_that_are_there(checkout):
    checkout.program("python3.12")
    assert checkout.run(STRICT, MIMO_EXTRAS="demo,dev,track").returncode == 0
    text = (checkout.root / "pyproject.toml").read_text()
    (checkout.root / "pyproject.toml").write_text(text.replace('dev = ["', 'dev = ["humanize==4.0.0", "'))
    assert checkout.run(STRICT).returncode == 0
    assert checkout.calls(f"-e {checkout.root}[demo,dev,track]") == 1


def test_the_tests_install_what_they_need_and_training_leaves_it(checkout):
    checkout.program("python3.12")
    checkout.run("scripts/test.sh --version")
    assert checkout.calls(f"-e {checkout.root}[demo,dev,track,resiliency,remote,video,heic,eval,qlora]") == 1
    assert checkout.run(STRICT).stderr == ""


def test_wheels_are_installed_without_a_registry(checkout, tmp_path):
    checkout.program("python3.12")
    assert checkout.run(STRICT, MIMO_WHEELS=str(tmp_path)).returncode == 0
    expected = f"--no-index --find-links {tmp_path} -e {checkout.root}[demo,dev]"
    assert (checkout.calls(expected), checkout.calls("uv pip install")) == (1, 0)


def test_a_change_that_is_no_dependency_installs_nothing(ready):
    ready.append("pyproject.toml", "\n[tool.something]\nkey = 1\n")
    assert ready.run(STRICT).stderr == ""
    assert ready.calls(INSTALL) == 0


def test_a_failed_set_up_is_shown_and_repaired_by_the_next_start(checkout):
    checkout.program("python3.12")
    failed = checkout.run(STRICT, FAKE_INSTALL_FAILS="1")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "not ready" in failed.stderr
    assert checkout.calls("-m pip install --quiet --disable-pip-version-check -e") == 1  # pip was tried after uv
    repaired = checkout.run(STRICT)
    assert repaired.returncode == 0, repaired.stderr
    assert (checkout.calls("-m venv --clear"), checkout.calls(INSTALL)) == (1, 1)


@pytest.mark.parametrize("tools", [("flock",), ()], ids=["flock", "without flock"])
def test_a_killed_set_up_is_repaired_by_the_next_start(tmp_path, tools):
    checkout = Checkout(tmp_path, *tools)
    checkout.program("python3.12")
    checkout.calls_file.touch()
    process = checkout.start(STRICT, FAKE_INSTALL_SECONDS="60")
    while not checkout.calls(INSTALL):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=HANG_SECONDS)
    repaired = checkout.run(STRICT)
    assert repaired.returncode == 0, repaired.stderr
    assert (checkout.calls("-m venv --clear"), checkout.calls(INSTALL)) == (1, 1)
    assert checkout.run(STRICT).stderr == ""


def test_pip_installs_where_uv_cannot_be_had(checkout):
    checkout.program("python3.12")
    result = checkout.run(STRICT, FAKE_NO_UV="1")
    assert result.returncode == 0, result.stderr
    assert checkout.calls(f"-e {checkout.root}[demo,dev]") == 1
    assert checkout.calls(INSTALL) == 0


@pytest.mark.parametrize("without_uv", ["", "1"])
def test_what_is_compiled_for_torch_is_built_with_the_one_that_is_installed(checkout, without_uv):
    """Transformer Engine's half for torch asks for torch>=2.1 to build with, and gets the newest."""
    checkout.program("python3.12")
    checkout.venv = checkout.root.parent / "an environment"
    given = {"FAKE_NO_UV": without_uv, "MIMO_EXTRAS": "demo,gpu", "MIMO_VENV": str(checkout.venv)}
    # As pip says what it takes, from its variables and its files.
    lines = [
        ":env:.constraint='own.txt'",
        "global.constraint='/hidden.txt'",
        "install.build-constraint='/a.txt\\n/b.txt'",
    ]
    given |= {"UV_BUILD_CONSTRAINT": "a.txt b.txt", "FAKE_PIP_CONFIG": "".join(f"{line}\n" for line in lines)}
    assert checkout.run(STRICT, **given).returncode == 0
    built = checkout.venv / ".mimo-built-for"
    pins = tomllib.loads((checkout.root / "pyproject.toml").read_text())["project"]["dependencies"]
    assert built.read_text().split() == [pin for pin in pins if pin.startswith("torch==")] != []
    if without_uv:
        # pip takes these variables apart at spaces.
        assert checkout.calls(f"pip builds with {built.as_uri()} own.txt; {built.as_uri()} /a.txt /b.txt") == 1
    else:
        own = "--build-constraints a.txt --build-constraints b.txt"
        assert checkout.calls(f"{INSTALL} --quiet --build-constraints {built} {own} --python") == 1


@pytest.mark.parametrize("tools", [("flock",), ()], ids=["flock", "without flock"])
def test_two_starts_at_once_set_up_once(tmp_path, tools):
    checkout = Checkout(tmp_path, *tools)
    checkout.program("python3.12")
    starts = [checkout.start(STRICT, FAKE_INSTALL_SECONDS="1") for _ in range(2)]
    results = [(*start.communicate(timeout=HANG_SECONDS), start.returncode) for start in starts]
    assert [code for *_, code in results] == [0, 0], results
    assert checkout.calls(INSTALL) == 1


def test_an_active_interpreter_that_can_train_is_used(checkout):
    checkout.program("python", '#!/bin/sh\n[ "$1" = -P ] && echo /opt/container/bin/python\n')
    result = checkout.run(STRICT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "/opt/container/bin/python\n", "")


def test_an_interpreter_that_has_another_checkout_installed_is_not_used(checkout):
    checkout.program("python")  # runs the Python of this test, which has the repository installed
    result = checkout.run(STRICT)
    assert (result.returncode, result.stdout) == (0, f"{checkout.venv}/bin/python\n"), result.stderr
    assert checkout.calls("-m venv") == 1


def test_the_environment_can_be_elsewhere(checkout, tmp_path):
    checkout.program("python3.12")
    result = checkout.run(STRICT, MIMO_VENV=str(tmp_path / "else where"))
    assert (result.returncode, result.stdout) == (0, f"{tmp_path}/else where/bin/python\n"), result.stderr
    assert not checkout.venv.exists()


def test_another_shell_is_asked_to_start_bash(checkout):
    checkout.program("python3.12")
    result = checkout.run("sh -c '. scripts/env.sh'")
    if "BASH_VERSION" in checkout.run("sh -c set").stdout:
        pytest.skip("sh is bash here")
    assert (result.returncode != 0, result.stdout) == (True, "")
    assert "start bash" in result.stderr and len(result.stderr.splitlines()) == 1
    assert checkout.calls("-m venv") == 0

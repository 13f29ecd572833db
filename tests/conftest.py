"""What holds for every test."""

import contextlib
import functools
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

from mimo_train.config import compose

# No test asks a hub but its own (tests/hub_server.py). The libraries read this when they are imported.
os.environ["HF_HUB_OFFLINE"] = "1"

# The same examples on every machine, however slow it is; --hypothesis-profile=random draws others.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("random", database=None, deadline=None)
settings.load_profile("fixed")
set_hypothesis_home_dir(Path(__file__).parents[1] / ".hypothesis")  # the default is the working directory

# Thousands of tests compose a shipped config. Hydra takes two thirds of the time, and its result depends on nothing but
# the file and the groups that are picked; values are set in copies of it.
_SHIPPED = compose.shipped_configs()
_by_hydra = compose.composed_files
_of_shipped = functools.cache(_by_hydra)
compose.composed_files = lambda path, choices: (_of_shipped if _SHIPPED in path.parents else _by_hydra)(path, choices)

LONGEST = ("dist/test_layout_parity.py", "dist", "e2e")
"""Files and folders with the longest tests, the longest first."""


WORKING_DIRECTORIES = pytest.StashKey[str]()


def pytest_configure(config) -> None:
    """Make the folder of all working directories. They stay until the end: a process that one test starts may serve
    later ones."""
    folder = tempfile.TemporaryDirectory(prefix="mimo_test_", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    config.stash[WORKING_DIRECTORIES] = folder.name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Run each test in a working directory of its own: the folders of shipped configs are relative, and a run of the
    checkout must not change what a test reads."""
    with contextlib.chdir(tempfile.mkdtemp(dir=item.config.stash[WORKING_DIRECTORIES])):
        return (yield)


def pytest_collection_modifyitems(items) -> None:
    """Puts what takes longest first: files run side by side, and a long one that begins last would be waited for."""
    here = Path(__file__).parent

    @functools.cache
    def place(path: Path) -> int:
        path = path.relative_to(here)
        return next((number for number, name in enumerate(LONGEST) if path.is_relative_to(name)), len(LONGEST))

    items.sort(key=lambda item: place(item.path))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hugging Face hub on this machine, which this process uses with an empty cache of its own."""
    from huggingface_hub import constants

    from mimo_train.config.pretrained.hub import say
    from tests.hub_server import hub_server, settings

    with hub_server() as server:
        for name, value in settings(server.url, tmp_path / "cache").items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        say.cache_clear()
        yield server

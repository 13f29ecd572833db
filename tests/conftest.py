"""What holds for every test."""

import functools
from pathlib import Path

from hypothesis import settings

from mimo_train.config import compose

# The same examples on every machine, however slow it is; --hypothesis-profile=random draws others.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("random", database=None, deadline=None)
settings.load_profile("fixed")

# Thousands of tests compose a shipped config. Hydra takes two thirds of the time, and its result depends on nothing but
# the file and the groups that are picked; values are set in copies of it.
_SHIPPED = compose.shipped_configs()
_by_hydra = compose._composed_files
_of_shipped = functools.cache(_by_hydra)
compose._composed_files = lambda path, choices: (_of_shipped if _SHIPPED in path.parents else _by_hydra)(path, choices)

LONGEST = ("dist/test_layout_parity.py", "e2e/test_wheels.py", "dist", "e2e")
"""Files and folders with the longest tests, the longest first."""


def pytest_collection_modifyitems(items) -> None:
    """Puts what takes longest first: files run side by side, and a long one that begins last would be waited for."""
    here = Path(__file__).parent

    def place(item) -> int:
        path = item.path.relative_to(here)
        return next((number for number, name in enumerate(LONGEST) if path.is_relative_to(name)), len(LONGEST))

    items.sort(key=place)

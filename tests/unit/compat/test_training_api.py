"""The table of docs/training-api.md: every name can be imported, and every test exists."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def rows() -> list[tuple[str, str, str]]:
    """(name, where it is, test) of every row."""
    found = []
    for line in (ROOT / "docs" / "training-api.md").read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            found.append(tuple(cells))
    return found


@pytest.mark.parametrize(("name", "place", "test"), rows(), ids=[row[0] for row in rows()])
def test_the_name_is_where_the_table_says(name, place, test):
    attribute = name.rsplit(".", 1)[-1]
    module = place.removesuffix(f".{attribute}") if "." in name and place.endswith(f".{attribute}") else place
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(("name", "place", "test"), rows(), ids=[row[0] for row in rows()])
def test_the_test_exists(name, place, test):
    file, _, function = test.partition("::")
    functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert function in functions, f"{file} has no {function}"


def test_the_table_is_whole():
    assert len(rows()) >= 45

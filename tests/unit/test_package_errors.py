"""What a user can cause has one base class in each of the packages `data` and `encoders`."""

import ast
from pathlib import Path

import pytest

import data.errors
import encoders.errors

ROOT = Path(__file__).resolve().parents[2]
TOO_GENERAL = {"BaseException", "Exception", "ValueError", "NotImplementedError"}


def too_general(source: str) -> list[int]:
    """Lines that raise one of `TOO_GENERAL`."""
    raised = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    classes = [(node.lineno, node.exc.func if isinstance(node.exc, ast.Call) else node.exc) for node in raised]
    return [line for line, name in classes if isinstance(name, ast.Name) and name.id in TOO_GENERAL]


@pytest.mark.parametrize("package", ["data", "encoders"])
def test_no_error_is_too_general(package):
    found = {str(path): too_general(path.read_text()) for path in (ROOT / package).rglob("*.py")}
    assert len(found) > 10 and not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("raise ValueError('x')", [1]),
        ("raise Exception", [1]),
        ("try:\n    f()\nexcept OSError as error:\n    raise ValueError('x') from error", [4]),
        ("raise DataError('x')", []),
        ("try:\n    f()\nexcept ValueError:\n    raise", []),
    ],
)
def test_a_too_general_error_is_found(line, lines):
    assert too_general(line) == lines


@pytest.mark.parametrize(("module", "base"), [(data.errors, "DataError"), (encoders.errors, "EncoderError")])
def test_a_package_has_one_base(module, base):
    own = [value for value in vars(module).values() if isinstance(value, type)]
    assert all(issubclass(error, getattr(module, base)) for error in own)
    assert getattr(module, base).__mro__[1] is ValueError

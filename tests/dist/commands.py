"""Commands of a user, on a rank."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout


def command(arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of `mimo-train`."""
    code, out, err = conversation(arguments)
    return code, out + err


def conversation(arguments: list[str], lines: str = "") -> tuple[int, str, str]:
    """Exit code, output and errors of `mimo-train` for a user who types `lines`."""
    from mimo_train.cli import main

    sys.stdin = io.TextIOWrapper(io.BytesIO(lines.encode()))
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()

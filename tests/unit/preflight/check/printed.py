"""The output of `mimo-train check`."""

from mimo_train.cli import main


def run(capsys, *argv: str) -> tuple[int, str, list[str]]:
    """Return (exit code, stdout, faults without their `error: `)."""
    code = main(["check", *argv])
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (code == 1) == bool(lines)
    if lines:
        assert lines.pop().endswith("this run cannot start")
    assert all(line.startswith("error: ") for line in lines)
    return code, out, [line.removeprefix("error: ") for line in lines]

"""How near training comes to what a GPU can do, in less than 10 minutes.

    python -m benchmarks.gpu --to benchmarks/gpu_[hardware]_[date].md --json gpu.json     # everything
    python -m benchmarks.gpu c g                                                          # sections
    python -m benchmarks.gpu --tiny                                                       # a rehearsal on a CPU

Every section has its own time. What fails is shown with the last lines of its traceback, what is missing is named, and
the others go on. Exit code 0 if every section ran or was skipped, 1 if a part of one failed or was ended.
"""

import argparse
import datetime
import json
import shlex
import sys
import time
from pathlib import Path

from benchmarks.gpu.sections import FORMULA, SECTIONS, Row, Sections
from benchmarks.gpu_check.jobs import Jobs
from benchmarks.gpu_check.record import as_record, as_text, commit, write

SECONDS = 590
"""For all sections together, the imports that they share included."""
TITLE = "How near training comes to what this GPU can do"
WHAT = (
    "the sections of `python -m benchmarks.gpu`: "
    + "; ".join(f"({letter}) {section.title}" for letter, section in SECTIONS.items())
    + f". {FORMULA}, by the peaks of mimo_train/logging/throughput.py; of (a): TFLOP/s of the step over those of the "
    "matrix product. Weights are random. Estimates are those of `mimo-train check`. In (d) `transformers` trains under "
    "autocast with weights of fp32, from batches in memory; both sides make their steps in turns."
)


def main(arguments: list[str] | None = None) -> int:
    """Run the sections that the command line names; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="LETTER", help=f"sections to run, of {', '.join(SECTIONS)}")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal of everything on the CPU")
    parser.add_argument("--to", type=Path, metavar="FILE", help="write a record for benchmarks/, a new file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers, a new file")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all together (default: {SECONDS})")
    options = parser.parse_args(arguments)
    unknown = [letter for letter in options.sections if letter not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}: there are {', '.join(SECTIONS)}")
    for name, path in (("--to", options.to), ("--json", options.json)):
        if path and path.exists():
            parser.error(f"{name}: {path} exists, and a record is never changed: give a new name")
        if path and not path.parent.is_dir():
            parser.error(f"{name}: there is no folder {path.parent}")
    command = shlex.join(["python", "-m", "benchmarks.gpu", *(sys.argv[1:] if arguments is None else arguments)])
    found: dict[str, list[Row]] = {}
    took: dict[str, float] = {}
    started = time.monotonic()
    with Jobs(options.seconds) as jobs:
        sections = Sections(jobs, options.tiny)
        for letter in [letter for letter in SECTIONS if letter in (options.sections or SECTIONS)]:
            began, found[letter] = time.monotonic(), []
            for row in sections.run(letter):
                print(as_text(f"({letter})", row.line, first=not found[letter]), flush=True)
                found[letter].append(row)
            took[letter] = time.monotonic() - began
        machine = sections.machine
    rows = [row for of_section in found.values() for row in of_section]
    if options.json:
        write(options.json, _as_json(found, took, machine.value, command))
    if options.to and machine.state == "ok":
        lines = [(f"({letter})", row.line) for letter, of_section in found.items() for row in of_section]
        write(options.to, as_record(lines, machine.value, command, TITLE, WHAT))
    states = [row.line.state for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("ok", "skipped", "failed", "ended"))
    print(f"rows: {counts}; {time.monotonic() - started:.0f} s", flush=True)
    return int(machine.state != "ok" or any(state in ("failed", "ended") for state in states))


def _as_json(found: dict[str, list[Row]], took: dict[str, float], machine: dict | None, command: str) -> str:
    sections = {
        letter: {
            "title": SECTIONS[letter].title,
            "seconds": took[letter],
            "rows": [vars(row.line) | {"values": row.values} for row in rows],
        }
        for letter, rows in found.items()
    }
    whole = {"command": command, "date": f"{datetime.date.today()}", "commit": commit(), "machine": machine}
    return json.dumps(whole | {"formula": FORMULA, "sections": sections}, indent=1) + "\n"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

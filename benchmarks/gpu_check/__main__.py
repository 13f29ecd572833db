"""Prints what a machine with a GPU does, in one table, in less than 8 minutes. Run through scripts/gpu_check.sh.

What is missing is named and skipped; what fails is shown with the last lines of its traceback; what takes too long is
ended. Without words, every check. Exit code 0 if every check ran or was skipped, 1 if one failed or was ended.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

from benchmarks.gpu_check.checks import CHECKS, Checks, Line
from benchmarks.gpu_check.jobs import Jobs
from benchmarks.gpu_check.record import as_record, as_text, write

SECONDS = 420
"""For all checks together; the start of the script comes on top."""


def main() -> int:
    """Run the checks that the command line names; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", metavar="TABLE", help=f"checks to run: {', '.join(CHECKS)}")
    parser.add_argument("--list", action="store_true", help="print the names of the checks and run none")
    parser.add_argument("--to", type=Path, metavar="FILE", help="write a record for benchmarks/ too, a new file")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all checks together (default: {SECONDS})")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:<9} {check.__doc__}" for name, check in CHECKS.items()))
        return 0
    unknown = [name for name in options.checks if name not in CHECKS]
    if unknown:
        parser.error(f"no check {', '.join(unknown)}: there are {', '.join(CHECKS)}")
    if options.to and options.to.exists():
        parser.error(f"--to: {options.to} exists, and a record is never changed: give a new name")
    if options.to and not options.to.parent.is_dir():
        parser.error(f"--to: there is no folder {options.to.parent}")
    lines, started = [], time.monotonic()
    with Jobs(options.seconds) as jobs:
        checks = Checks(jobs, options.device)
        for name in [name for name in CHECKS if name in (options.checks or CHECKS)]:
            for number, line in enumerate(checks.run(name)):
                lines.append((name, line))
                print(as_text(name, line, first=number == 0), flush=True)
        machine = checks.machine
    if options.to:
        if machine.state != "ok":
            lines.append(("record", Line(str(options.to), f"not written: {machine.text}", "failed")))
        else:
            command = shlex.join(["scripts/gpu_check.sh", *sys.argv[1:]])
            write(options.to, as_record(lines, machine.value, command))
    states = [line.state for _, line in lines]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("ok", "skipped", "failed", "ended"))
    print(f"lines: {counts}; {time.monotonic() - started:.0f} s", flush=True)
    return int(any(state in ("failed", "ended") for state in states))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

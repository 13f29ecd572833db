"""What a machine with a GPU computes, and how near training comes to its peak: one table, in less than 15 minutes.

    scripts/gpu_check.sh                                                       # everything
    scripts/gpu_check.sh --to benchmarks/gpu_[hardware]_[date].md --json gpu.json
    scripts/gpu_check.sh ceiling steps --seconds 230                           # sections

Each section has a time limit. Rows that need Transformer Engine are skipped without it. A failure is a row with the
last lines of its traceback, and the other sections run. Exit code 0 if every row is ok or skipped, 1 if one failed or
was ended.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.jobs import Jobs
from benchmarks.gpu.sections import SECTIONS, Sections
from benchmarks.gpu.sizes import GPU, TINY
from benchmarks.gpu.table import Row, as_json, as_record, as_text

SECONDS = 840
"""Time limit of all sections together, with the imports that they share."""


def main(arguments: Sequence[str]) -> int:
    """Run the sections that the command line names; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"sections to run: {', '.join(SECTIONS)}")
    parser.add_argument("--list", action="store_true", help="print what each section measures, and run none")
    parser.add_argument("--to", type=Path, metavar="FILE", help="write a record for benchmarks/, a new file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers, a new file")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all together (default: {SECONDS})")
    parser.add_argument("--tiny", action="store_true", help="rehearse everything on the CPU, in small")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:<12} {section.title}: {section.goal or '-'}" for name, section in SECTIONS.items()))
        return 0
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}: choose from {', '.join(SECTIONS)}")
    for name, path in (("--to", options.to), ("--json", options.json)):
        if path and path.exists():
            parser.error(f"{name}: {path} exists, and a record is never changed. Choose a new name")
        if path and not path.parent.is_dir():
            parser.error(f"{name}: the folder {path.parent} does not exist")
    rows: list[tuple[str, Row]] = []
    started = time.monotonic()
    chosen = [name for name in SECTIONS if name in (options.sections or SECTIONS)]
    with Jobs(options.seconds) as jobs:
        sections = Sections(jobs, TINY if options.tiny else GPU)
        for name in chosen:
            for number, row in enumerate(sections.run(name)):
                print(as_text(name, row, first=number == 0), flush=True)
                rows.append((name, row))
        machine = sections.machine
    command = shlex.join(["scripts/gpu_check.sh", *arguments])
    if machine.state == "ok":
        titles = {name: SECTIONS[name].title for name in chosen}
        if options.to:
            options.to.write_text(as_record(rows, machine.value, command, titles))
        if options.json:
            options.json.write_text(as_json(rows, machine.value, command))
    states = [row.state for _, row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("ok", "skipped", "failed", "ended"))
    print(f"rows: {counts}; {time.monotonic() - started:.0f} s", flush=True)
    return int(machine.state != "ok" or any(state in ("failed", "ended") for state in states))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

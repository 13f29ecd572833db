"""Seconds from a hang to its report, of every kind of hang that the tests make.

    OMP_NUM_THREADS=1 python benchmarks/hangs.py
    OMP_NUM_THREADS=1 python benchmarks/hangs.py --rounds 3 -k stopped

The cases are those of tests/dist/flight/test_hangs.py: runs of several modules in which a rank is stopped, reads or
writes for ever, never joins, or leaves messages out, with `run.hang_report_seconds=3`. The rank notes when it begins to
hang; the report's file tells when it was written. What a collective left out takes is counted until the run has ended,
with the abort of gloo: there is no report before somebody asks for one. Exit code 1 if a case fails, or takes longer
than the limit and five seconds.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.dist.flight.hangs import REPORT_AFTER
from tests.dist.flight.test_hangs import SECONDS

ROOT = Path(__file__).resolve().parents[1]
CASES = "tests/dist/flight/test_hangs.py"
MOST = REPORT_AFTER + 5


def measured(arguments: list[str]) -> tuple[dict[str, float], int]:
    """(seconds of each case that has some, exit code of the tests) of one round."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        options = ["-q", "-p", "no:xdist", "-o", "junit_family=xunit1", f"--junitxml={found}"]
        command = [sys.executable, "-m", "pytest", *options, CASES, *arguments]
        code = subprocess.run(command, cwd=ROOT, env=os.environ | {"MIMO_ALL_HANGS": "1"}).returncode
        properties = [
            (case.get("name", ""), float(one.get("value", "")))
            for case in ElementTree.parse(found).iter("testcase")
            for one in case.iter("property")
            if one.get("name") == SECONDS
        ]
    return dict(properties), code


def main() -> int:
    """Run the cases, print a table, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("-k", default="", help="cases to run, as of pytest")
    options = parser.parse_args()
    rounds, codes = zip(*(measured(["-k", options.k]) for _ in range(options.rounds)), strict=True)
    print(f"\n| case | seconds, each round (at most {MOST}) |\n|---|---|")
    for case in {name: None for one in rounds for name in one}:
        print(f"| {case} | {', '.join(f'{one[case]:.1f}' for one in rounds if case in one)} |")
    late = any(seconds > MOST for one in rounds for seconds in one.values())
    return int(late or any(codes))


if __name__ == "__main__":
    sys.exit(main())

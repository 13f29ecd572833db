"""Prints the parity table: layouts against one process. Run through scripts/compare_layouts.sh.

Without options the first layouts of each model; words pick models and layouts whose names contain one of them."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.dist.layout_tables import CASES, MODELS, Row
from tests.dist.parity import difference, make_demos, trained, within

FIRST = 2
"""Layouts of each model that are compared without options."""


def main() -> int:
    """Train layouts and print their largest differences from one process; 1 if one is too large."""
    parser = argparse.ArgumentParser(
        prog="scripts/compare_layouts.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only models and layouts whose names contain one of these words")
    parser.add_argument("--all", action="store_true", help="every layout of the table")
    parser.add_argument("--list", action="store_true", help="print the names and train nothing")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of a rank (default: 1)")
    options = parser.parse_args()
    chosen = _chosen(options.words, options.all or options.list)
    if options.list:
        print("\n".join(f"{model}: {row}" for model, rows in chosen.items() for row in rows))
        return 0
    os.environ["MIMO_QUIET_RANKS"] = "1"  # read by the ranks of tests.dist.ranks
    os.environ["MIMO_RANK_THREADS"] = str(options.threads)  # read by tests.dist.preload
    from rich.console import Console
    from rich.table import Table

    columns = ("model", "layout", "loss", "gradient norm", "parameters", "within", "seconds")
    table, failed, number = Table(*columns), [], 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        demos = make_demos(folder)
        total = sum(len(rows) for rows in chosen.values())
        for model, rows in chosen.items():
            one = trained(model, demos, folder / f"{model}-one")
            for row in rows:
                number, start = number + 1, time.monotonic()
                found = difference(one, trained(model, demos, folder / f"{number}", row))
                if not within(model, found):
                    failed.append(f"{model}: {row}: {found}")
                numbers = (f"{value:.1e}" for value in (found.loss, found.norm, found.parameter))
                good = "yes" if within(model, found) else "NO"
                cells = (model, str(row), *numbers, good, f"{time.monotonic() - start:.0f}")
                table.add_row(*cells)
                print(f"{number}/{total}", *cells, sep="  ", file=sys.stderr, flush=True)
    console = Console(width=150)
    console.print(table)
    console.print(
        f"{number} layouts, {number - len(failed)} within. Largest differences from one process in 20 steps: of losses "
        "and gradient norms relative, of parameters the root mean square of one of them in learning rates."
    )
    for line in failed:
        console.print(line)
    return bool(failed)


def _chosen(words: list[str], everything: bool) -> dict[str, list[Row]]:
    if words:
        cases = [(model, row) for model, row in CASES if any(word in f"{model}: {row}" for word in words)]
    else:
        cases = [(model, row) for model, found in MODELS.items() for row in found.rows[: None if everything else FIRST]]
    rows: dict[str, list[Row]] = {}
    for model, row in cases:
        rows.setdefault(model, []).append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())

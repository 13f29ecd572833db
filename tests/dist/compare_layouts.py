"""Prints the parity table: every layout of the test against one process. Run through scripts/compare_layouts.sh."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.dist.test_layout_parity import MODELS, TOLERANCE, largest_difference, run_model


def main() -> int:
    """Train every layout and print its largest differences from one process; 1 if one is too large."""
    parser = argparse.ArgumentParser(prog="scripts/compare_layouts.sh", description=__doc__)
    parser.add_argument("words", nargs="*", help="only layouts whose name contains one of these words")
    words = parser.parse_args().words
    os.environ["MIMO_QUIET_RANKS"] = "1"  # read by the ranks of tests.dist.ranks
    from rich.console import Console
    from rich.table import Table

    from data.demo import make_demo, make_text_demo

    table = Table("model", "layout", "largest difference of loss", "of gradient norm", "within 1e-5")
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        demos = {
            "digits": make_demo(folder / "digits", train_samples=480, held_out_samples=40, shards=2),
            "prose": make_text_demo(folder / "prose"),
        }
        for name, (_, _, layouts) in MODELS.items():
            chosen = [title for title in layouts if not words or any(word in title for word in words)]
            if not chosen:
                continue
            one = run_model(name, demos, folder / f"{name}-one")
            table.add_row(name, "one process", "reference", "reference", "")
            for title in chosen:
                loss, norm = largest_difference(one, run_model(name, demos, folder / f"{name}-{title}", title))
                good = loss < TOLERANCE and norm < TOLERANCE
                failed |= not good
                table.add_row(name, title, f"{loss:.1e}", f"{norm:.1e}", "yes" if good else "NO")
    Console(width=110).print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

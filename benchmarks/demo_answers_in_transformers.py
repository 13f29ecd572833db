"""Every held-out question of a trained demo, answered by `mimo-train generate` and by the exported directory in
transformers: are the texts the same, and how many are right?

    python benchmarks/demo_answers_in_transformers.py RUN [--questions N]
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.dist.hf.asking import answers_here, answers_of_transformers, questions
from tests.dist.ranks import run_ranks

MOST = 16
"""Longest answer in tokens."""


def export(run: Path, to: Path, options: list[str]) -> None:
    """As the command does."""
    from mimo_train.cli import main

    assert main(["export", str(run), "--to", str(to), *options]) == 0


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--questions", type=int, default=768, help="of the held-out shards (default: %(default)s)")
    arguments = parser.parse_args()
    from mimo_train.checkpoint import folders

    record = folders.read_record(folders.in_folder(arguments.run, "RUN"), "config", "step")
    asked = questions(Path(record["config"]["data"]["validation_shards"]), arguments.questions)
    if not asked:
        sys.exit(f"no held-out shards in {record['config']['data']['validation_shards']}: run this where the run was")
    answers = questions(Path(record["config"]["data"]["validation_shards"]), arguments.questions, turn=1)
    has_adapters = any(module["lora"]["rank"] for module in record["config"]["modules"].values())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "exported")
        run_ranks(export, 1, arguments.run, folder, ["--merge"] * has_adapters)
        (here,) = run_ranks(answers_here, 1, arguments.run, asked, MOST)
        (theirs,) = run_ranks(answers_of_transformers, 1, folder, None, asked, MOST)
        here, there = [text for _, text in here], theirs.texts
    same = sum(one == other for one, other in zip(here, there, strict=True))
    right = sum(one == text for one, (text, _) in zip(there, answers, strict=True))
    print(f"step {record['step']}: {same} of {len(asked)} texts are the same, {right / len(asked):.3f} are right")


if __name__ == "__main__":
    main()

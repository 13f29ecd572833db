"""The demo as people fine-tune: export it, start a second run from that directory with LoRA onto questions that it has
never been asked, export the adapter, and let transformers and peft answer with it.

    python benchmarks/demo_lora_round_trip.py RUN WORK [--iters N]

RUN is a trained demo (`scripts/train_vlm.sh`), WORK a new folder. Needs peft: `pip install 'mimo-train[dev]'`.
"""

import argparse
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.dist.hf.asking import answers_of_transformers, questions

ASKED = re.compile(r"(?s)<image>\nWhich digit is (\w+)\?")
MOST = 16
"""Longest answer in tokens."""


def write_shards(work: Path, training: int, held_out: int) -> None:
    """Images of the demo with one new question each: is the digit of a colour even or odd?"""
    from data.demo.samples import load_scans, make_sample

    for part, count in (("train", training), ("held_out", held_out)):
        rng, scans = np.random.default_rng([7, count]), load_scans(part == "held_out")
        (work / part).mkdir(parents=True)
        with tarfile.open(work / part / "000000.tar", "w") as tar:
            written = 0
            while written < count:
                sample = make_sample(scans, rng, text_only_fraction=0.0)
                matched = ASKED.fullmatch(sample.turns[0][1])
                if matched is None:
                    continue
                answer = ("even", "odd")[int(sample.turns[1][1]) % 2]
                question = f"<image>\nIs the {matched[1]} digit even or odd?"
                turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
                members = [*sample.members, ("json", json.dumps({"conversations": turns}).encode())]
                for extension, raw in members:
                    entry = tarfile.TarInfo(f"{written:06d}.{extension}")
                    entry.size = len(raw)
                    tar.addfile(entry, io.BytesIO(raw))
                written += 1


def main() -> None:
    """Print the accuracy before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--iters", type=int, default=600)
    parser.add_argument("--samples", type=int, default=6000, help="training questions (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=400, help="held-out questions (default: %(default)s)")
    arguments = parser.parse_args()
    work, base, run = arguments.work, arguments.work / "base", arguments.work / "run"
    work.mkdir(parents=True)
    write_shards(work, arguments.samples, arguments.questions)
    command("export", arguments.run, "--to", base)
    command(
        "train", "vlm_digits", f"pretrained={base}", "modules.language.lora.rank=16",
        "modules.images.freeze=[encoder,projector]",
        "layout=one_process", "data.demo=", f"data.shards={work}/train", f"data.validation_shards={work}/held_out",
        f"run.dir={run}", f"train.iters={arguments.iters}", f"train.eval_interval={arguments.iters}",
        f"train.eval_samples={arguments.questions}", f"checkpoint.save_interval={arguments.iters}", "optim.lr=3e-3",
        "checkpoint.trained_only=true",
    )  # fmt: skip
    command("export", run, "--to", work / "adapter")
    asked = questions(work / "held_out", arguments.questions)
    answers = [text for text, _ in questions(work / "held_out", arguments.questions, turn=1)]
    for name, adapter in (("the exported demo", None), ("with the adapter", work / "adapter")):
        texts = answers_of_transformers(base, adapter, asked, MOST).texts
        right = sum(text == answer for text, answer in zip(texts, answers, strict=True)) / len(asked)
        print(f"{name}: {right:.3f} of {len(asked)} new questions are answered exactly")


def command(*arguments: object) -> None:
    """Run a command of mimo-train."""
    subprocess.run([sys.executable, "-P", "-m", "mimo_train.cli", *map(str, arguments)], check=True)


if __name__ == "__main__":
    main()

"""Every held-out question of a trained demo, answered by `mimo-train generate` and by the exported directory in
transformers: are the texts the same, and how many are right?

    python benchmarks/demo_answers_in_transformers.py RUN [--questions N]
"""

import argparse
import io
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.dist.checkpoint.hf.test_export import answers_here, questions
from tests.dist.ranks import run_ranks

MOST = 16
"""Longest answer in tokens."""


def export(run: Path, to: Path) -> None:
    """As the command does."""
    from mimo_train.commands.export import main

    assert main(str(run), to, dtype="", file_gigabytes=5, merge=True) == 0


def theirs(folder: Path, asked: list) -> list[str]:
    """Answers of transformers."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    texts = []
    for text, files in asked:
        pictures = iter(Image.open(io.BytesIO(file)).convert("RGB") for file in files)
        first, *others = text.split("<image>")
        content = [{"type": "text", "text": first}] if first else []
        for part in others:
            content += [{"type": "image", "image": next(pictures)}, {"type": "text", "text": part}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
        with torch.no_grad():
            (whole,) = model.generate(**inputs, max_new_tokens=MOST, do_sample=False)
        texts.append(processor.decode(whole[inputs["input_ids"].size(1) :], skip_special_tokens=True))
    return texts


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
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "exported")
        run_ranks(export, 1, arguments.run, folder)
        (here,), (there,) = run_ranks(answers_here, 1, arguments.run, asked, MOST), run_ranks(theirs, 1, folder, asked)
        here = [text for _, text in here]
    same = sum(one == other for one, other in zip(here, there, strict=True))
    right = sum(one == text for one, (text, _) in zip(there, answers, strict=True))
    print(f"step {record['step']}: {same} of {len(asked)} texts are the same, {right / len(asked):.3f} are right")


if __name__ == "__main__":
    main()

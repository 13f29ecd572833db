"""A run whose tokenizer brings its own chat template: trained, evaluated, asked, and not continued with another."""

import contextlib
import io
import json

import pytest

from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks
from tests.unit.data.helpers import encode_picture
from tests.unit.data.text.chat_templates import QWEN_VL, save_tokenizer


def _generate(folder: str, picture: str) -> tuple[int, str]:
    from mimo_train.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(["generate", folder, "--image", picture, "--prompt", "Which digit?", "--max-new-tokens", "3"])
    return code, said.getvalue()


def test_a_run_with_the_tokenizers_own_template(digits, tmp_path):
    """Marks around pads, several special tokens in a turn, another end of turn than ours: the same at any layout."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", QWEN_VL)

    def run(layout: str, *overrides: str):
        return config(
            "vlm_digits",
            tmp_path / layout,
            digits,
            f"layout={layout}",
            f"data.tokenizer={tokenizer}",
            "data.sequence_length=128",
            "train.eval_interval=3",
            "train.eval_samples=8",
            "train.report_samples=2",
            f"data.validation_shards={digits}/held_out",
            *(overrides or ("train.iters=3",)),
        )

    layouts = ("one_process", "two_processes")
    lines = [train_on_ranks(run(layout)) for layout in layouts]
    assert max(largest_difference(*map(curve, lines))) < TOLERANCE
    scores = [next(line["eval/loss"] for line in of_run if "eval/loss" in line) for of_run in lines]
    assert scores[0] == pytest.approx(scores[1], rel=TOLERANCE)
    shown = [json.loads((tmp_path / layout / "samples.json").read_text()) for layout in layouts]
    assert shown[0] == shown[1] and all(sample["truth"] and "<|" not in sample["truth"] for sample in shown[0])
    picture = tmp_path / "picture.png"
    picture.write_bytes(encode_picture(28, 28, "PNG"))
    ((code, _),) = run_ranks(_generate, 1, str(tmp_path / "two_processes"), str(picture))
    assert code == 0
    with pytest.raises(RankFailure, match=r"data\.tokenizer: tokenizer, chat template.*are not those of checkpoint"):
        train_on_ranks(run("one_process", "train.iters=4", "data.chat_template=own"))

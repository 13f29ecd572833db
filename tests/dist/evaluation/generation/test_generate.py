"""`mimo-train generate` on the checkpoint of a run: the answers of the evaluation in the loop, and conversations."""

import io
import itertools
import json
from pathlib import Path

import pytest

from data.text.tokens import build_tokenizer
from tests.dist.commands import conversation
from tests.dist.greedy import prompts_and_answers
from tests.dist.ranks import run_ranks
from tests.dist.runs import config
from tests.unit.data.helpers import media_of

MOST = 8


def _trained(cfg) -> tuple[str, list[tuple], list[dict]]:
    """A checkpoint; (prompt, images, greedy answer in the loop, true answer, greedy answer with its end) of held-out
    samples; and their predictions."""
    from tests.dist.steps import Steps

    run = Steps(cfg)
    run.train(2)
    folder, held_out = run.save(), run.session.held_out
    answers = sorted(prompts_and_answers(run, MOST).items())
    held_out.evaluate()
    predictions = []
    if answers:
        text = (Path(cfg.run.dir) / "predictions.jsonl").read_text()
        predictions = [json.loads(line) for line in text.splitlines()]

    def images(number: int) -> list:
        # As arrays: tensors travel in memory that ends with this rank.
        return [image.numpy() for image in media_of(held_out.dataset, number, "images")]

    stops = run.session.parts.tokenizer.template.stop_ids
    found = [
        (prompt, images(number), [token for token in answer if token not in stops], truth, answer)
        for number, (prompt, answer, truth) in answers
    ]
    return str(folder), found, predictions


def _answered(folder: str, questions: list) -> list[list[int]]:
    import torch

    from data.collate import collate_media
    from mimo_train.evaluation.generation.answers import Answers
    from mimo_train.evaluation.generation.decoder import Decoder
    from mimo_train.evaluation.generation.options import Sampling
    from mimo_train.evaluation.generation.prompts import Prompt
    from mimo_train.evaluation.open_model import open_model
    from mimo_train.inputs.datasets import media_of

    model = open_model(folder)
    tokenizer = model.tokenizer
    answers = Answers(model.cfg, Decoder(model.pipeline), tokenizer, Sampling(), MOST)
    (taker,) = media_of(model.cfg)
    place, found = tokenizer.placeholder_id("<image>"), []
    for ids, images, *_ in questions:
        inputs = collate_media([torch.from_numpy(image) for image in images], taker.field)
        arguments = {"images": None if inputs is None else {"images": inputs}}
        found.append(answers(Prompt(ids, arguments, {"images": ids.count(place)})).tokens)
    return found


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """Adapters in both modules, trained in two processes: what is generated from has them merged."""
    cfg = config(
        "vlm_digits",
        tmp_path_factory.mktemp("run"),
        digits,
        "layout=two_processes",
        "modules.language.lora.rank=4",
        "modules.images.lora.rank=2",
        "modules.language.llm.init_std=0.3",  # so that answers differ
        "train.iters=2",
        "train.eval_samples=16",
        f"data.validation_shards={digits}/held_out",
        "data.sequence_length=120",
    )
    (folder, _, _), (_, questions, predictions) = run_ranks(_trained, 2, cfg)
    return folder, questions, predictions


def test_answers_are_those_of_the_evaluation_in_the_loop(trained):
    folder, questions, _ = trained
    (found,) = run_ranks(_answered, 1, folder, questions)
    assert found == [question[2] for question in questions] and len(found) == 16
    assert {len(question[1]) for question in questions} >= {0, 1}
    assert len({tuple(tokens) for tokens in found}) > 4


def test_predictions_are_those_of_greedy_decoding_up_to_the_first_wrong_token(trained):
    _, questions, predictions = trained
    tokenizer, ends = build_tokenizer("bytes"), 0
    for (_, _, _, truth, answer), line in zip(questions, predictions, strict=True):
        right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(truth, answer, strict=False)))
        assert line["exact_match"] == (right == len(truth))
        if right < min(len(truth), MOST):
            ends += 1
            is_cut = answer[right] not in tokenizer.template.stop_ids
            assert line["answer"] == tokenizer.decode(answer[: right + 1]).strip() + (" ..." if is_cut else "")
    assert ends > 4


def test_a_chat_keeps_turns_and_images_and_seeds_repeat_it(trained, tmp_path):
    from PIL import Image

    folder, *_ = trained
    image = tmp_path / "image.png"
    Image.new("RGB", (60, 40), "red").save(image)
    lines = f"/image {image}\nWhich?\nA?\n{'Is it one? ' * 9}\n"
    options = ["generate", folder, "--chat", "--max-new-tokens", "3"]
    drawn = [*options, "--temperature", "3", "--seed", "5"]
    ((code, out, err),) = run_ranks(conversation, 1, options, lines)
    assert code == 0 and len(out.splitlines()) == 2
    assert "leaves no room for an answer: the model was trained on data.sequence_length 120" in err
    once, again = (run_ranks(conversation, 1, drawn, lines)[0] for _ in range(2))
    assert once == again and once[0] == 0 and once[1] != out


def test_what_excludes_each_other_is_named_before_a_model_is_built(trained):
    folder, *_ = trained
    ((code, _, err),) = run_ranks(
        conversation, 1, ["generate", folder, "--prompt", "a", "--prompt-format", "text", "--chat"]
    )
    assert code == 1 and err.startswith("error: --prompt-format: text continues a prompt without turns")


PAGE = Path(__file__).parents[4] / "docs" / "generation.md"


def _program(text: str) -> str:
    """What it prints."""
    import contextlib

    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(text, str(PAGE), "exec"), {})
    return out.getvalue()


def test_the_program_of_the_page_answers_as_the_command(trained):
    folder, *_ = trained
    text = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    assert "runs/gpt_tiny" in text and "max_new_tokens=64" in text
    text = text.replace("runs/gpt_tiny", folder).replace("max_new_tokens=64", "max_new_tokens=5")
    (said,) = run_ranks(_program, 1, text)
    options = ["generate", folder, "--prompt", "It was", "--prompt-format", "text", "--max-new-tokens", "5"]
    ((code, out, err),) = run_ranks(conversation, 1, options)
    assert (code, out.strip()) == (0, said.strip()) and said.strip(), err

"""`mimo-train evaluate`: its numbers are those of the evaluation in training, at every layout; texts are generated."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.commands import command
from tests.dist.ranks import ROOT, run_ranks
from tests.dist.runs import USUAL_ADAM, config, train_rank
from tests.hang import HANG_SECONDS
from tests.tars import write_tar

LAYOUTS = {"": 1, "processes=2": 2, "tp=2": 2, "run": 2}
"""Number of processes by layout."""


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """(folder, last line of metrics.jsonl) of a run with adapters on two processes."""
    from mimo_train.logging.sinks.jsonl import read_metrics

    folder = tmp_path_factory.mktemp("run")
    cfg = config(
        "vlm_digits",
        folder,
        digits,
        "layout=two_processes",
        *USUAL_ADAM,
        "optim.lr=1e-2",
        "modules.language.optim.ema=0.95",
        "modules.images.lora.rank=4",
        "modules.language.llm.dropout=0.1",  # of training only
        "train.iters=40",
        "train.global_batch_size=8",
        "train.micro_batch_size=4",
        "train.eval_samples=37",
        "train.report_samples=12",
        "data.validation={letters: {shards: " + f"{digits}/held_out" + "}}",
        f"data.test_shards={digits}/held_out",
        "data.sequence_length=120",
    )
    run_ranks(train_rank, 2, cfg)
    return folder, read_metrics(folder / "metrics.jsonl")[-1]


def evaluated(place: Path, output: Path, *options: str, processes: int = 1) -> tuple[dict, list[dict]]:
    """Results and predictions."""
    ends = run_ranks(command, processes, ["evaluate", str(place), "--output", str(output), *options])
    assert all(code == 0 for code, _ in ends), ends
    lines = (output / "predictions.jsonl").read_text().splitlines()
    return json.loads((output / "results.json").read_text()), [json.loads(line) for line in lines]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_of_training_and_of_generated_answers(layout, trained, tmp_path):
    folder, line = trained
    decodes = layout in ("", "processes=2", "tp=2")
    options = ["--metric", "accuracy,vqa"] if decodes else []
    options += ["--processes", "2"] if layout == "processes=2" else ["--layout", layout] if layout else []
    results, predictions = evaluated(folder, tmp_path, *options, processes=LAYOUTS[layout])
    values = results["metrics"]
    for prefix in ("eval/letters/", "test/"):
        loss, exact_match = line[f"{prefix}loss"], line[f"{prefix}exact_match"]
        exact = layout in ("", "run")
        assert values[f"{prefix}loss"] == (loss if exact else pytest.approx(loss, rel=1e-6))
        assert values[f"{prefix}exact_match"] == exact_match and values[f"{prefix}samples"] == 37
        assert 0 < exact_match < 1
        if decodes:
            assert values[f"{prefix}accuracy"] == values[f"{prefix}vqa"] == exact_match
    of_set = results["sets"]["data.test_shards"]
    assert len(predictions) == 74 and (of_set["samples"], of_set["measured"]) == (40, 37)
    for prediction in predictions:
        scores = prediction["scores"]
        assert scores["exact_match"] == (prediction["prediction"] == prediction["truth"])
        assert not decodes or (scores["accuracy"] == scores["exact_match"] and prediction["references"])
    page = (tmp_path / "report.html").read_text()
    assert "eval/letters/loss" in page and page.count("data:image/png") > 10


def _averages(folder: Path) -> tuple[list[str], set[str]]:
    """Tensors that a model opened with `ema`, or its export, has other values of than the averages of its checkpoint,
    or the weights without one; and the modules of averages."""
    import torch

    from mimo_train.checkpoint import folders
    from mimo_train.checkpoint.format.read import Reader
    from mimo_train.checkpoint.local_shards import shards_of_model
    from mimo_train.evaluation.open_model import open_model
    from mimo_train.hf.export import Stored

    model = open_model(folder, merge=False, ema=True)
    reader, wrong, modules = Reader(folders.newest(folder)), [], set()
    stored = Stored(model.pipeline.model[0], model.folder, ema=True)
    for shard in shards_of_model(model.pipeline.model):
        expected = reader.whole(shard.key())
        if shard.key("ema") in reader.index.pieces:
            modules.add(shard.module)
            expected = reader.whole(shard.key("ema"))
            assert not expected.equal(reader.whole(shard.key())), shard.name
        if not (expected.equal(shard.tensor.detach()) and expected.equal(stored.load(shard.tensor))):
            wrong.append(shard.name)
    torch.distributed.destroy_process_group()
    return wrong, modules


def test_ema_reads_the_average_of_weights_that_have_one(trained, tmp_path):
    folder, line = trained
    assert run_ranks(_averages, 1, folder) == [([], {"language"})]
    results, _ = evaluated(folder, tmp_path, "--split", "test", "--ema")
    assert results["settings"]["ema"] and results["metrics"]["test/loss"] != pytest.approx(line["test/loss"], rel=1e-3)


def test_ema_requires_an_average():
    from mimo_train.config.errors import UserError
    from mimo_train.evaluation.generation.source import require_average
    from tests.unit.configs import load

    frozen = ("modules.images.freeze=[encoder,projector]", "modules.images.optim.ema=0.9")
    for cfg in (load("vlm_digits"), load("vlm_digits", *frozen)):
        with pytest.raises(UserError, match="--ema: run has no average of weights .optim.ema is 0"):
            require_average(cfg, Path("run"))
    require_average(load("vlm_digits", "modules.images.optim.ema=0.9"), Path("run"))


def test_the_command_starts_its_ranks_and_names_the_one_that_dies(trained, tmp_path):
    """As a user starts it: the user's metric, found in the working directory, ends its rank."""
    folder, _ = trained
    code = """import os, signal
def deadly(predictions, references):
    open("scored", "w").write(f"{len(predictions)} {len(references)}")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "mine.py").write_text(code)
    options = ["--metric", "mine:deadly", "--split", "test", "--limit", "6", "--processes", "2"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mimo_train.cli", "evaluate", folder, *options, "--output", tmp_path / "out"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert (tmp_path / "scored").read_text() == "6 6", done.stderr
    assert done.returncode == 1 and not (tmp_path / "out" / "results.json").exists()
    assert re.search(r"mimo-train: rank 0 \(process \d+\) was killed by SIGKILL.* All ranks", done.stderr)


@pytest.fixture
def dialogues(tmp_path) -> str:
    """A shard with two answered turns in the first sample, and one in the others. The last one's prompt fills the
    sequence."""
    from PIL import Image

    image = io.BytesIO()
    Image.new("RGB", (16, 16)).save(image, format="PNG")
    turns = [("human", "<image>Which digit?"), ("gpt", "7"), ("human", "And now <image>?"), ("gpt", "3 and 4")]
    records = [
        {"conversations": [{"from": role, "value": text} for role, text in turns], "answers": [["7"], ["3", "4"]]},
        {"conversations": [{"from": role, "value": text} for role, text in turns[:2]], "answers": ["7", "seven"]},
        {"conversations": [{"from": "human", "value": "x" * 116}, {"from": "gpt", "value": "7"}]},
    ]
    members = []
    for number, record in enumerate(records):
        members.append((f"{number}.json", json.dumps(record).encode()))
        members += [(f"{number}.{at}.png", image.getvalue()) for at in range(2 - number)]
    return str(write_tar(tmp_path / "dialogues" / "a.tar", members).parent)


def test_every_turn_is_scored_with_the_true_turns_before_it(trained, dialogues, tmp_path):
    folder, _ = trained
    results, lines = evaluated(folder, tmp_path, "--data", dialogues, "--metric", "accuracy")
    assert [(line["key"], line["turn"], line["prompt"]) for line in lines] == [
        ("0", 0, "Which digit?"),
        ("0", 1, "And now <image>?"),
        ("1", 0, "Which digit?"),
        ("2", 0, "x" * 116),
    ]
    assert [line["references"] for line in lines] == [["7"], ["3 and 4"], ["7", "seven"], ["7"]]
    assert results["sets"]["data.validation_shards"]["references"] == {"turn": 3, "answers": 1}
    assert lines[-1]["prediction"] == "" and lines[-1]["scores"]["tokens"] == 1
    for line in lines[:-1]:
        # The generated answer begins like the true one as far as the model predicts it after the true tokens.
        assert line["scores"]["exact_match"] == (line["prediction"] == line["truth"])
    options = ("--references", "answers", "--limit", "2")
    _, named = evaluated(folder, tmp_path, "--data", dialogues, "--metric", "accuracy", *options)
    assert [line["references"] for line in named] == [["7"], ["3", "4"], ["7", "seven"]]
    assert [line["prediction"] for line in named] == [line["prediction"] for line in lines[:3]]


@pytest.fixture
def prompts(tmp_path) -> Path:
    """A file with four prompts, three of them with an image."""
    from PIL import Image

    for name, colour in (("a", "white"), ("b", "black")):
        Image.new("RGB", (16, 16), colour).save(tmp_path / f"{name}.png")
    lines = [{"prompt": "Hello?", "id": 7}, *({"prompt": "Which digit?", "image": f"{name}.png"} for name in "aba")]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_prompts_of_a_file_are_answered_in_order_and_continued(trained, prompts, tmp_path):
    folder, _ = trained
    asked = [json.loads(line) for line in prompts.read_text().splitlines()]

    def answers(name: str, *options: str, processes: int = 1) -> list[dict]:
        out = tmp_path / name
        arguments = ["evaluate", str(folder), "--prompts", str(prompts), "--predictions", str(out), *options]
        ends = run_ranks(command, processes, [*arguments, "--max-new-tokens", "6", "--output", str(tmp_path / "logs")])
        assert all(code == 0 for code, _ in ends), ends
        assert not out.with_name(f"{name}.partial").exists()
        return [json.loads(line) for line in out.read_text().splitlines()]

    alone = answers("alone.jsonl")
    assert [{key: line[key] for key in record} for line, record in zip(alone, asked, strict=True)] == asked
    assert all(line["prediction"] for line in alone)
    drawn = ("--temperature", "2", "--seed", "5")
    assert answers("drawn.jsonl", *drawn) == answers("drawn2.jsonl", *drawn, "--processes", "2", processes=2) != alone

    # An interrupted command leaves its lines; the same command keeps them, and another one does not.
    import hashlib

    checkpoint = str(folder / "checkpoints" / "step_00000040")
    facts = {"checkpoint": checkpoint, "ema": False, "max_new_tokens": 6}
    facts |= {"seed": None, "temperature": 0.0, "top_k": 0, "top_p": 1.0}
    identity = hashlib.sha256(prompts.read_bytes() + json.dumps(facts, sort_keys=True).encode()).hexdigest()
    (tmp_path / "again.jsonl.partial").write_text(f'{identity}\n{{"prediction": "kept"}}\n{{"cut off')
    assert answers("again.jsonl") == [{"prediction": "kept"}, *alone[1:]]
    (tmp_path / "drawn.jsonl").unlink()
    (tmp_path / "drawn.jsonl.partial").write_text(f'{identity}\n{{"prediction": "of another command"}}\n')
    assert "of another command" not in str(answers("drawn.jsonl", *drawn))


def _directory_evaluated(folder: Path, out: Path) -> list[tuple]:
    from tests.dist.hf.models import make_llava

    make_llava(out)
    options = ["evaluate", str(out), "--data", str(folder), "--limit", "10"]
    code, text = command([*options, "--ema"])
    assert code == 1 and "--ema: " in text
    plain = command([*options, "--output", str(out / "plain")])
    return [plain, command([*options, "--output", str(out / "texts"), "--metric", "accuracy", "--max-new-tokens", "4"])]


def test_a_directory_of_transformers_is_evaluated(digits, tmp_path):
    (ends,) = run_ranks(_directory_evaluated, 1, digits / "held_out", tmp_path)
    assert all(code == 0 for code, _ in ends), ends
    plain, texts = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("plain", "texts"))
    assert plain["settings"]["sequence_length"] % 128 == 0
    assert plain["metrics"]["eval/samples"] == 10 and texts["metrics"]["eval/loss"] == plain["metrics"]["eval/loss"]
    predictions, answers = (
        [json.loads(line)["prediction"] for line in (tmp_path / name / "predictions.jsonl").read_text().splitlines()]
        for name in ("plain", "texts")
    )
    for prediction, answer in zip(predictions, answers, strict=True):
        # All predictions are wrong from the first token on, which greedy decoding begins with too.
        assert answer.startswith(prediction.removesuffix(" ...").rstrip("\ufffd"))
    assert len(set(answers)) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--metric", "anl"], "--metric: no metric 'anl'. Did you mean anls?"),
        (["--split", "tests"], "--split: no set 'tests'. Choose from validation, validation/letters, test"),
        (["--seed", "1"], "--seed: requires --metric"),
        (["--layout", "run", "--processes", "2"], "--processes: the layout decides the number of processes"),
        (
            ["--metric", "vqa", "--references", "replies"],
            "--references: .*key '000000': replies must be a text or a list",
        ),
        (["--data", "nowhere"], "data.validation_shards: .*nowhere"),
        (["--prompts", "x.jsonl", "--metric", "vqa"], "--prompts: answers prompts .* Leave out --metric"),
        (["--layout", "tp=3"], "modules.language.layout.tp: "),
    ],
)
def test_errors_name_the_option(options, message, trained, tmp_path):
    folder, _ = trained
    ((code, text),) = run_ranks(command, 1, ["evaluate", str(folder), "--output", str(tmp_path), *options])
    assert code == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(text)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("language_tp", "--layout: no file .*Did you mean language_tp2"),
        ("tp=two", "--layout: expected NAME=NUMBER, such as tp=2 or images.dp=4, got 'tp=two'"),
        ("tpp=2", "modules.language.layout.tpp: "),
        ("audio.tp=2", "modules.audio: --layout names it, but the modules of this model are images, language"),
        ("language_tp2", "modules.images.layout: missing in --layout language_tp2"),
    ],
)
def test_a_wrong_layout_is_named(layout, message):
    from mimo_train.config.errors import UserError
    from mimo_train.evaluation.layouts import with_layout
    from tests.unit.configs import load

    with pytest.raises(UserError, match=message):
        with_layout(load("vlm_digits"), layout)


def test_requests_of_tasks_have_the_answers_of_evaluate(trained):
    folder, _ = trained
    lines = [json.loads(line) for line in (folder / "test_predictions.jsonl").read_text().splitlines()]
    ends = run_ranks(_of_requests, 2, folder, 12)
    assert ends[0] == ends[1] and len(ends[0]) == 12
    for line, (text, log_probability, is_greedy) in zip(lines, ends[0], strict=False):
        assert (text == line["truth"]) == line["exact_match"]
        assert is_greedy or not line["exact_match"]
        end_of_turn = log_probability + line["loss"] * line["tokens"]  # which the text lacks
        assert end_of_turn > -1e-3 and (end_of_turn < 2 or not line["exact_match"])


def _of_requests(folder: Path, count: int) -> list[tuple[str, float, bool]]:
    """On each of two replicas: the answers to requests, and scores of the true answers."""
    import torch.distributed as dist

    from data.samples.originals import read_conversation, read_originals
    from mimo_train.evaluation.benchmarks.model import ModelAnswers
    from mimo_train.evaluation.benchmarks.requests import decoding_of, messages_of, request_of
    from mimo_train.evaluation.open_model import open_model
    from mimo_train.inputs.datasets import build_dataset, splits_of

    model = open_model(folder, processes=2, merge=False)
    dataset = build_dataset(model.cfg, model.tokenizer, held_out=splits_of(model.cfg)["test"])
    requests, truths = [], []
    for number in range(count):
        conversation = read_conversation(dataset, number)
        requests.append(request_of(messages_of(conversation, read_originals(dataset, number))[:1]))
        truths.append(conversation.turns[1].text)
    backend = ModelAnswers(model.cfg, model.pipeline, model.tokenizer)
    texts = backend.answer(requests, decoding_of({}))
    scores = backend.score(list(zip(requests, truths, strict=True)))
    _stop_between_losses_and_answers(model)
    dist.destroy_process_group()
    return [(text, *score) for text, score in zip(texts, scores, strict=True)]


def _stop_between_losses_and_answers(model) -> None:
    """A rank that is asked to end the run ends the evaluation of a long set before its texts are complete."""
    from dataclasses import replace

    from mimo_train.evaluation.held_out import Ending, EvaluationStopped, HeldOut
    from mimo_train.inputs.datasets import splits_of

    of, measured = replace(splits_of(model.cfg)["test"], samples=3, metrics=("accuracy",)), list[int]()
    votes = Ending(votes=lambda: (sum(measured) == 3, False))
    held_out = HeldOut(model.run, model.pipeline, model.tokenizer, of=of, ending=votes)
    with pytest.raises(EvaluationStopped) as stopped:
        held_out.evaluate(progress=measured.append)
    assert sum(measured) == 3 and stopped.value.votes == (True, False)
    held_out.dataset.close()

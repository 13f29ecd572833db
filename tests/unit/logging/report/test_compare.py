"""The page and the table of `compare`: two runs of different tasks, one still going, and what cannot be read."""

import json
import math

import pytest

from mimo_train.cli import main
from mimo_train.logging import progress
from mimo_train.logging.report.compare import compared_samples, metric_tables, ranking, read_runs
from mimo_train.logging.sinks.jsonl import JsonlSink
from tests.unit.logging.report.made_up_runs import PNG
from tests.unit.logging.report.parsed_page import ParsedPage


def prediction(key: str, answer: str, truth: str = "7") -> str:
    entry = {"step": 1, "shard": f"/somewhere/{answer}/a.tar", "key": key, "turn": 0, "question": "Which <digit>?"}
    return json.dumps(entry | {"answer": answer, "truth": truth, "exact_match": answer == truth}) + "\n"


def make_run(folder, *, rate: float, batch: int, seconds: float, steps: int = 20, extra: str = "", answers="77"):
    """A run whose loss is 10 / step, evaluated every 10 steps."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run: {{dir: {folder}}}\noptim: {{lr: {rate}}}\ndata: {{pack: true}}\n")
    sink = JsonlSink(folder / "metrics.jsonl", 0)
    for step in range(1, steps + 1):
        sink.log(step, batch * step, {"lm loss": 10 / step, "step_seconds": seconds})
        if step % 10 == 0:
            values = {"eval/loss": rate * 10 / step, "eval/samples": 8} | ({f"eval/{extra}": 0.5} if extra else {})
            sink.log(step, batch * step, values)
    sink.close()
    progress.job_started(folder, world_size=1, step=0)
    (folder / "predictions.jsonl").write_text(
        "".join(prediction(str(key), answer) for key, answer in enumerate(answers)) + '{"torn": '
    )
    return folder


@pytest.fixture
def runs(tmp_path):
    first = make_run(tmp_path / "runs" / "first", rate=0.1, batch=32, seconds=1.0, answers="771")
    second = make_run(
        tmp_path / "runs" / "second", rate=0.2, batch=16, seconds=4.0, steps=10, extra="margin", answers="717"
    )
    sample = {
        "shard": "x/a.tar",
        "key": "1",
        "images": [PNG],
        "clips": [],
        "question": "q",
        "answer": "1",
        "truth": "7",
    }
    (second / "samples.json").write_text(json.dumps([sample | {"correct": False}]))
    progress.append(first, progress.EXIT, step=20, reason="finished", stop_early="eval/loss has not improved")
    return first, second


def test_a_page_of_two_runs(runs, tmp_path, capsys):
    page_file = tmp_path / "page.html"
    assert main(["compare", *map(str, runs), "--to", str(page_file), "--metric", "eval/loss", "--mode", "min"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[:3]] == ["run", "first", "second"] and "optim.lr" in table[0]
    page = ParsedPage(page_file.read_text())
    assert not page.outside()
    for part in (
        "first : finished at step 20: eval/loss has not improved",
        "second : running or crashed, step 10",
        "first 0.05 at step 20 second 0.2 at step 10",
        "optim.lr 0.1 0.2",
        "After 160 samples consumed",  # what the second has seen
        "After 20 s of training",  # what the first has needed
        "Which <digit>?",
    ):
        assert part in page.words, part
    assert "data.pack" not in page.words and "run.dir" not in page.words
    labels = [attrs["aria-label"] for attrs in page.all("div", "plot")]
    assert any(label.startswith("eval/loss. first: 0.1 at 320 samples") for label in labels)
    assert any(label.startswith("lm loss, by training time. first: ") and "at 1 seconds" in label for label in labels)
    assert len(page.all("img")) == 1


def test_metrics_at_equal_samples_and_at_equal_time(runs):
    tables = {table.title: dict(table.rows) for table in metric_tables(read_runs(runs))}
    # After 160 samples the first has made 5 steps; its evaluation came later.
    assert tables["After 160 samples consumed"]["eval/loss"] == ["", "0.2"]
    assert tables["After 20 s of training"]["eval/loss"] == ["0.05", ""]
    assert tables["Last values"] == {"lm loss": ["0.5", "1"], "eval/loss": ["0.05", "0.2"], "eval/margin": ["", "0.5"]}


def test_the_loss_of_every_task_is_compared(runs):
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 21, "consumed_samples": 672, "loss": 0.25}) + "\n")
    assert dict(metric_tables(read_runs(runs))[-1].rows)["loss"] == ["0.25", ""]


def test_predictions_of_the_same_sample_side_by_side(runs):
    samples, total = compared_samples(read_runs(runs))
    assert total == 3
    assert [(sample.place, [right for _, right in sample.answers]) for sample in samples] == [
        ("a.tar 1", [True, False]),  # those first on which runs differ
        ("a.tar 2", [False, True]),
        ("a.tar 0", [True, True]),
    ]
    assert samples[0].images == [PNG] and samples[0].answers[1] == ("1", False)


def test_a_folder_of_runs_stands_for_them_and_damage_is_named(runs, tmp_path, capsys):
    (runs[0] / "config.yaml").write_text("a: [")
    (runs[1] / "predictions.jsonl").unlink()
    empty = tmp_path / "runs" / "third"
    make_run(empty, rate=math.nan, batch=1, seconds=1.0, steps=0)
    assert main(["compare", str(tmp_path / "runs"), "--to", str(tmp_path / "page.html")]) == 0
    assert "warning: first: config.yaml cannot be read" in capsys.readouterr().out
    found = read_runs([tmp_path / "runs"])
    assert [run.name for run in found] == ["first", "third", "second"]  # by length of the name, as task_2 and task_10
    assert [run.name for run, _ in ranking(found, "eval/loss", "max")] == ["second", "first", "third"]
    assert main(["compare", str(tmp_path / "runs"), "--metric", "eval/none", "--mode", "min"]) == 1
    assert main(["compare", str(tmp_path), "--metric", "eval/loss"]) == 1
    assert main(["compare", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    for part in ("--metric: no run has eval/none", "--metric and --mode belong together", "is not the folder of a run"):
        assert part in error

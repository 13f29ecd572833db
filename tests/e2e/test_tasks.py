"""`mimo-train evaluate --tasks` with lmms-eval: its exact match on shards is ours. On demand: `MIMO_LMMS` is a Python
of an environment that has it (docs/evaluation.md)."""

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.tars import write_tar

PYTHON, VLLM = os.environ.get("MIMO_LMMS", ""), os.environ.get("MIMO_VLLM", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs MIMO_LMMS, a Python that has lmms-eval")
COMMAND = "import sys; from mimo_train.cli import main; sys.exit(main())"
TASK = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: answer
generation_kwargs: {max_new_tokens: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOICE = TASK.replace("colours", "choices").replace("generate_until", "multiple_choice").replace(
    "generation_kwargs: {max_new_tokens: 8}", "doc_to_choice: [red, green]\ntarget_delimiter: ''"
).replace("exact_match", "acc").replace("answer", "number")  # fmt: skip


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [PYTHON, "-c", COMMAND, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The working directory of a run whose answers are partly right."""
    folder = tmp_path_factory.mktemp("work")
    sizes = ("train.iters=150", "train.eval_interval=150", "train.eval_samples=48", "checkpoint.save_interval=150")
    sizes += ("data.max_bad_samples=1",)
    done = run(folder, "train", "vlm_digits", "layout=one_process", "run.dir=run", *sizes)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def tasks(folder: Path, name: str, *arguments: str) -> tuple[subprocess.CompletedProcess, dict]:
    done = run(folder, "evaluate", "run", "--output", name, *arguments)
    return done, json.loads((folder / name / "tasks.json").read_text())


def answers(folder: Path) -> list[str]:
    (file,) = folder.rglob("*_samples_shards.jsonl")
    return [json.loads(line)["filtered_resps"] for line in file.read_text().splitlines()]


def test_the_local_task_has_the_exact_match_of_evaluate(trained):
    done = run(trained, "evaluate", "run", "--output", "ours")
    assert done.returncode == 0, done.stderr[-3000:]
    ours = json.loads((trained / "ours" / "results.json").read_text())["metrics"]
    assert 0 < ours["eval/exact_match"] < 1 and ours["eval/samples"] == 48
    for name, options in (("one", ()), ("two", ("--processes", "2"))):
        done, theirs = tasks(trained, name, "--tasks", "shards", "--output-path", f"{name}/lmms", *options)
        assert done.returncode == 0, done.stderr[-3000:]
        assert theirs["tasks"]["shards"]["exact_match"] == ours["eval/exact_match"], name
        assert len(answers(trained / name)) == 48
    assert answers(trained / "one") == answers(trained / "two")


def test_a_damaged_image_is_a_bad_sample(trained):
    (shard, *_) = sorted(trained.rglob("held_out/*.tar"))
    with tarfile.open(shard) as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar]
    keys = list(dict.fromkeys(name.partition(".")[0] for name, _ in members))[:12]
    members = [(name, raw) for name, raw in members if name.partition(".")[0] in keys]
    damaged = next(at for at, (name, _) in enumerate(members) if name.endswith(".png"))
    members[damaged] = members[damaged][0], members[damaged][1][:60]
    write_tar(trained / "damaged" / "s.tar", members)
    samples = ("--data", "damaged", "--limit", "0")
    assert run(trained, "evaluate", "run", "--output", "ours_damaged", *samples).returncode == 0
    ours = json.loads((trained / "ours_damaged" / "results.json").read_text())["metrics"]
    done, theirs = tasks(trained, "damaged_task", "--tasks", "shards", *samples)
    assert done.returncode == 0, done.stderr[-3000:]
    assert theirs["tasks"]["shards"]["exact_match"] == pytest.approx(ours["eval/exact_match"])


@pytest.mark.skipif(not VLLM, reason="needs MIMO_VLLM too")
def test_a_server_of_vllm_gives_our_answers(trained):
    for name, options in (("model", ()), ("vllm", ("--backend", "vllm", "--vllm-arguments=--enforce-eager"))):
        done, theirs = tasks(trained, name, "--tasks", "shards", "--output-path", f"{name}/lmms", *options)
        assert done.returncode == 0 and not theirs["failed"], done.stderr[-3000:]
    assert answers(trained / "vllm") == answers(trained / "model")


def test_tasks_of_a_folder_and_tasks_that_fail(trained):
    (trained / "more").mkdir()
    lines = [{"question": f"Which colour is {at}?", "answer": "red", "number": at % 2} for at in range(5)]
    file = trained / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    broken = TASK.replace("colours", "broken").replace("answer\n", "answer\nprocess_results: !function code.fail\n")
    for name, text in (("colours", TASK), ("choices", CHOICE), ("broken", broken)):
        (trained / "more" / f"{name}.yaml").write_text(text.replace("FILE", str(file)))
    (trained / "more" / "code.py").write_text("def fail(doc, results):\n    raise KeyError('no such field')\n")
    more = ("--include-path", "more", "--limit", "3")
    done, results = tasks(trained, "more_tasks", "--tasks", "colours,choices,broken,colour", *more)
    assert done.returncode == 1
    assert results["tasks"].keys() == {"colours", "choices"} and results["limit"] == 3
    assert 0 <= results["tasks"]["choices"]["acc"] <= 1
    assert results["failed"]["broken"] == "KeyError: 'no such field'"
    assert results["failed"]["colour"].startswith("lmms-eval has no such task. Did you mean colours")
    assert "error: --tasks: 2 of 4 failed: broken: KeyError" in done.stderr

"""`python -m benchmarks.gpu`: a rehearsal of its sections on the CPU, its sizes for a GPU, and what goes wrong."""

import json
from dataclasses import replace

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import sections, sizes, work
from benchmarks.gpu_check.jobs import Jobs, Outcome


@pytest.fixture(scope="module")
def jobs():
    with Jobs(600) as jobs:
        yield jobs


def test_a_rehearsal_writes_its_numbers_and_a_record(tmp_path, monkeypatch, capsys):
    shortened = replace(sizes.TINY, compilers=("eager",), packed=sizes.TINY.filled, rounds=1)
    monkeypatch.setattr(sections, "TINY", shortened)
    out, record = tmp_path / "gpu.json", tmp_path / "gpu.md"
    arguments = ["--tiny", "a", "c", "d", "e", "g", "h", "i", "--json", f"{out}", "--to", f"{record}"]
    assert command.main(arguments) == 0, capsys.readouterr().out
    found = json.loads(out.read_text())["sections"]
    assert list(found) == ["a", "c", "d", "e", "g", "h", "i"]
    rows = {letter: [row["values"] for row in section["rows"]] for letter, section in found.items()}
    step, last = (values for values in rows["c"] if values)  # of one name here: the last one counts
    assert step["tokens_per_second"] > step["samples_per_second"] > 0
    assert step["estimate"] > 0 and len(step["kernels"]) == 10
    (against,) = rows["d"]
    assert set(against["seconds"]) == {"transformers", "mimo-train"} and against["rounds"] == 1
    matmul, _, compiled = rows["e"]
    assert matmul["median"] > 0 and found["e"]["rows"][1]["state"] == "skipped"
    assert compiled["ratio"] == compiled["samples_per_second"] / last["samples_per_second"]
    synchronous, asynchronous = rows["h"]
    assert synchronous["steps_in_flight"] == 0 and asynchronous["steps_in_flight"] > 0
    assert synchronous["bytes"] == pytest.approx(asynchronous["bytes"], rel=0.01)
    (reading,) = rows["i"]
    assert reading["samples"] == 4 * sizes.TINY.read_steps and reading["wanted"] == last["samples_per_second"]
    text = record.read_text()
    assert sections.FORMULA in text and "python -m benchmarks.gpu --tiny" in text and "| (h) | " in text


@pytest.mark.parametrize("shape", ["filled", "packed", "padded"])
def test_every_model_can_be_run_on_a_gpu(shape):
    """Their configs have no fault, and a smaller candidate needs less memory."""
    shape = getattr(sizes.GPU, shape)
    for model in sizes.GPU.models:
        candidates = [
            [*sizes.COMMON, *model.changes, *shape.changes, *changes] for changes in shape.candidates.values()
        ]
        found = work.estimates(config=sections.CONFIG, candidates=candidates, of_device="cuda")
        assert found == sorted(found, reverse=True) and len(set(found)) == len(found)
        assert found[-1] / 2**30 < sections.ROOM * 139, f"{model.name} fits a device of 139 GiB"


@pytest.mark.parametrize("change", ["train.fp8=tensorwise", "train.compile=layers"])
def test_fp8_and_compiled_layers_can_be_run_on_a_gpu(change):
    shape = sizes.GPU.filled
    for model in sizes.GPU.models[:2]:
        first = next(iter(shape.candidates.values()))
        both = [[*sizes.COMMON, *model.changes, *shape.changes, *first, *extra] for extra in ((), (change,))]
        plain, found = work.estimates(config=sections.CONFIG, candidates=both, of_device="cuda")
        assert found > plain if "fp8" in change else found == plain


def section(jobs, letter: str, **of_machine) -> list[sections.Row]:
    found = sections.Sections(jobs, tiny=not of_machine)
    found.machine = Outcome("ok", {"torch": "2", "gpus": [], "packages": {"transformer-engine": None}} | of_machine)
    return list(found.run(letter))

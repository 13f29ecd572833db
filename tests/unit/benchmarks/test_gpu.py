"""`python -m benchmarks.gpu`: a rehearsal of its sections on the CPU, its sizes for a GPU, and what goes wrong."""

import json
from dataclasses import replace
from functools import partial

import pytest

from benchmarks import turns
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import sections, sizes, work
from benchmarks.gpu_check import checks
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


def test_what_is_missing_is_named(jobs):
    (row,) = section(jobs, "c", gpus=[])
    assert (row.line.state, row.line.result) == ("skipped", checks.NO_CUDA.text)
    (row,) = section(jobs, "g", gpus=[{"memory": 20.0, "capability": "9.0"}])
    assert (row.line.state, row.line.result) == ("skipped", "no step of (c) was measured")
    rows = section(jobs, "c", gpus=[{"memory": 20.0, "capability": "9.0"}])
    assert "Transformer Engine is not installed" in rows[1].line.result
    seven = rows[-1].line
    assert seven.state == "skipped" and "of 92% of the device's 20" in seven.result


def test_a_side_that_ends_by_itself_says_why(tmp_path):
    def run(_turns):
        raise RuntimeError("broken on purpose")

    with pytest.raises(turns.SideEnded, match=r"rank 0 of ours .* ours_0.log: .*broken on purpose"):
        turns.Side("ours", run, tmp_path)


def test_sides_make_blocks_in_turns_and_stand_still_meanwhile(tmp_path):
    """Each begins every other round; neither steps while the other does."""
    order = tmp_path / "order"

    def run(name, taken):
        while True:
            taken.before_step()
            with order.open("a") as file:
                file.write(name)

    with turns.Side("a", partial(run, "a"), tmp_path) as one, turns.Side("b", partial(run, "b"), tmp_path) as other:
        found = turns.take_turns([one, other], rounds=2, steps=3)
    assert order.read_text() == "bbbaaa" + "aaabbb"
    assert [len(found[name]) for name in ("a", "b")] == [2, 2] and all(block.memory > 0 for block in found["a"])


def test_a_ratio_is_that_of_rounds():
    def block(wall):
        return turns.Block((wall, wall, wall), 1)

    found = turns.ratio([block(1), block(4), block(9)], [block(1), block(2), block(3)], turns.WALL)
    assert found.median == 2 and 1 <= found.low < 2 < found.high <= 3

import json
import math
import random

import pytest

from mimo_train.logging.sinks.jsonl import JsonlSink, read_metrics


def write(path, steps, resumed_step=0):
    sink = JsonlSink(path, resumed_step)
    for step in steps:
        sink.log(step, 32 * step, {"lm loss": 1 / (step + 3)})
    sink.close()


def test_a_line_is_compact_json_with_step_and_samples_first(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", 0)
    sink.log(1, 32, {"lm loss": 0.5, "eval/samples": 512})
    sink.close()
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step":1,"consumed_samples":32,"lm loss":0.5,"eval/samples":512}\n'
    )


def test_floats_come_back_bit_for_bit(tmp_path):
    generator = random.Random(0)
    values = [generator.uniform(-1, 1) * 10 ** generator.randint(-300, 300) for _ in range(500)] + [0.1 + 0.2, -0.0]
    sink = JsonlSink(tmp_path / "metrics.jsonl", 0)
    for step, value in enumerate(values, start=1):
        sink.log(step, step, {"value": value})
    sink.close()
    read = [line["value"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert [value.hex() for value in read] == [value.hex() for value in values]


def test_values_that_are_not_finite_are_valid_json_and_come_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, 0)
    sink.log(1, 32, {"a": math.nan, "b": math.inf, "c": -math.inf})
    sink.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "step": 1,
        "consumed_samples": 32,
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
    }
    (line,) = read_metrics(path)
    assert math.isnan(line["a"]) and line["b"] == math.inf and line["c"] == -math.inf


def test_resume_drops_later_lines_and_gives_the_bytes_of_an_uninterrupted_run(tmp_path):
    write(tmp_path / "whole.jsonl", range(1, 11))
    write(tmp_path / "cut.jsonl", range(1, 8))
    write(tmp_path / "cut.jsonl", range(5, 11), resumed_step=4)
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cut.jsonl", "whole.jsonl"]


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_resume_drops_a_torn_last_line(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step":4,"consumed_samples":128,"lm loss":0.25}\n'[:cut])
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    write(path, [], resumed_step=4)
    assert path.read_bytes() == whole


def test_a_last_line_that_lost_its_newline_only_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    write(path, [], resumed_step=3)
    assert path.read_bytes() == whole


def test_an_evaluation_of_the_resumed_step_stays_and_a_new_run_starts_empty(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, 0)
    sink.log(0, 0, {"eval/loss": 5.0})
    sink.log(1, 32, {"lm loss": 5.0})
    sink.log(1, 32, {"eval/loss": 4.9})
    sink.close()
    JsonlSink(path, 1).close()
    assert len(read_metrics(path)) == 3
    JsonlSink(path, 0).close()
    assert read_metrics(path) == []


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step":\n{"step":3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2,"):
        read_metrics(path)
    with pytest.raises(ValueError, match="line 2"):
        JsonlSink(path, 3)
    assert path.read_text().count("\n") == 3, "a file that cannot be read is left as it is"

"""The console: a bar on a terminal, lines elsewhere, and the progress of long work."""

import io

import pytest

from mimo_train.logging.console import Console, CountBar, duration


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


VALUES = {
    "lm loss": 2.13451,
    "grad_norm": 1.2123,
    "learning_rate/images": 4e-4,
    "learning_rate/language": 4e-4,
    "tokens_per_second": 9120.4,
    "step_seconds": 0.2201,
}


def lines_of(stream):
    return stream.getvalue().splitlines()


def test_a_plain_line_has_every_number():
    stream = io.StringIO()
    Console(800, 0, stream, Clock()).step(20, VALUES, "busiest: a")
    assert lines_of(stream) == [
        "step 20/800  lm loss 2.1345  grad norm 1.21  lr 4.0e-04  9,120 tokens/s  0.22 s/step  3 min left  busiest: a"
    ]


def test_every_named_loss_is_shown_but_those_of_layers(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    values = VALUES | {"kl": 0.0001234, "moe/z_loss_layer_0": 7.0, "loss/charts": 1.5}
    for stream in (io.StringIO(), Terminal()):
        console = Console(800, 0, stream, Clock())
        console.step(20, values, losses=("kl", "lm loss", "loss/charts", "moe/z_loss_layer_0"))
        console.close()
        assert "lm loss 2.1345  kl 0.0001234  " in stream.getvalue() and "z_loss" not in stream.getvalue()


def test_learning_rates_that_differ_are_named_and_missing_values_left_out():
    stream = io.StringIO()
    values = {"learning_rate/images": 1e-3, "learning_rate/language": 2e-5, "lm loss": float("nan")}
    values |= {"timers/augment": 0.01234, "timers/my work": 2.0}
    Console(800, 0, stream, Clock()).step(20, values)
    assert lines_of(stream) == [
        "step 20/800  lm loss nan  lr images 1.0e-03 language 2.0e-05  (augment 0.0123 s, my work 2 s)"
    ]


def test_at_most_one_line_a_second_but_first_and_last_always():
    stream, clock = io.StringIO(), Clock()
    console = Console(100, 0, stream, clock)
    for step in range(1, 101):
        console.step(step, {})
        clock.now += 0.25
    console.close()
    steps = [int(line.split()[1].split("/")[0]) for line in lines_of(stream)]
    assert steps == [*range(1, 100, 4), 100]


def test_a_run_that_ends_early_shows_its_last_step_on_close():
    stream = io.StringIO()
    console = Console(100, 0, stream, Clock())
    for step in (1, 2, 3):
        console.step(step, {})
    console.close()
    console.close()
    assert lines_of(stream) == ["step 1/100", "step 3/100"]


def test_evaluations_and_messages_are_never_held_back():
    stream = io.StringIO()
    console = Console(100, 0, stream, Clock())
    console.step(1, {})
    console.message("saved checkpoints/step_00000001")
    console.evaluation(1, {"eval/loss": 0.31214, "eval/exact_match": 0.9121, "eval/samples": 512})
    assert lines_of(stream)[1:] == [
        "saved checkpoints/step_00000001",
        "evaluation at step 1  loss 0.3121  exact match 91.2%  512 samples",
    ]
    nan = float("nan")
    console.evaluation(2, {"eval/loss": nan, "eval/exact_match": nan, "eval/samples": 0})
    console.evaluation(3, {"eval/loss": nan, "eval/samples": 4})
    assert lines_of(stream)[3:] == [
        "evaluation at step 2  no loss  no exact match  0 samples",
        "evaluation at step 3  loss nan  4 samples",
    ]


def test_time_left_is_from_the_median_step():
    stream, clock = io.StringIO(), Clock()
    console = Console(110, 0, stream, clock)
    for step, seconds in enumerate([60.0, 1.0, 1.0, float("nan"), 1.0], start=6):
        console.step(step, {"step_seconds": seconds})
        clock.now += 1
    assert lines_of(stream)[-1] == "step 10/110  1 s/step  2 min left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.22, "0.22 s"),
        (90, "2 min"),
        (12000, "3 h 20 min"),
        (187200, "2 d 4 h"),
        (float("inf"), "unknown"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_a_terminal_shows_a_bar_with_messages_above_and_gets_its_cursor_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    console = Console(800, 10, stream)
    console.step(20, VALUES)
    console.message("plain [brackets] stay")
    console.evaluation(20, {"eval/exact_match": 0.5})
    console.close()
    text = stream.getvalue()
    for part in ("step 20/800", "lm loss 2.1345", "9,120 tokens/s", "0.22 s/step", "3 min left"):
        assert part in text
    assert "plain [brackets] stay" in text and "exact match 50.0%" in text
    assert text.rindex("\x1b[?25h") > text.index("\x1b[?25l")


def test_a_line_every_ten_seconds_has_the_time_that_is_left():
    lines, now = [], [0.0]
    bar = CountBar("evaluation at step 4", 1200, "samples", write=lines.append, clock=lambda: now[0])
    for _ in range(3):
        now[0] += 6
        bar.add(200)
    assert lines == ["evaluation at step 4: 400 of 1,200 samples, 24 s left"] and bar.done == 600
    unknown = CountBar("counting", None, write=lines.append, clock=lambda: now[0])
    now[0] += 10
    unknown.add(7)
    assert lines[1:] == ["counting: 7"]

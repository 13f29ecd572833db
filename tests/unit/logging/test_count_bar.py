"""The progress of long work away from a terminal."""

from mimo_train.logging.console import CountBar


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

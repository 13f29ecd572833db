"""Callbacks: a closed set of events, who is called with what, and how they are named in a config."""

import sys

import pytest

from mimo_train.config.errors import ConfigError, UserError
from mimo_train.training.callbacks import EVENTS, Callback, Callbacks, load_callbacks

ARGUMENTS = {
    "on_step_end": ("a result",),
    "on_log": ({"lm loss": 1.0},),
    "on_evaluation": ({"eval/loss": 1.0},),
    "on_checkpoint": ("a folder",),
    "on_train_end": (0,),
    "on_failure": (ValueError("broken"),),
}
"""What events get besides the state."""


class Recorder(Callback):
    """Notes every event with its arguments."""

    def __init__(self):
        self.seen = []


def _note(event):
    def note(self, *args):
        self.seen.append((event, *args))

    return note


for _event in EVENTS:
    setattr(Recorder, _event, _note(_event))


def test_every_event_reaches_every_listener_with_its_arguments():
    first, second = Recorder(), Recorder()
    callbacks = Callbacks([first, second])
    for event in EVENTS:
        callbacks.fire(event, "state", *ARGUMENTS.get(event, ()))
    assert first.seen == second.seen == [(event, "state", *ARGUMENTS.get(event, ())) for event in EVENTS]


def test_a_method_that_is_no_event_is_refused_when_the_class_is_made():
    with pytest.raises(TypeError, match=r"Wrong\.on_step is not a callback event.*on_step_start, on_step_end, on_log"):

        class Wrong(Callback):
            def on_step(self, state):
                pass

    class Right(Callback):
        def only_mine(self):
            pass

    assert Callbacks([Right()])


def test_a_callback_that_exits_fails_the_run():
    class Exits(Callback):
        def on_step_end(self, state, result):
            sys.exit(result)

        def on_failure(self, state, error):
            sys.exit(0)

    callbacks, error = Callbacks([Exits()]), ValueError("the run's")
    for code in (0, None, "enough"):
        with pytest.raises(UserError, match=r"Exits\.on_step_end called sys\.exit\(.*SIGTERM\) to save and end it"):
            callbacks.fire("on_step_end", "state", code)
    callbacks.fire("on_failure", "state", error)
    assert "Exits.on_failure failed too: SystemExit: 0" in error.__notes__[0]


def test_an_error_of_a_callback_goes_on_but_not_over_the_error_of_the_run():
    class Breaks(Callback):
        def on_step_end(self, state, result):
            raise RuntimeError("mine")

        def on_failure(self, state, error):
            raise RuntimeError("also mine")

    recorder = Recorder()
    callbacks = Callbacks([Breaks(), recorder])
    with pytest.raises(RuntimeError, match="mine"):
        callbacks.fire("on_step_end", "state", None)
    assert not recorder.seen
    error = ValueError("the run's")
    callbacks.fire("on_failure", "state", error)
    assert recorder.seen == [("on_failure", "state", error)]
    assert error.__notes__ == [
        "test_an_error_of_a_callback_goes_on_but_not_over_the_error_of_the_run.<locals>.Breaks.on_failure failed too: "
        "RuntimeError: also mine"
    ]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with callbacks of a user's own."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "mine.py").write_text(
        "from mimo_train.training.callbacks import Callback\n"
        "class Good(Callback):\n    pass\n"
        "class Wants(Callback):\n    def __init__(self, path):\n        pass\n"
        "class Other:\n    pass\n"
        "class Fails(Callback):\n    def __init__(self):\n        raise ValueError('mine')\n"
        "def function():\n    pass\n"
    )
    (tmp_path / "wrong.py").write_text(
        "from mimo_train.training.callbacks import Callback\nclass Wrong(Callback):\n    def on_end(self): pass\n"
    )
    (tmp_path / "syntax.py").write_text("class X(:\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError('at import')\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    # As the `mimo-train` command has it: without the working directory.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_callbacks_of_the_working_directory_are_found(project):
    (loaded,) = load_callbacks(["my_package.mine:Good"])
    assert type(loaded).__qualname__ == "Good" and isinstance(loaded, Callback)
    assert load_callbacks([]) == []


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("my_package.nothing:Good", "No module named 'my_package.nothing'"),
        ("my_package.mine:Other", "Other is not a subclass of mimo_train.training.callbacks.Callback"),
        ("my_package.mine:Wants", "missing 1 required positional argument: 'path'"),
        ("my_package.mine:Fails", "ValueError: mine"),
        ("syntax:X", "SyntaxError: invalid syntax"),
        ("exits:X", "SystemExit: 0"),
        ("wrong:Wrong", "Wrong.on_end is not a callback event"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named_with_the_reason(project, entry, reason):
    with pytest.raises(ConfigError) as caught:
        load_callbacks(["my_package.mine:Good", entry, "nowhere:X"])
    first, second = caught.value.faults
    assert first.key == second.key == "train.callbacks"
    assert repr(entry) in first.message and reason in first.message
    assert "'nowhere:X'" in second.message

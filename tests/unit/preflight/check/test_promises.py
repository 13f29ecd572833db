"""What `mimo-train check` says of callbacks, and of what only the start of a run can show."""

import sys

import pytest

from mimo_train.preflight.check import advice, check
from tests.unit.configs import load

SOURCES = {
    "mine.py": "from os import path as renamed\nclass Good:\n    pass\nmade = given = type('Made', (), {})\n",
    "dynamic.py": "globals()['Later'] = 1\n",
    "inside_if.py": "if True:\n    class Later:\n        pass\n",
    "syntax.py": "class X(:\n",
    "package/__init__.py": "raise RuntimeError('at import')\n",
    "package/inner.py": "class Good:\n    pass\n",
}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    for name, source in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    assert not {"mine", "dynamic", "inside_if"} & set(sys.modules), "a module of the user was imported"


def faults(*entries: str) -> list[str]:
    return [str(fault) for fault in check(load("gpt_tiny", f"train.callbacks=[{','.join(entries)}]")).faults]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("nope:No", "No module named 'nope'"),
        ("nope.inner:No", "ModuleNotFoundError: No module named 'nope'"),
        ("mine:Bad", "module 'mine' ("),
        ("mine:path", "has no 'path'"),
        ("syntax:X", "SyntaxError: invalid syntax"),
        ("package.inner:Good", "RuntimeError: at import"),
    ],
)
def test_a_callback_that_is_not_there_is_a_fault(entry, why):
    (fault,) = faults(entry, "mine:Good")
    assert fault.startswith(f"train.callbacks: {entry!r} cannot be used: ") and why in fault


def test_a_forward_step_that_is_not_there_is_a_fault():
    for entry, faulty in (("mine:made", False), ("dynamic:Later", False), ("mine:bad", True), ("nope:step", True)):
        found = [str(fault) for fault in check(load("gpt_tiny", f"train.forward_step={entry}")).faults]
        assert [text.startswith(f"train.forward_step: {entry!r} cannot be used: ") for text in found] == [True] * faulty


def test_names_that_a_module_makes_are_there_or_not_known():
    assert faults("mine:Good", "mine:made", "mine:given", "mine:renamed", "dynamic:Later", "inside_if:Later") == []
    assert faults("mimo_train.training.callbacks:Callback") == []


def test_what_only_the_start_can_show_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(advice, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(advice, "WINDOWS_GPU", tmp_path / "none")
    frozen = ("modules.language.freeze=[nothing*,llm]", "modules.language.freeze_until={also*: 3}")
    report = check(load("vlm_digits", *frozen, "run.device=cuda"))
    for key, pattern in (("freeze", "nothing*"), ("freeze_until", "also*")):
        said = f"modules.language.{key}: whether {pattern} match parameters is seen when the model is built, as with"
        assert any(said in note for note in report.notes)
    (warning,) = report.warnings
    assert warning.startswith("run.device is cuda, but this machine has no GPU driver. The run starts on other")
    for there in ("DRIVER", "WINDOWS_GPU"):
        with monkeypatch.context() as patch:
            patch.setattr(advice, there, tmp_path)
            assert check(load("vlm_digits", "run.device=cuda")).warnings == []


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ((), ""),
        (("modules.images.encoder.final_norm=true",), "modules.images.encoder.final_norm is true, and LLaVA reads"),
        (
            ("encoder@modules.images.encoder=dinov2_large",),
            "modules.images.encoder.final_norm is true, and LLaVA reads",
        ),
        (("encoder@modules.images.encoder=dinov2_large", "modules.images.encoder.final_norm=false"), ""),
        (
            ("encoder@modules.images.encoder=siglip2_so400m_naflex",),
            "modules.images.encoder.family is siglip2, and towers of clip, siglip, vit, dinov2 are written: "
            "Siglip2VisionModel requires spatial_shapes, which LLaVA does not pass",
        ),
        (
            ("encoder@modules.images.encoder=dinov3_vitl16", "modules.images.encoder.resize=native"),
            "modules.images.encoder.family is dinov3, and towers of clip, siglip, vit, dinov2 are written: LLaVA reads "
            "no tower with register tokens; the encoder of images is written by our names, since resize is native",
        ),
        (("modules.images.projector.kind=linear",), "modules.images.projector.kind is linear, and LLaVA's projector"),
    ],
)
def test_what_no_export_can_have_in_one_directory_is_a_note(overrides, why):
    notes = [note for note in check(load("vlm_digits", *overrides), without_data=True).notes if "an export" in note]
    assert len(notes) == bool(why) and all(f"since transformers has no model for all: {why}" in note for note in notes)

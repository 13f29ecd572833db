"""Which layers a run has where Transformer Engine is installed, and where it is broken."""

import sys

import pytest

from mimo_train.config.errors import UserError
from mimo_train.models.fp8 import require_fp8
from mimo_train.models.layers import use_transformer_engine
from tests.unit.configs import load


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package of that name whose half for torch has this text."""

    def install(text: str) -> None:
        package = tmp_path / "transformer_engine"
        (package / "pytorch").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "pytorch" / "__init__.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    known = set(sys.modules)
    yield install
    for name in set(sys.modules) - known:
        if name.partition(".")[0] == "transformer_engine":
            del sys.modules[name]


def test_it_is_used_on_cuda_alone(installed):
    installed("")
    assert use_transformer_engine("cuda")
    assert not use_transformer_engine("cpu")


def test_it_is_not_used_where_it_is_absent(monkeypatch):
    monkeypatch.setattr("mimo_train.models.layers.find_spec", lambda name: None)
    assert not use_transformer_engine("cuda")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise OSError('libcudnn.so.9: cannot open shared object file')", "OSError: libcudnn.so.9: cannot open"),
        ("import transformer_engine_torch", "ModuleNotFoundError: No module named 'transformer_engine_torch'"),
        ("raise AssertionError", r"AssertionError: no message"),
    ],
)
def test_a_broken_one_is_named_and_not_taken_for_a_working_one(installed, text, words):
    installed(text)
    with pytest.raises(UserError, match=f"{words}.*repair it, or uninstall it"):
        use_transformer_engine("cuda")
    assert not use_transformer_engine("cpu"), "a run on the CPU needs none"


def test_fp8_wants_transformer_engine():
    half = "train.precision=bf16"
    require_fp8(load("vlm_digits", half), te=False)
    require_fp8(load("vlm_digits", half, "train.fp8=tensorwise"), te=True)
    with pytest.raises(UserError, match=r"train\.fp8: fp8 \(tensorwise\) requires CUDA and Transformer Engine"):
        require_fp8(load("vlm_digits", half, "train.fp8=tensorwise"), te=False)

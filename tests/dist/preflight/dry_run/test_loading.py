"""A checkpoint that a run would continue from is looked through by ranks of another layout, without its values."""

import pytest

from mimo_train.layout.run import resolve
from tests.dist.preflight.dry_run.test_dry_run import HALF, IMAGES, LANGUAGE, _dry
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, train_on_ranks

OTHER_LAYOUT = (f"{LANGUAGE}tp=2", f"{LANGUAGE}pp=2", f"{IMAGES}dp=2", "train.global_batch_size=8")


@pytest.fixture(scope="module")
def saved(digits, tmp_path_factory):
    """The folder of a run of one process."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    train_on_ranks(config("vlm_digits", folder, digits, "layout=one_process", "train.global_batch_size=8", HALF,
                          "train.iters=1", "checkpoint.save_interval=1", "run.device=cpu"))  # fmt: skip
    return folder


def _files(folder) -> dict:
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*")}


@pytest.mark.parametrize("rank", [0, 4])
def test_a_rank_of_another_layout_finds_all_that_it_wants(saved, digits, rank):
    before = _files(saved)
    (found,) = run_ranks(_dry, 1, resolve(config("vlm_digits", saved, digits, *OTHER_LAYOUT, HALF)), rank)
    assert not hasattr(found, "what"), found.what + found.trace
    assert found.loaded == f"resumes {saved}/checkpoints/step_00000001" and found.flops and found.saved
    assert _files(saved) == before


def test_a_new_run_begins_with_weights_of_another(saved, digits, tmp_path):
    weights = f"checkpoint.weights={saved}"
    modules = f"checkpoint.load_modules={{images: {{path: {saved}}}}}"
    run = resolve(config("vlm_digits", tmp_path / "run", digits, *OTHER_LAYOUT, HALF, weights, modules))
    (found,) = run_ranks(_dry, 1, run, 1)
    assert not hasattr(found, "what"), found.what + found.trace
    assert found.loaded == f"starts from the weights of {saved}, {saved}" and found.flops


def test_a_checkpoint_of_another_model_is_refused_as_by_the_run(saved, digits):
    wide = ("modules.language.llm.ffn_hidden_size=96",)
    (found,) = run_ranks(_dry, 1, resolve(config("vlm_digits", saved, digits, *OTHER_LAYOUT, HALF, *wide)), 4)
    assert "step_00000001 is of another model" in found.what and "ffn_hidden_size" in found.what


def test_a_tensor_that_a_checkpoint_lacks_is_a_fault(saved, digits, tmp_path, monkeypatch):
    """Its config would not show it: it has other weights than the model's."""
    run = resolve(config("vlm_digits", saved, digits, *OTHER_LAYOUT, HALF))
    (found,) = run_ranks(_without_a_tensor, 1, run)
    assert "is of another model: language " in found.what and "is not in it" in found.what


def _without_a_tensor(run):
    from mimo_train.checkpoint.format.read import Reader

    original = Reader.__init__

    def init(self, folder):
        original(self, folder)
        lost = [key for key in self.index.pieces if key.module == "language" and "linear_fc1" in key.name]
        for key in lost:
            del self.index.pieces[key]

    Reader.__init__ = init
    return _dry(run, 4)


def test_a_part_of_a_tensor_that_a_checkpoint_lacks_is_a_fault(saved, digits):
    run = resolve(config("vlm_digits", saved, digits, *OTHER_LAYOUT, HALF))
    (found,) = run_ranks(_without_a_part, 1, run)
    assert "linear_fc1" in found.what and " elements" in found.what and " has " in found.what


def _without_a_part(run):
    """Of tensors that are cut in two by columns, the first half is not there."""
    from dataclasses import replace

    from mimo_train.checkpoint.format.read import Reader
    from mimo_train.checkpoint.format.spans import Span

    original = Reader.__init__

    def init(self, folder):
        original(self, folder)
        for key, (piece, *_) in self.index.pieces.items():
            if key.module == "language" and "linear_fc1.weight" in key.name:
                rows, columns = piece.span.shape
                half = Span((rows, columns), (0, columns // 2), (rows, columns // 2), 0, rows * (columns // 2))
                self.index.pieces[key] = [replace(piece, span=half)]

    Reader.__init__ = init
    return _dry(run, 4)

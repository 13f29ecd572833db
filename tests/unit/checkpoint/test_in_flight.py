"""A save next to training: the end of a run waits for it, but not for a file system that hangs; and what happens to its
files before it is complete."""

import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from mimo_train.checkpoint import background_save, folders
from mimo_train.checkpoint.background_save import Snapshot
from mimo_train.checkpoint.failed_save import SaveFailed
from mimo_train.checkpoint.format.files import Damage, of_rank
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.read import Reader
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.format.write import Part, complete, write_rank

KEY, VALUES = Key("language", "weight", WEIGHT), torch.arange(1000.0)


@pytest.mark.parametrize("hangs", [True, False])
def test_the_end_of_a_run_does_not_wait_for_a_file_system_that_hangs(hangs, tmp_path, monkeypatch):
    monkeypatch.setattr(background_save.dist, "get_rank", lambda: 0)
    gate, done = threading.Event(), []
    if hangs:
        monkeypatch.setattr(background_save, "LONGEST_CLOSE", 0.1)
    else:
        threading.Timer(0.1, gate.set).start()

    def commit() -> None:
        done.append("complete")

    save = background_save.InFlight(tmp_path, tmp_path, gate.wait, commit, list, lambda: True, in_background=True)
    closing = threading.Thread(target=save.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive(), "it waits for what never ends"
    assert done == ([] if hangs else ["complete"])
    gate.set()


def write(partial: Path, *, in_background: bool) -> None:
    """Both ranks' parts, as they are or from a copy, as a thread writes them."""
    partial.mkdir(parents=True)
    for rank in (0, 1):
        parts = [Part(KEY, Span.of_whole((1000,)).part(500 * rank, 500 * rank + 500), VALUES[500 * rank :][:500])]
        if in_background:
            parts, wait, _ = Snapshot().take(parts)
            wait()
        write_rank(partial, rank, parts)


def saved(run_dir: Path, step: int, *, in_background: bool = True, damage=lambda partial: None) -> None:
    """One save of a run of two ranks, here all in this process. What `damage` does to its folder is done when both have
    written, before rank 0 knows."""
    partial, final = folders.partial_folder(run_dir, step), folders.final_folder(run_dir, step)

    def commit() -> None:
        complete(partial, final, 2, {folders.RECORD: folders.record_text({"step": step})}, (2000, 2000))

    abandon = lambda: shutil.rmtree(partial)  # noqa: E731
    save = background_save.InFlight(
        final,
        run_dir,
        lambda: write(partial, in_background=in_background),
        commit,
        abandon,
        list,
        in_background=in_background,
    )
    save._job.join()
    damage(partial)
    while not save.poll(*save.local_status()):
        save._job.join()


@pytest.fixture
def first_rank(monkeypatch):
    monkeypatch.setattr(background_save.dist, "get_rank", lambda: 0)


def test_a_copy_is_written_as_the_tensors_themselves_are(first_rank, tmp_path):
    for name, in_background in (("background", True), ("here", False)):
        saved(tmp_path / name, 4, in_background=in_background)
    one, other = (folders.final_folder(tmp_path / name, 4) for name in ("background", "here"))
    assert {file.name for file in one.iterdir()} == {file.name for file in other.iterdir()}
    assert all(file.read_bytes() == (other / file.name).read_bytes() for file in one.iterdir())


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1
    path.write_bytes(content)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"0")


WAYS = {"cut": lambda path: path.write_bytes(path.read_bytes()[:-9]), "empty": lambda path: path.write_bytes(b"")}
WAYS |= {"gone": Path.unlink, "longer": longer}
WAYS |= {f"flipped at {place}": partial(flip, place=place) for place in (0, 9, 200, -300, -40, -1)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for rank in (0, 1) for name in of_rank(rank)])
def test_what_is_damaged_in_flight_is_no_checkpoint_or_is_found_by_a_reader(name, way, first_rank, tmp_path):
    """Never wrong weights; and the checkpoint before is as it was."""
    saved(tmp_path, 2)
    before = {file: file.read_bytes() for file in folders.final_folder(tmp_path, 2).iterdir()}
    try:
        saved(tmp_path, 4, damage=lambda partial: WAYS[way](partial / name))
    except SaveFailed as error:
        assert name in str(error), error
        assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    else:
        assert "flipped" in way and name.endswith(".safetensors"), "only what is read again and hashed may go unnoticed"
        reader = Reader(folders.final_folder(tmp_path, 4))
        with pytest.raises(Damage, match=name):
            reader.require_files()
            reader.whole(KEY)
    assert {file: file.read_bytes() for file in before} == before
    saved(tmp_path, 6)
    assert torch.equal(Reader(folders.newest(tmp_path)).whole(KEY), VALUES)

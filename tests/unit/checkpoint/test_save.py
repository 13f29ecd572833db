"""A save alongside training: the end of a run waits for it, but not for a file system that hangs; what happens to its
files before it is complete; the copy that it is written from, and whether there is memory for it."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from mimo_train.checkpoint import folders
from mimo_train.checkpoint import save as saves
from mimo_train.checkpoint.format.files import Damage, of_rank
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.read import Reader
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.format.write import Part, write_rank
from mimo_train.checkpoint.save import Save, SaveFailed, Snapshot, Target, free_memory, memory_shortage

KEY, VALUES = Key("language", "weight", WEIGHT), torch.arange(1000.0)


def half(rank: int) -> Part:
    return Part(KEY, Span.of_whole((1000,)).part(500 * rank, 500 * rank + 500), VALUES[500 * rank :][:500])


def begun(run_dir: Path, step: int, *, in_background: bool = True) -> Save:
    """A save of a run of two ranks; the second has written its part already."""
    create = saves._create_folder

    def both(target: Target, nbytes: int):
        folder = create(target, nbytes)
        write_rank(folder, 1, [half(1)])
        return folder

    saves._create_folder = both
    try:
        target = Target(run_dir, step, False, 0, 0)
        return Save(target, [half(0)], {"step": step}, (2000, 2000), Snapshot() if in_background else None)
    finally:
        saves._create_folder = create


def saved(run_dir: Path, step: int, *, in_background: bool = True, damage=lambda folder: None) -> None:
    """A whole save. What `damage` does to its folder is done when both have written, before rank 0 knows."""
    save = begun(run_dir, step, in_background=in_background)
    save._job.join()
    damage(save.folder)
    while not save.poll(*save.local_status()):
        save._job.join()


@pytest.fixture(autouse=True)
def first_rank(monkeypatch):
    monkeypatch.setattr(saves.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(saves.dist, "get_world_size", lambda: 1)


@pytest.mark.parametrize("hangs", [True, False])
def test_the_end_of_a_run_does_not_wait_for_a_file_system_that_hangs(hangs, tmp_path, monkeypatch):
    gate = threading.Event()
    if hangs:
        monkeypatch.setattr(saves, "LONGEST_CLOSE", 0.1)
    else:
        threading.Timer(0.1, gate.set).start()
    monkeypatch.setattr(saves, "write_rank", lambda *of, write=write_rank: gate.wait() and write(*of))
    save = begun(tmp_path, 4)
    closing = threading.Thread(target=save.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive(), "it waits for what never ends"
    assert len(folders.complete(tmp_path)) == (0 if hangs else 1)
    gate.set()


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
def test_what_is_damaged_in_flight_is_no_checkpoint_or_is_found_by_a_reader(name, way, tmp_path):
    """Never wrong weights; and the checkpoint before is as it was."""
    saved(tmp_path, 2)
    before = {file: file.read_bytes() for file in folders.step_folder(tmp_path, 2).iterdir()}
    try:
        saved(tmp_path, 4, damage=lambda folder: WAYS[way](folder / name))
    except SaveFailed as error:
        assert name in str(error), error
        assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    else:
        assert "flipped" in way and name.endswith(".safetensors"), "only what is read again and hashed may go unnoticed"
        reader = Reader(folders.step_folder(tmp_path, 4))
        with pytest.raises(Damage, match=name):
            reader.require_files()
            reader.whole(KEY)
    assert {file: file.read_bytes() for file in before} == before
    saved(tmp_path, 6)
    assert torch.equal(Reader(folders.newest(tmp_path)).whole(KEY), VALUES)


def parts(*tensors: torch.Tensor) -> list[Part]:
    return [
        Part(Key("language", str(number), WEIGHT), Span.of_whole(tuple(one.shape)), one)
        for number, one in enumerate(tensors)
    ]


def test_a_copy_keeps_its_values_and_its_memory():
    weights, count = torch.arange(5.0), torch.tensor([1, 2, 3], dtype=torch.uint8)
    snapshot = Snapshot()
    live = parts(count, weights)
    copies, wait, hold = snapshot.take(live)
    wait()
    hold()
    weights.zero_()
    assert {part.key.name: part.values.tolist() for part in copies} == {"0": [1, 2, 3], "1": [0, 1, 2, 3, 4]}
    assert snapshot.size == 23
    again, *_ = snapshot.take(live)
    assert [part.values.data_ptr() for part in again] == [part.values.data_ptr() for part in copies]
    assert again[0].values.tolist() == [0.0] * 5
    smaller, *_ = snapshot.take(live[:1])
    assert smaller[0].values.tolist() == [1, 2, 3] and snapshot.size == 23
    snapshot.take([*live, *parts(torch.zeros(10))])
    assert snapshot.size == 63


def test_every_host_needs_twice_the_memory_of_its_ranks():
    assert not memory_shortage([("a", 10, 40), ("a", 10, 41), ("b", 20, 40)])
    words = "copies take 2.1e-08 GB of a's memory, of which twice that must be free, not 4e-08"
    assert memory_shortage([("b", 1, 40), ("a", 10, 40), ("a", 11, 40)]) == words
    assert not memory_shortage([("a", 0, 0)]), "what is kept needs nothing"


def test_a_container_has_less_than_its_host(tmp_path):
    def write(limit: str) -> int:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("700\n")
        (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 250\n")
        return free_memory(tmp_path)

    assert write("1000") == 550
    assert write("400") == 0
    assert write("max") > 10**6
    assert free_memory(tmp_path / "none") > 10**6

"""The copy that a checkpoint is written from, and whether there is memory for it."""

import torch

from mimo_train.checkpoint.background_save import Demand, Snapshot, free_memory, lacking
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.format.write import Part


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
    assert not lacking([Demand("a", 10, 40), Demand("a", 10, 41), Demand("b", 20, 40)])
    words = "copies take 2.1e-08 GB of a's memory, of which twice that must be free, not 4e-08"
    assert lacking([Demand("b", 1, 40), Demand("a", 10, 40), Demand("a", 11, 40)]) == words
    assert not lacking([Demand("a", 0, 0)]), "what is kept needs nothing"


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

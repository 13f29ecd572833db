"""Files of a checkpoint: any ranges in, any ranges out, and every damage is named."""

import json
import os
import random
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mimo_train.checkpoint.format.files import COMPLETE, INDEX, Damage, marked_file
from mimo_train.checkpoint.format.index import BLOCK, WEIGHT, Index, Key
from mimo_train.checkpoint.format.read import Reader, Wanted
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.format.write import Part, complete, write_rank

TENSORS = {
    Key("language", "decoder.layers.0.mlp.linear_fc1.weight", WEIGHT): torch.randn(37, 29),
    Key("language", "decoder.layers.0.mlp.linear_fc1.weight", "exp_avg"): torch.randn(37, 29),
    Key("images", "encoders.images.class_token", WEIGHT): torch.randn(3, 1, 5).to(torch.bfloat16),
    Key("images", "encoders.images.count", WEIGHT): torch.tensor(7),
    Key("language", "embedding.word_embeddings.weight", WEIGHT): torch.randn(1500, 1000),  # more than one block
}


def cut(shape: tuple[int, ...], ways: int, columns: bool) -> list[Span]:
    """A tensor in boxes of columns, each in two ranges; or in flat ranges of the whole."""
    if not columns or len(shape) < 2:
        edges = sorted({0, prod(shape), *(random.Random(ways).randrange(prod(shape) + 1) for _ in range(ways - 1))})
        return [Span.of_whole(shape).part(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    width, found = shape[-1] // ways, []
    for number in range(ways):
        last = shape[-1] if number == ways - 1 else (number + 1) * width
        size = (*shape[:-1], last - number * width)
        if not size[-1]:
            continue
        offset = (*[0] * (len(shape) - 1), number * width)
        middle = prod(size) // 3
        found += [Span(shape, offset, size, a, b) for a, b in ((0, middle), (middle, prod(size))) if a < b]
    return found


def values(span: Span, tensor: torch.Tensor) -> torch.Tensor:
    box = tensor[tuple(slice(a, a + n) for a, n in zip(span.offset, span.size, strict=True))]
    return box.reshape(-1)[span.start : span.stop].clone()


def written(run: Path, ranks: int = 3, columns: bool = True) -> Path:
    folder = run / "step_00000004"
    folder.mkdir(parents=True)
    parts: list[list[Part]] = [[] for _ in range(ranks)]
    for key, tensor in TENSORS.items():
        for number, span in enumerate(cut(tuple(tensor.shape), ranks, columns)):
            parts[number % ranks].append(Part(key, span, values(span, tensor)))
    for rank, of_rank in enumerate(parts):
        write_rank(folder, rank, of_rank)
    complete(folder, ranks, {"run.json": b'{"step": 4}'})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("columns", [False, True])
def test_every_way_to_cut_reads_every_other(ranks, columns, tmp_path):
    reader = Reader(written(tmp_path, ranks, columns))
    assert {key: reader.index.shape(key) for key in TENSORS} == {key: (*value.shape,) for key, value in TENSORS.items()}
    for ways, of_columns in ((1, False), (3, False), (4, True)):
        for key, tensor in TENSORS.items():
            wanted = [
                Wanted(key, span, torch.empty(span.numel, dtype=tensor.dtype))
                for span in cut(tuple(tensor.shape), ways, of_columns)
            ]
            reader.fill(wanted)
            assert all(torch.equal(one.into, values(one.span, tensor)) for one in wanted), key
    assert all(torch.equal(reader.whole(key), tensor) for key, tensor in TENSORS.items())
    assert reader.damage() == []


def test_a_file_is_one_that_safetensors_reads(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    key = "language/decoder.layers.0.mlp.linear_fc1.weight/exp_avg@0.0+0"
    tensor = next(value for name, value in TENSORS.items() if name.state == "exp_avg")
    assert torch.equal(found[key], values(cut((37, 29), 3, True)[0], tensor))
    assert sorted(path.name for path in folder.iterdir()) == [
        COMPLETE, INDEX, *(f"rank_{rank:05d}.safetensors" for rank in range(3)), "run.json",
    ]  # fmt: skip


def test_who_reads_weights_alone_reads_the_blocks_of_weights_alone(tmp_path, monkeypatch):
    """As do the other ranks of data parallelism, whatever order parts are given in."""
    keys = [Key("language", f"{number}.weight", state) for number in range(8) for state in (WEIGHT, "exp_avg")]
    span = Span.of_whole((2**18,))
    (tmp_path / "step").mkdir()
    parts = [Part(key, span, torch.full(span.shape, float(number))) for number, key in enumerate(keys)]
    write_rank(tmp_path / "step", 0, parts)
    complete(tmp_path / "step", 1, {"run.json": b"{}"})
    reader, blocks, take = Reader(tmp_path / "step"), [], Reader._read
    monkeypatch.setattr(Reader, "_read", lambda self, *of: blocks.append(of[0]) or take(self, *of))
    wanted = [Wanted(key, span, torch.empty(span.shape)) for key in keys if key.state == WEIGHT]
    reader.fill(wanted)
    assert [one.into.unique().tolist() for one in wanted] == [[float(number)] for number in range(0, 16, 2)]
    assert len(blocks) == sum(one.into.nbytes for one in wanted) // BLOCK < len(reader.index.files[0].hashes) - 1


def test_values_are_cast_to_what_is_asked_for(folder):
    key, tensor = next(iter(TENSORS.items()))
    half = torch.empty(tensor.numel(), dtype=torch.bfloat16)
    Reader(folder).fill([Wanted(key, Span.of_whole(tuple(tensor.shape)), half)])
    assert torch.equal(half, tensor.to(torch.bfloat16).view(-1))


def use(folder: Path) -> None:
    """All that a load reads."""
    reader = Reader(folder)
    reader.require_files()
    marked_file(folder, "run.json")
    for key in reader.index.pieces:
        reader.whole(key)


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "gone", "longer", "fifo"])
def test_every_damage_of_every_file_is_named(how, folder, tmp_path):
    for number, path in enumerate(sorted(folder.iterdir())):
        content = path.read_bytes()
        places = {0, 9, len(content) // 3, len(content) - 1} if how in ("flipped", "cut") else {0}
        for place in places & set(range(len(content))):
            copy = tmp_path / f"{number}_{place}"
            copy.mkdir()
            for other in folder.iterdir():
                (copy / other.name).symlink_to(other)
            target = copy / path.name
            target.unlink()
            if how == "flipped":
                target.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            elif how == "cut":
                target.write_bytes(content[:place])
            elif how == "empty":
                target.touch()
            elif how == "fifo":
                os.mkfifo(target)
            elif how == "longer":
                target.write_bytes(content + b"\0")
            with pytest.raises(Damage) as damage:
                use(copy)
            # A damaged marker may show as a file that it no longer fits.
            assert path.name in str(damage.value) or path.name == COMPLETE, f"{place}: {damage.value}"


def test_a_damaged_block_names_its_tensors(folder, tmp_path):
    copy = written(tmp_path)
    path = copy / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    (said,) = Reader(copy).damage()
    assert "rank_00000.safetensors is damaged between bytes" in said and "images encoders.images.class_token" in said


def crafted(folder: Path, tmp_path: Path, change) -> None:
    """The index with a change, under a hash that is right."""
    found = json.loads((folder / INDEX).read_bytes())
    change(found)
    Index.load(json.dumps(found).encode())


def tensor_of(found: dict) -> dict:
    return found["tensors"]["language"]["embedding.word_embeddings.weight"]


LIES = {
    "a file elsewhere": (lambda found: found["files"][0].__setitem__(0, "../../etc/passwd"), "names a file"),
    "a file twice": (lambda found: found["files"].append(found["files"][0]), "names a file twice"),
    "a huge tensor": (lambda found: tensor_of(found).update(shape=[2**61, 1000]), "of its"),
    "a negative size": (lambda found: tensor_of(found).update(shape=[-1, 1000]), "-1 for a number"),
    "a fraction": (lambda found: tensor_of(found).update(shape=[1500.0, 1000]), "1500.0 for a number"),
    "a piece beyond the end": (lambda found: pieces_of(found)[0].__setitem__(1, 2**40), "beyond the end"),
    "a piece twice": (lambda found: pieces_of(found).append(pieces_of(found)[0]), "there twice"),
    "a piece less": (lambda found: pieces_of(found).pop(), "of its 1500000 elements"),
    "another file": (lambda found: pieces_of(found)[0].__setitem__(0, 9), "not in it"),
    "half an element": (lambda found: pieces_of(found)[0].__setitem__(1, 2), "not in it"),
    "an unknown type": (lambda found: tensor_of(found)["states"][WEIGHT].update(dtype="OBJECT"), "OBJECT"),
    "hashes too few": (lambda found: found["files"][0][3].pop(), "hashes of rank_00000"),
    "another version": (lambda found: found.update(version=2), "version 2"),
}


def pieces_of(found: dict) -> list:
    return tensor_of(found)["states"][WEIGHT]["pieces"]


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused_before_anything_is_allocated(lie, folder, tmp_path):
    change, said = LIES[lie]
    with pytest.raises(Damage, match=said):
        crafted(folder, tmp_path, change)


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"null", b"[]", b'{"version":1}', b"\xff\xfe"])
def test_what_is_no_index_is_refused(text):
    with pytest.raises(Damage):
        Index.load(text)


def test_a_checkpoint_lacks_the_part_of_a_rank(tmp_path):
    partial = tmp_path / "step_00000001"
    partial.mkdir()
    key, tensor = next(iter(TENSORS.items()))
    first, second = cut(tuple(tensor.shape), 2, False)
    write_rank(partial, 0, [Part(key, first, values(first, tensor))])
    with pytest.raises(Damage, match=r"rank_00001.json is missing"):
        complete(partial, 2, {})
    write_rank(partial, 1, [])
    with pytest.raises(Damage, match=f"has {first.numel} of its {tensor.numel()} elements"):
        complete(partial, 2, {})
    (partial / "rank_00001.json").unlink()
    (partial / "rank_00001.safetensors").unlink()
    write_rank(partial, 1, [Part(key, second, values(second, tensor))])
    (partial / "rank_00001.safetensors").write_bytes(b"")
    with pytest.raises(Damage, match=r"rank_00001.safetensors has 0 bytes"):
        complete(partial, 2, {})
    assert not (partial / COMPLETE).exists()


def test_blocks_are_read_once_where_neighbours_are_asked_for(folder, monkeypatch):
    reader = Reader(folder)
    places = []
    monkeypatch.setattr(reader, "_read", lambda *of, real=reader._read: places.append(of[0]) or real(*of))
    reader.fill(
        Wanted(key, span, torch.empty(span.numel, dtype=tensor.dtype))
        for key, tensor in TENSORS.items()
        for span in cut(tuple(tensor.shape), 7, True)
    )
    assert len(places) == len(set(places)) == sum(-(-(file.size - file.header) // BLOCK) for file in reader.index.files)

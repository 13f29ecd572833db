"""Directories of safetensors: read range by range, and written one tensor at a time."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mimo_train.checkpoint.hf import tensors
from mimo_train.checkpoint.hf.tensors import INDEX, SINGLE, Planned, TensorFolder, write_tensors
from mimo_train.config.fault import UserError

VALUES = {
    "matrix": torch.arange(77, dtype=torch.float32).view(11, 7),
    "half": torch.arange(24).view(6, 4).to(torch.bfloat16),
    "kernel": torch.arange(120, dtype=torch.float64).view(5, 3, 2, 4),
    "bias": torch.arange(9, dtype=torch.float16),
    "scale": torch.tensor(2.5),
}


@pytest.fixture
def folder(tmp_path):
    save_file(VALUES, tmp_path / SINGLE)
    return tmp_path


def opened(folder) -> TensorFolder:
    return TensorFolder(folder, "modules.language.pretrained")


@pytest.mark.parametrize("chunk", [1, 50, 2**20])
@pytest.mark.parametrize("name", ["matrix", "half", "kernel", "bias"])
def test_any_range_is_read_as_it_was_written(folder, name, chunk, monkeypatch):
    monkeypatch.setattr(tensors, "CHUNK", chunk)
    whole = VALUES[name].flatten(1) if VALUES[name].dim() > 1 else VALUES[name][:, None]
    there = opened(folder)
    assert there.tensors[name].shape == VALUES[name].shape
    for first, count, columns in ((0, len(whole), None), (2, 3, None), (1, 4, (0, 1)), (4, 1, (0, whole.size(1)))):
        parts = list(there.rows(name, first, count, columns))
        read = torch.cat(parts)
        expected = whole[first : first + count]
        assert torch.equal(read, expected if columns is None else expected[:, columns[0] : columns[1]])
        assert all(part.untyped_storage().nbytes() <= max(chunk, whole[0].nbytes) for part in parts)


def test_several_files_are_one_folder(tmp_path):
    planned = [Planned(name, tuple(value.shape), value.dtype) for name, value in VALUES.items()]
    write_tensors(tmp_path, planned, iter(VALUES.values()), largest_file=400)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in VALUES.values())
    for name, value in VALUES.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], value)
        first = next(opened(tmp_path).rows(name, 0, 1)) if value.dim() else None
        assert first is None or torch.equal(first.flatten(), value[0].flatten())
    (tmp_path / files[1]).unlink()
    with pytest.raises(UserError, match=f"modules.language.pretrained: .*{files[1]} is missing"):
        opened(tmp_path)


def test_one_file_has_no_index(tmp_path):
    write_tensors(tmp_path, [Planned("a", (2, 3), torch.float32)], [torch.ones(2, 3)], largest_file=1)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert torch.equal(load_file(tmp_path / SINGLE)["a"], torch.ones(2, 3))


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-3])


def no_header(path):
    path.write_bytes(b"\xff" * 20)


def broken_header(path):
    path.write_bytes((4).to_bytes(8, "little") + b"{{{{" + b"x" * 8)


def pickled(path):
    path.rename(path.with_name("pytorch_model.bin"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_short, r"has \d+ bytes, and \w+ ends at \d+: copy it again"),
        (no_header, "is no safetensors file, or was cut short"),
        (broken_header, "is damaged"),
        (pickled, "has no model.safetensors .*pytorch_model.bin, which is read by unpickling.*save_pretrained"),
    ],
)
def test_what_cannot_be_read_is_named(folder, damage, said):
    damage(folder / SINGLE)
    with pytest.raises(UserError, match=f"^modules.language.pretrained: .*{said}"):
        opened(folder)


def test_a_file_that_shrinks_while_it_is_read_is_named(folder):
    there = opened(folder)
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:200])
    with pytest.raises(UserError, match="was cut short while it was read"):
        for name in VALUES:
            list(there.rows(name, 0, 1))

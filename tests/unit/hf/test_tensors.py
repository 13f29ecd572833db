"""Directories of safetensors: read range by range, and written one tensor at a time."""

import json
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import load_file, save_file

from mimo_train.config.errors import UserError
from mimo_train.config.pretrained.adapter import PREFIX, WEIGHTS, adapted_paths
from mimo_train.config.pretrained.weight_files import (
    BIN,
    BIN_INDEX,
    INDEX,
    QUANTIZED,
    SINGLE,
    Entry,
    quantized_weights,
)
from mimo_train.hf import tensors
from mimo_train.hf.tensors import Planned, TensorFolder, write_tensors

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
    (tmp_path / INDEX).unlink()
    with pytest.raises(UserError, match=f"has {files[0]} and no {INDEX}, which names its tensors: copy that too"):
        opened(tmp_path)


def test_one_file_has_no_index(tmp_path):
    write_tensors(tmp_path, [Planned("a", (2, 3), torch.float32)], [torch.ones(2, 3)], largest_file=1)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert torch.equal(load_file(tmp_path / SINGLE)["a"], torch.ones(2, 3))


def test_files_are_chosen_as_transformers_chooses_them(tmp_path):
    """A single file counts before an index beside it, and safetensors before torch's files."""
    order = ((torch.save, "part.bin", BIN_INDEX), (torch.save, BIN, ""))
    order += ((save_file, "part.safetensors", INDEX), (save_file, SINGLE, ""))
    for number, (save, name, index) in enumerate(order):
        save({"x": torch.full((2,), number)}, tmp_path / name)
        if index:
            (tmp_path / index).write_text(json.dumps({"weight_map": {"x": name}}))
        assert opened(tmp_path).whole("x").tolist() == [number] * 2, name


def test_files_of_torch_are_read_where_they_lie(tmp_path):
    """Tensors that share a storage, of any dtype, as parameters too."""
    shared = {"rows": VALUES["matrix"][3:5], "parameter": torch.nn.Parameter(torch.ones(3))}
    torch.save(VALUES | shared, tmp_path / BIN)
    there = opened(tmp_path)
    for name, value in (VALUES | shared).items():
        assert torch.equal(there.whole(name), value.detach())
    assert torch.equal(next(there.rows("matrix", 4, 2, (1, 3))), VALUES["matrix"][4:6, 1:3])


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-3])


def broken_header(path):
    path.write_bytes((4).to_bytes(8, "little") + b"{{{{" + b"x" * 8)


def legacy(path):
    path.unlink()
    torch.save(VALUES, path.with_name(BIN), _use_new_zipfile_serialization=False)


def bin_cut_short(path):
    path.unlink()
    torch.save(VALUES, path.with_name(BIN))
    cut_short(path.with_name(BIN))


def broken_pickle(path):
    path.unlink()
    with ZipFile(path.with_name(BIN), "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02K")  # a number without its byte
        file.writestr("archive/version", b"3\n")


def turned(path):
    path.unlink()
    torch.save({"x": VALUES["matrix"].T}, path.with_name(BIN))


def nested(path):
    path.unlink()
    torch.save({"state_dict": VALUES}, path.with_name(BIN))


def pointer(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n")


def pointer_of_index(path):
    path.rename(path.with_name("model-00001-of-00001.safetensors"))
    pointer(path.with_name(INDEX))


def no_file(path):
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_short, "is damaged .*not fully covered.: copy it again"),
        (broken_header, "is damaged .*: copy it again"),
        (legacy, f"{BIN} was cut short, or is no file of torch.save since version 1.6: load it .* as safetensors"),
        (bin_cut_short, f"{BIN} was cut short"),
        (broken_pickle, f"{BIN} is damaged .*: copy it again"),
        (turned, rf"{BIN} has x as torch.float32 with strides \(1, 7\): load it"),
        (nested, f"{BIN} holds dict as 'state_dict', expected a tensor: load it"),
        (pointer, f"{SINGLE} is a Git-LFS pointer, not the file itself: run `git lfs pull`"),
        (pointer_of_index, f"{INDEX} is a Git-LFS pointer"),
        (no_file, f"has no weights .{SINGLE}, {INDEX}, {BIN} or {BIN_INDEX}.: .*save_pretrained"),
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


def lying(path, header, data=b"\0" * 8):
    """Write a file with this header."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


NAME = f"{PREFIX}model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ([1], "is damaged .*invalid JSON"),
        ({NAME: entry(data_offsets=[0, 2**40])}, "is damaged .*offset"),
        ({NAME: entry(shape=[2**33, 4])}, "is damaged"),
        ({NAME: entry(dtype="U64", shape=[1])}, f"has {NAME} with dtype U64, which cannot be read"),
    ],
)
def test_a_header_that_lies_is_an_error_before_anything_is_allocated(tmp_path, header, said):
    """The safetensors library compares the header with the file."""
    for name, read in ((SINGLE, opened), (WEIGHTS, adapted_paths)):
        lying(tmp_path / name, header)
        with pytest.raises(UserError, match=rf"{name} {said}.*: copy it again$"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (7, "has no weight_map"),
        ({"a": 7}, "has a in 7, which is no file next to it"),
        ({"a": f"../../{SINGLE}"}, "which is no file next to it"),
        ({"a": "/dev/zero"}, "which is no file next to it"),
        ({"b": "x.safetensors"}, f"x.safetensors has no b, which {INDEX} has there"),
    ],
)
def test_an_index_that_lies_is_an_error(tmp_path, places, said):
    lying(tmp_path / "x.safetensors", {"a": entry()})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UserError, match=rf"^modules.language.pretrained: .*{said}"):
        opened(tmp_path)


def test_of_a_tensor_in_two_files_that_of_the_index_counts(tmp_path):
    for name, byte in (("a.safetensors", b"\0"), ("b.safetensors", b"\1")):
        lying(
            tmp_path / name,
            {"x": entry(dtype="U8", shape=[8]), name[0]: entry(shape=[0], data_offsets=[8, 8])},
            byte * 8,
        )
    for name, value in (("a", 0), ("b", 1)):
        places = {"a": "a.safetensors", "b": "b.safetensors", "x": f"{name}.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
        assert opened(tmp_path).whole("x").tolist() == [value] * 8


@pytest.mark.parametrize("facts", [{"shape": [4, 128], "blocksize": 128}, {"blocksize": 64}, {}])
def test_weights_in_other_blocks_of_nf4_are_rejected(facts, tmp_path):
    content = json.dumps(facts).encode()
    (tmp_path / "model").write_bytes(content)
    tensors = {f"weight{QUANTIZED}": (tmp_path / "model", Entry(0, (len(content),), "U8"))}
    with pytest.raises(UserError, match="weight: .*model has NF4 blocks of (128|64|None) numbers, and 64 are read"):
        quantized_weights(tensors)

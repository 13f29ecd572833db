"""Texts of .bin and .idx files: read as Megatron-Core reads them, cut into the same samples in any layout."""

import os
import shutil
import struct

import numpy as np
import pytest

from data.errors import DataError, ShardError
from data.indexed.dataset import TokenDataset
from data.indexed.file import IndexedFile
from data.indexed.find import find_indexed, is_indexed
from data.loader import StepLoader
from data.order.packing import Packing
from data.order.sources import Source
from data.order.step import Batching, Reader
from data.text.tokens import build_tokenizer
from mimo_train.config.schema_data import split_parts
from tests.indexed import END, texts, write_indexed

BYTES = build_tokenizer("bytes")


def opened(*prefixes, length=16, **more):
    sources = [Source(f"s{at}", str(prefix), f"data.mix[{at}].shards") for at, prefix in enumerate(prefixes)]
    return TokenDataset(sources, tokenizer=BYTES, sequence_length=length, **more)


def text_of(documents):
    return [token for document in documents for token in document]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.int16, np.uint8])
def test_tokens_and_documents_are_those_of_megatron_core(tmp_path, dtype):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    documents = [[token % 250 for token in one] for one in texts(50)]
    prefix = write_indexed(tmp_path / "corpus.v1_text_document", documents, dtype)
    theirs, ours = IndexedDataset(str(prefix)), IndexedFile(tmp_path / "corpus.v1_text_document.idx")
    ours.require_whole()
    assert (ours.dtype, ours.documents, ours.tokens) == (np.dtype(dtype), len(theirs), theirs.sequence_lengths.sum())
    starts = ours.starts(np.arange(51))
    stream = opened(prefix, length=ours.tokens - 1).read_text(0)[0]
    whole = [*stream.input_ids, stream.labels[-1]]
    for number in range(50):
        assert whole[starts[number] : starts[number + 1]] == theirs[number].tolist() == documents[number]
    every = np.arange(ours.tokens)
    assert ours.documents_at(every).tolist() == [at for at, one in enumerate(documents) for _ in one]


def test_documents_of_several_sequences_and_empty_ones(tmp_path):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    for sentences in ([[1, 2], [3]], [], [[4], [], [5, 6]], []):
        for one in sentences:
            builder.add_item(torch.tensor(one, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "a.idx"))
    file = IndexedFile(tmp_path / "a.idx")
    file.require_whole()
    assert file.starts(np.arange(5)).tolist() == [0, 3, 3, 6, 6]
    assert file.documents_at(np.arange(6)).tolist() == [0, 0, 0, 2, 2, 2]
    sample, _ = opened(tmp_path / "a", length=5, separate=True).read_text(0)
    assert sample.documents == (3, 5) and sample.loss_mask.tolist() == [1, 1, 0, 1, 1]


def test_every_token_is_a_target_once_an_epoch(tmp_path):
    documents, others = texts(40, 1), texts(7, 2)
    first, second = write_indexed(tmp_path / "a", documents), write_indexed(tmp_path / "b", others)
    data = TokenDataset([Source("", f"{first},{second}")], tokenizer=BYTES, sequence_length=16, shuffle=True, seed=3)
    counts = [(len(text_of(one)) - 1) // 16 for one in (documents, others)]
    assert len(data) == sum(counts) and data.lengths.shape == (len(data),)
    for epoch in range(2):
        found = [data.read_text(epoch * len(data) + at)[0] for at in range(len(data))]
        rows = sorted((*one.input_ids.tolist(), one.labels[-1]) for one in found)
        wanted = [
            tuple(text_of(of)[16 * at : 16 * at + 17])
            for of, count in zip((documents, others), counts, strict=True)
            for at in range(count)
        ]
        assert rows == sorted(wanted)
        assert all((one.labels[:-1] == one.input_ids[1:]).all() and one.loss_mask.all() for one in found)
    place, where = opened(first).locate(1)
    assert place.name == "a.bin" and where.endswith(f"token {opened(first)._window(1)[1]}")


@pytest.mark.parametrize("split", ["969,30,1", "99,1,0", "1,1", "7", "0.7,0.3"])
def test_a_split_is_that_of_megatron_core(tmp_path, split):
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    theirs = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for ours, their in zip(split_parts(split), theirs, strict=False):
        assert ours == (their or (ours[0], ours[0]))
    file = IndexedFile(find_indexed(write_indexed(tmp_path / "a", texts(333)))[0])
    parts = split_parts(split)
    spans = [opened(tmp_path / "a", length=1, part=part) for part in parts if part[1] > part[0]]
    documents = [round(end * 333) - round(begin * 333) for begin, end in parts]
    starts = file.starts(np.cumsum([0, *documents]))
    assert [len(one) for one in spans] == [size - 1 for size in np.diff(starts) if size]


@pytest.mark.parametrize("wrong", ["", "a,b", "0,1", "-1,2", "1,2,3,4", "nan,1"])
def test_a_split_that_is_none(wrong):
    with pytest.raises(DataError, match="such as 969,30,1"):
        split_parts(wrong)


def steps_of(data, dp, start, steps, packing=None):
    """By step: the rows that all ranks read together, by sample number."""
    found = []
    batching = Batching(8, 4, replicas=dp, padding=packing)
    loaders = [
        StepLoader(data, batching, [Reader("language", rank, dp)], consumed_samples=start, workers=2, limit=steps)
        for rank in range(dp)
    ]
    for of_ranks in zip(*loaders, strict=True):
        rows = {}
        for step in of_ranks:
            for microbatch in step.microbatches:
                width = data.sequence_length
                ids = (
                    microbatch["input_ids"].reshape(-1)[: width * len(microbatch["sample_numbers"])].reshape(-1, width)
                )
                rows |= dict(zip(microbatch["sample_numbers"].tolist(), ids.tolist(), strict=True))
        found.append(rows)
    for loader in loaders:
        loader.close()
    return found


def test_samples_of_a_step_are_the_same_at_any_layout_and_after_a_resume(tmp_path):
    a, b = write_indexed(tmp_path / "a", texts(90)), write_indexed(tmp_path / "b", texts(30, 5), np.int32)
    sources = [Source("a", str(a), weight=3), Source("b", str(b), weight=1)]
    data = TokenDataset(sources, tokenizer=BYTES, sequence_length=16, seed=7)
    whole = steps_of(data, 1, 0, 6)
    assert [sorted(one) for one in whole] == [list(range(8 * at, 8 * at + 8)) for at in range(6)]
    assert np.bincount(data.order.sources(np.array(range(48)))).tolist() == [36, 12]
    assert steps_of(data, 2, 24, 3) == whole[3:]
    assert steps_of(data, 4, 24, 3, Packing(64)) == whole[3:]
    again = TokenDataset(sources, tokenizer=BYTES, sequence_length=16, seed=7)
    assert again.fingerprint == data.fingerprint and steps_of(again, 2, 8, 1) == whole[1:2]


def test_the_fingerprint_follows_what_the_samples_follow_from(tmp_path):
    write_indexed(tmp_path / "a", texts(90))
    known = {opened(tmp_path / "a").fingerprint}
    for more in ({"length": 17}, {"part": (0.0, 0.5)}, {"part": (0.5, 1.0)}):
        known.add(opened(tmp_path / "a", **more).fingerprint)
    (tmp_path / "moved").mkdir()
    for end in (".bin", ".idx"):
        shutil.copy(tmp_path / f"a{end}", tmp_path / "moved" / f"a{end}")
    assert opened(tmp_path / "moved" / "a").fingerprint in known
    write_indexed(tmp_path / "moved" / "a", texts(90, 1))
    known.add(opened(tmp_path / "moved" / "a").fingerprint)
    assert len(known) == 5


def test_documents_stay_apart_in_packed_rows(tmp_path):
    documents = texts(60, 3, longest=12)
    data = opened(write_indexed(tmp_path / "a", documents), separate=True, shuffle=True)
    starts = np.cumsum([0, *map(len, documents)])
    loader = StepLoader(data, Batching(8, 4, padding=Packing(48, 8)), [Reader("language", 0, 1)], workers=0, limit=3)
    for step in loader:
        for microbatch, shares in zip(step.microbatches, step.plan.shares, strict=True):
            ends, ids = microbatch["documents"], microbatch["input_ids"][0]
            numbers = microbatch["sample_numbers"].tolist()
            wanted, positions, masked = [], [], []
            for place, number in enumerate(numbers):
                _, first = data._window(number)
                cuts = [one - first for one in starts if first < one < first + 16] + [16]
                begin = 0
                for cut in cuts:
                    wanted.append(16 * place + cut)
                    positions += range(cut - begin)
                    masked += [16 * place + cut - 1] if first + cut in starts else []
                    begin = cut
            used = 16 * len(numbers)
            assert [*ends] == wanted + ([len(ids)] if len(ids) > used else []) and len(ids) == shares[0].length
            assert microbatch["position_ids"][0][:used].tolist() == positions
            mask = microbatch["loss_mask"][0][:used]
            assert np.flatnonzero(mask == 0).tolist() == masked
        lengths = {}
        for _, of_sample in enumerate(step.plan.documents):
            for one in of_sample.tolist():
                lengths[one] = lengths.get(one, 0) + 1
        padding = sum(share.length for of in step.plan.shares for share in of) - 16 * 8
        counted = dict(step.plan.texts_of_length)
        assert sum(length * number for length, number in counted.items()) == 16 * 8 + padding
        assert all(counted[length] >= number for length, number in lengths.items())


def test_what_a_name_stands_for(tmp_path):
    for name in ("x-00_text_document", "x-01_text_document", "other"):
        write_indexed(tmp_path / name, texts(3))
    (tmp_path / "tars").mkdir()
    for name in ("t.tar", "t.tar.idx"):
        (tmp_path / "tars" / name).write_bytes(b"")
    named = {
        "x-00_text_document": ["x-00_text_document"],
        "other.idx": ["other"],
        "other.bin": ["other"],
        "x-{00..01}_text_document": ["x-00_text_document", "x-01_text_document"],
        "x-*_text_document": ["x-00_text_document", "x-01_text_document"],
        "*.idx": ["other", "x-00_text_document", "x-01_text_document"],
        "": ["other", "x-00_text_document", "x-01_text_document"],
    }
    for name, wanted in named.items():
        assert [path.name for path in find_indexed(f"{tmp_path}/{name}")] == [f"{one}.idx" for one in wanted], name
    both = f"{tmp_path}/other,{tmp_path}/x-01_text_document"
    assert [path.stem for path in find_indexed(both)] == ["other", "x-01_text_document"]
    for tars in ("tars", "tars/t.tar", "tars/*.tar", "nothing", "x-0"):
        assert not is_indexed(f"{tmp_path}/{tars}"), tars
    assert not is_indexed("s3://bucket/train")
    for wrong, said in (
        (f"{tmp_path}/other,{tmp_path}/tars/t.tar", "reads one kind"),
        ("s3://bucket/corpus.idx", "from file systems only"),
    ):
        with pytest.raises(DataError, match=said):
            is_indexed(wrong)
    (tmp_path / "t.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"other\.idx and t\.tar"):
        is_indexed(tmp_path)


def damaged(path, at, value):
    raw = bytearray(path.read_bytes())
    raw[at : at + len(value)] = value
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.with_suffix(".idx").unlink(), r"a\.idx: there is no such file, only a\.bin"),
        (lambda path: path.with_suffix(".bin").unlink(), r"a\.bin: there is no such file, only a\.idx"),
        (lambda path: path.with_suffix(".idx").write_bytes(b""), "is no index of Megatron-LM"),
        (lambda path: damaged(path.with_suffix(".idx"), 0, b"NO"), "is no index of Megatron-LM"),
        (lambda path: damaged(path.with_suffix(".idx"), 9, b"\x02"), "of version 2"),
        (lambda path: damaged(path.with_suffix(".idx"), 17, b"\x06"), "of type 6"),
        (lambda path: os.truncate(path.with_suffix(".idx"), 60), "has 60 bytes, and .* by its head"),
        (lambda path: os.truncate(path.with_suffix(".bin"), 30), "has 30 bytes, and .* by a.idx"),
        (lambda path: damaged(path.with_suffix(".idx"), -8, b"\x01"), "do not end with its sequences"),
    ],
)
def test_damaged_files_are_told(tmp_path, damage, said):
    prefix = write_indexed(tmp_path / "a", texts(5))
    damage(tmp_path / "a.x")
    with pytest.raises(ShardError, match=rf"data\.mix\[0\]\.shards: .*{said}"):
        opened(prefix)


def test_multimodal_files_are_refused(tmp_path):
    with pytest.raises(ShardError, match="is multimodal"):
        opened(write_indexed(tmp_path / "a", texts(5), multimodal=True))


def test_an_index_that_is_damaged_inside(tmp_path):
    prefix = write_indexed(tmp_path / "a", texts(5))
    damaged(tmp_path / "a.idx", 34 + 4, struct.pack("<i", 3))
    with pytest.raises(ShardError, match="sequences do not stand one behind the other"):
        IndexedFile(tmp_path / "a.idx").require_whole()
    write_indexed(tmp_path / "a", texts(5))
    damaged(tmp_path / "a.idx", 34 + 12 * 5 + 8, struct.pack("<q", 4))
    with pytest.raises(ShardError, match="documents do not stand one behind the other"):
        IndexedFile(tmp_path / "a.idx").require_whole()
    damaged(tmp_path / "a.idx", 34 + 4 * 5 + 8 * 3, struct.pack("<q", 0))
    with pytest.raises(ShardError, match="do not stand one behind the other"):
        data = opened(prefix, length=8, separate=True)
        data.plan_step(0, len(data))


def test_tokens_of_another_tokenizer_end_the_run(tmp_path):
    documents = texts(5, longest=10)
    documents[3][0] = 40_000
    prefix = write_indexed(tmp_path / "a", documents)
    at = sum(map(len, documents[:3]))
    data = opened(prefix, length=len(text_of(documents)) - 1)
    with pytest.raises(DataError, match=rf"data\.tokenizer: .*the id 40000 \(token {at}, in document 3\).* 0 to 261"):
        data.read_text(0)
    documents[3][0] = -1
    with pytest.raises(DataError, match="the id -1"):
        opened(write_indexed(tmp_path / "b", documents, np.int32), length=len(text_of(documents)) - 1).read_text(0)


def test_too_few_tokens_for_a_sample(tmp_path):
    prefix = write_indexed(tmp_path / "a", [[1] * 15 + [END]])
    with pytest.raises(DataError, match=r"data\.mix\[0\]\.shards: no sample in 1 file.*has 16 tokens.*needs 17"):
        opened(prefix)


def test_a_file_that_changes_ends_the_run(tmp_path):
    prefix = write_indexed(tmp_path / "a", texts(20))
    data = opened(prefix)
    before = data.read_text(0)[0].input_ids.tolist()
    damaged(tmp_path / "a.bin", 0, bytes([before[0] ^ 1]))
    with pytest.raises(ShardError, match="changed"):
        data.read_text(1)

"""Samples of several answers: read as one, in one microbatch, and with the media of the sample read once."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from data.loader import StepLoader
from data.order.packing import Packing
from data.order.sources import Source
from data.order.step import Batching, Reader
from data.order.step_plan import Padding
from data.records.members import read_fields
from data.samples.answers import joined
from data.samples.shard_dataset import ShardDataset
from data.samples.text_lengths import TextLengths
from data.text.tokens import build_tokenizer
from tests.tars import write_tar
from tests.unit.data.helpers import encode_image, images

LENGTH = 48
BAD = {"equal": 7, "image": 4}
"""Samples whose answers are equal, and whose image is damaged behind its header."""


def record_of(number, form="pairs"):
    """A record; every third has an image."""
    record = {"prompt": "<image>" * (number % 3 == 1) + f"q{number}"}
    if form == "labels":
        return record | {"completion": f"c{number}" + "c" * (number % 4), "label": number % 2 == 0}
    answers = {"chosen": "a" * (1 + number % 5) + chr(65 + number), "rejected": "b" * (1 + number % 7)}
    return record | answers | {"margin": number / 2}


@pytest.fixture
def folders(tmp_path):
    """Form -> two shards of six samples."""
    for form in ("pairs", "labels"):
        members = []
        for number in range(12):
            image = [(f"{number:02d}.png", encode_image(16, 16, "PNG", value=number))] if number % 3 == 1 else []
            members.append([*image, (f"{number:02d}.json", json.dumps(record_of(number, form)).encode())])
        for at in range(2):
            part = [entry for part in members[6 * at : 6 * at + 6] for entry in part]
            write_tar(tmp_path / form / f"s-{at}.tar", part)
    return {form: tmp_path / form for form in ("pairs", "labels")}


@pytest.fixture
def folder(folders):
    return folders["pairs"]


def opened(shards, form="pairs", length=LENGTH, counted=True, **options):
    tokenizer = build_tokenizer("bytes", ["<image>"])
    data = ShardDataset(shards, tokenizer=tokenizer, sequence_length=length, media=(images(),), form=form, **options)
    if counted:
        for _ in TextLengths(data).build():
            pass
        TextLengths(data).serve()
    return data


def steps(data, padding, *, replicas=1, rank=0, size=6, microbatch=2, limit=4, readers=None, **options):
    batching = Batching(size, microbatch, None, replicas, padding)
    readers = readers or (Reader("language", rank, replicas), Reader("images", rank, replicas))
    with StepLoader(data, batching, readers, workers=0, limit=limit, **options) as loader:
        return list(loader)


def answers_of(step, data):
    """{(row, answer): its learned tokens} of a step, by the microbatches' own keys."""
    texts = {}
    for batch in step.microbatches:
        rows = data.order.rows(np.asarray(batch["sample_numbers"])).tolist()
        for at in batch["answers"].unique().tolist():
            if at >= 0:
                tokens = batch["labels"][batch["answers"] == at].tolist()
                texts[rows[at // data.answers], at % data.answers] = data.tokenizer.decode(tokens)
    return texts


PADDINGS = {
    "sequence": None,
    "microbatch": Padding(4),
    "equal": Padding(8, equal=True),
    "packed": Packing(2 * 2 * LENGTH, equal=True),
    "packed, some rows of padding alone": Packing(2 * 2 * LENGTH, microbatches=6, equal=True),
}


@pytest.mark.parametrize("name", PADDINGS)
@pytest.mark.parametrize("form", ["pairs", "labels"])
def test_every_padding_has_the_same_answers_of_whole_samples(folders, name, form):
    padding = PADDINGS[name]
    data = opened(folders[form], form)
    for replicas in (1, 2):
        of_ranks = [steps(data, padding, replicas=replicas, rank=rank) for rank in range(replicas)]
        for number, of_step in enumerate(zip(*of_ranks, strict=True)):
            texts = [text for step in of_step for text in answers_of(step, data).items()]
            rows = data.order.rows(np.arange(6 * number, 6 * number + 6)).tolist()
            records = {row: record_of(row, form) for row in rows}
            expected = {}
            for row, record in records.items():
                before = row - 1 if row % 6 else row + 5
                names = ("chosen", "rejected") if form == "pairs" else ("completion", "completion")
                others = (record, record) if form == "pairs" else (record, record_of(before, form))
                expected |= {(row, at): others[at][names[at]] for at in range(2)}
            assert dict(texts) == expected and len(texts) == 12
            for step in of_step:
                for batch in step.microbatches:
                    targets = [records[row]["margin" if form == "pairs" else "label"] for row in
                               data.order.rows(np.asarray(batch["sample_numbers"])).tolist()]  # fmt: skip
                    assert batch["targets"].tolist() == targets and batch["targets"].dtype == torch.float32
                    assert batch["answers"].shape == batch["loss_mask"].shape
                    assert (batch["answers"] >= 0).equal(batch["loss_mask"] > 0)
                    count = 2 * len(batch["sample_numbers"])
                    if name.startswith("packed"):
                        assert len(batch["documents"]) in (count, count + 1)
                    else:
                        assert len(batch["input_ids"]) == count
                    if name == "microbatch":
                        assert batch["input_ids"].size(1) == -(-max(batch["lengths"]) // 4) * 4
            plan = of_step[0].plan
            assert plan.answers == 2 and plan.positions == sum(
                batch["input_ids"].numel() for step in of_step for batch in step.microbatches
            )
            assert sum(length * texts for length, texts in plan.texts_of_length.items()) == plan.positions
            assert plan.lengths is None or plan.tokens == sum(
                sum(batch["lengths"]) for step in of_step for batch in step.microbatches
            )


def test_media_are_read_once_and_their_rows_repeated(folder, monkeypatch):
    data = opened(folder, shuffle=False)
    read = Counter()
    original = ShardDataset.read_media

    def counting(self, number, *which):
        read[number] += 1
        return original(self, number, *which)

    monkeypatch.setattr(ShardDataset, "read_media", counting)
    for padding in PADDINGS.values():
        read.clear()
        for step in steps(data, padding, limit=2):
            for batch in step.microbatches:
                numbers = batch["sample_numbers"].tolist()
                counts = [data.token_counts(number)["images"] for number in numbers]
                marks = batch["input_ids"] == data.tokenizer.placeholder_id("<image>")
                rows = batch["feature_rows"]["images"].tolist()
                assert len(rows) == int(marks.sum()) == 2 * sum(counts)
                first = np.cumsum([0, *counts])
                expected = [
                    row for at, count in enumerate(counts) for row in [*range(first[at], first[at] + count)] * 2
                ]
                assert rows == expected
                pixels = batch["modality_inputs"]["images"]
                assert sum(count > 0 for count in counts) == (0 if pixels is None else len(pixels["images"]["pixels"]))
        assert read == Counter(number for number in range(12) if data.token_counts(number)["images"])


def test_a_bad_answer_or_image_drops_the_sample(folder):
    records = [record_of(number) for number in range(12)]
    records[BAD["equal"]]["rejected"] = records[BAD["equal"]]["chosen"]
    image = encode_image(16, 16, "PNG", value=3)
    members = []
    for number, record in enumerate(records):
        raw = image[:-30] + b"\0" * 30 if number == BAD["image"] else image
        members += [(f"{number:02d}.png", raw)] if number % 3 == 1 else []
        members.append((f"{number:02d}.json", json.dumps(record).encode()))
    write_tar(folder / "bad" / "s.tar", members)
    data = opened(folder / "bad", max_bad_samples=2)
    for padding in PADDINGS.values():
        found = [answers_of(step, data) for step in steps(data, padding, size=12, limit=1)]
        rows = {row for row, _ in found[0]}
        assert rows == set(range(12)) - set(BAD.values()) and len(found[0]) == 2 * len(rows)
    assert data.bad_samples.count == 2
    with StepLoader(data, Batching(12, 2), [Reader("images", 0, 1)], workers=0, limit=1) as loader:
        (step,) = loader  # a rank that reads no text knows the image only; flags are exchanged
    assert [data.order.row(number) for number in np.flatnonzero(step.bad)] == [BAD["image"]]


def test_the_mismatched_answer_depends_on_the_shard_alone(folders):
    folder = folders["labels"]
    whole, shuffled = (opened(folder, "labels", shuffle=shuffle) for shuffle in (False, True))
    apart = [opened([folder / f"s-{at}.tar"], "labels", shuffle=False) for at in range(2)]
    for row in range(12):
        number = next(number for number in range(12) if shuffled.order.row(number) == row)
        texts = [data.read_text(at)[0].others[0].labels.tolist() for data, at in
                 ((whole, row), (shuffled, number), (apart[row // 6], row % 6))]  # fmt: skip
        assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("damaged", [0, 3, 5])
def test_an_unreadable_record_lends_no_answer(tmp_path, damaged):
    records = [{"prompt": f"q{n}", "completion": f"c{n}", "label": True} for n in range(6)]
    members = [(f"{n}.json", b"{" if n == damaged else json.dumps(record).encode()) for n, record in enumerate(records)]
    write_tar(tmp_path / "s.tar", members)
    data = opened(tmp_path, "labels", shuffle=False, max_bad_samples=1)
    for row in range(6):
        sample, bad = data.read_text(row)
        assert (bad is not None) == (row == damaged)
        if bad is None:
            lender = (row - 1 - ((row - 1) % 6 == damaged)) % 6
            other = sample.others[0]
            assert data.tokenizer.decode(other.labels[other.loss_mask > 0].tolist()) == f"c{lender}"
            assert data.tokenizer.decode(sample.input_ids[: sample.length].tolist()) == f"q{row}c{row}"


def test_one_record_alone_has_its_own_answer_and_media_in_answers_are_rejected(tmp_path):
    record = {"prompt": "q", "completion": "c", "label": False}
    write_tar(tmp_path / "a" / "s.tar", [("0.json", json.dumps(record).encode())])
    sample, bad = opened(tmp_path / "a", "labels").read_text(0)
    assert bad is None and sample.input_ids.tolist() == sample.others[0].input_ids.tolist()
    record = {"prompt": "q", "completion": "see <image>", "label": True}
    image = ("0.png", encode_image(16, 16, "PNG"))
    write_tar(tmp_path / "b" / "s.tar", [image, ("0.json", json.dumps(record).encode())])
    assert "or that of the sample before it, has media" in opened(tmp_path / "b", "labels").read_text(0)[1].reason


def test_lengths_are_counted_for_each_answer_and_by_form(folder):
    data = opened(folder)
    assert data.lengths.shape == (12, 2) and data.lengths.tolist() == [
        data.lengths_of(row // 6, row % 6) for row in range(12)
    ]
    samples = data.plan_step(3, 5)
    rows = data.order.rows(np.arange(3, 8))
    assert [each.tolist() for each in samples.documents] == data.lengths[rows].tolist()
    assert samples.lengths.tolist() == data.lengths[rows].sum(axis=1).tolist()
    names = {path.name.split(".")[1] for path in Path(folder).glob("*.mimo-lengths")}
    for _ in TextLengths(opened(folder, "labels", counted=False)).build():
        pass
    labelled = opened(folder.parent / "labels", "labels")
    records = [len(json.dumps(record_of(row, "labels"))) for row in range(12)]
    assert labelled.reader.bytes_read["json"] == sum(records), "each is read once"
    assert len({path.name.split(".")[1] for path in Path(folder).glob("*.mimo-lengths")} - names) == 1
    other = folder.parent / "other"
    write_tar(other / "s-9.tar", [("0.json", json.dumps(record_of(0)).encode())])
    several = opened([folder / "s-1.tar", other / "s-9.tar", folder / "s-0.tar"])
    assert several.lengths.tolist() == [
        *data.lengths[6:].tolist(),
        data.lengths[0].tolist(),
        *data.lengths[:6].tolist(),
    ]


def test_both_answers_are_of_the_source_of_their_sample_and_have_their_question(folder):
    data = opened([Source(str(at), [folder / f"s-{at}.tar"]) for at in range(2)], keep_text=True)
    for padding in PADDINGS.values():
        for step in steps(data, padding, limit=2):
            for batch in step.microbatches:
                rows = data.order.rows(np.asarray(batch["sample_numbers"])).tolist()
                assert batch["sources"].shape == batch["answers"].shape
                for place, source in zip(batch["answers"].tolist(), batch["sources"].tolist(), strict=True):
                    pairs = {(at // 2, of) for at, of in zip(place, source, strict=True) if at >= 0}
                    assert all(rows[sample] // 6 == of for sample, of in pairs) and pairs
                questions = [[text for _, text in of_answer] for of_answer in batch["questions"]]
                assert questions == [[f"q{row}"] for row in rows for _ in range(2)]


def test_reference_values_follow_the_rows(folder):
    data = opened(folder)
    data.reference = np.arange(24, dtype=np.float32).reshape(12, 2)
    for padding in PADDINGS.values():
        for step in steps(data, padding, limit=5):
            for batch in step.microbatches:
                rows = data.order.rows(np.asarray(batch["sample_numbers"]))
                assert batch["reference"].tolist() == data.reference[rows].tolist()


@pytest.mark.parametrize("form", ["turns", "pairs"])
def test_a_null_answer_that_is_skipped_has_a_place_in_every_row(form, tmp_path):
    records = [{"caption": None if at == 2 else "abc"} for at in range(4)]
    if form == "pairs":
        records = [{"prompt": "q", "chosen": None if at == 2 else "abc", "rejected": "d"} for at in range(4)]
    write_tar(tmp_path / "s.tar", [(f"{at}.json", json.dumps(each).encode()) for at, each in enumerate(records)])
    data = opened(tmp_path, form, shuffle=False, skip_null=True)
    for padding in PADDINGS.values():
        (step,) = steps(data, padding, size=4, limit=1)
        learned = sum(int(batch["loss_mask"].sum()) for batch in step.microbatches)
        assert learned == 3 * (4 if form == "turns" else 6) and not step.bad.any()


def test_a_prompt_that_fills_the_sequence_has_no_comparison(tmp_path):
    records = [{"prompt": "q" * length, "chosen": "yes", "rejected": "no"} for length in (4, LENGTH - 4, LENGTH)]
    write_tar(tmp_path / "s.tar", [(f"{at}.json", json.dumps(each).encode()) for at, each in enumerate(records)])
    data = opened(tmp_path, shuffle=False)
    counted = [[int(answer.loss_mask.sum()) for answer in data.read_text(row)[0].answers] for row in range(3)]
    assert counted == [[4, 3], [1, 1], [0, 0]]  # with the end of the turn
    complete = data.read_text(0)[0]
    for answers in ([complete, complete.without_loss()], [complete.without_loss(), complete]):
        assert not any(answer.loss_mask.any() for answer in joined(answers).answers)


def test_a_table_is_read_as_the_shard(folders, tmp_path):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    images = [encode_image(16, 16, "PNG", value=number) if number % 3 == 1 else None for number in range(12)]
    for form, folder in folders.items():
        records = [record_of(number, form) for number in range(12)]
        columns = {name: [record[name] for record in records] for name in records[0]}
        columns["image"] = [None if raw is None else {"bytes": raw, "path": None} for raw in images]
        file = tmp_path / f"table-{form}" / "t.parquet"
        file.parent.mkdir()
        parquet.write_table(pyarrow.table(columns), file, row_group_size=6)
        table, tars = (opened(place, form, shuffle=False) for place in (file.parent, folder))
        for row in range(12):
            ours, theirs = table.read_text(row), tars.read_text(row)
            assert ours[1] is theirs[1] is None
            # The first sample of a shard has the answer of its last one; the table is one shard.
            answers = 1 if form == "labels" and row % 6 == 0 else 2
            assert [each.input_ids.tolist() for each in ours[0].answers[:answers]] == [
                each.input_ids.tolist() for each in theirs[0].answers[:answers]
            ]
            assert ours[0].target == theirs[0].target


def test_texts_of_fields_are_answers(folder):
    names = {"prompt": "json[prompt]", "chosen": "json[rejected]", "rejected": "json[chosen]"}
    swapped, plain = opened(folder, fields=read_fields(names, "data.fields")), opened(folder)
    for number in range(12):
        ours, theirs = (data.read_text(number)[0].answers for data in (swapped, plain))
        assert [each.labels.tolist() for each in ours] == [each.labels.tolist() for each in reversed(theirs)]

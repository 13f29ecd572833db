import json
import subprocess
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from data.demo import make as demo
from data.demo.make import make_demo
from data.demo.samples import load_scans
from data.errors import DataError
from data.index.find_shards import find_shards
from data.loader import StepLoader
from data.order.step import Batching, Reader
from data.samples.media_spec import Sampling
from data.samples.shard_dataset import ShardDataset
from data.text.tokens import build_tokenizer
from mimo_train.cli import main
from tests.tars import write_tar
from tests.unit.data.helpers import chat, images, media_of, open_index, prompt_and_truth, text_of

SMALL = {"train_samples": 1500, "held_out_samples": 768, "shards": 3}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return make_demo(tmp_path_factory.mktemp("demos") / "digits", **SMALL)


def open_part(folder, **options):
    tokenizer = build_tokenizer("bytes", ["<image>"])
    media = [images(side=48, tokens=9)]
    return ShardDataset(folder, tokenizer=tokenizer, sequence_length=96, media=media, shuffle=False, **options)


def records(folder):
    for path in find_shards(folder):
        index = open_index(path)
        raw = path.read_bytes()
        for row in range(len(index)):
            member = index.members(row)[index.record(row)]
            yield json.loads(raw[member.offset : member.offset + member.size]), index.members(row)


def test_every_sample_is_good_and_fits(digits):
    for part, size in (("train", 1500), ("held_out", 768)):
        data = open_part(digits / part)
        assert len(data) == size
        end = data.tokenizer.end_of_turn_id
        for number in range(size):
            text = text_of(data, number)
            tokens = data.token_counts(number)["images"]
            turns = text.labels[: text.length].tolist().count(end)
            # Every answer fits; a held-out image is asked about once, a training image up to three times.
            assert turns in ((2,) if part == "held_out" else (2, 4, 6)) and text.length < 96
            answered = text.loss_mask.sum() - turns // 2
            last = len(prompt_and_truth(data, number)[1])
            assert answered == last if turns == 2 else answered > last
            assert tokens in (0, 9, 18)
        pixels = [media_of(data, number, "images") for number in range(100)]
        assert all(item.shape == (3, 48, 48) and item.max() > 150 for items in pixels for item in items)


def test_train_and_held_out_share_no_scan(digits):
    seen = {
        part: {n for record, _ in records(digits / part) for n in record["sources"]} for part in ("train", "held_out")
    }
    assert not seen["train"] & seen["held_out"] and len(seen["held_out"]) > 300
    allowed = [set(load_scans(held_out).sources.tolist()) for held_out in (False, True)]
    assert seen["train"] <= allowed[0] and seen["held_out"] <= allowed[1]
    assert len(allowed[0] | allowed[1]) == 1797 and len(allowed[1]) == 359


def test_answers_follow_from_the_scans(digits):
    labels = {part: load_scans(part == "held_out") for part in ("train", "held_out")}
    by_source = {int(s): int(v) for part in labels.values() for s, v in zip(part.sources, part.labels, strict=True)}
    data = open_part(digits / "held_out")
    for number, (record, members) in enumerate(records(digits / "held_out")):
        question, truth = prompt_and_truth(data, number)
        values = [str(by_source[source]) for source in record["sources"]]
        if question.startswith("Read"):
            assert truth == " ".join(values)
        elif question.startswith("How many"):
            assert truth == str(len(values))
        elif question.startswith("Which digit is in the"):
            assert len(members) == 3 and truth == values["second" in question]
        elif question.startswith("Which"):
            assert truth in values
        elif question.startswith("What colour"):
            assert values.count(question[-2]) == 1
        else:
            assert int(truth) == int(question.rstrip("?").split()[-1]) + 1 and not values


def test_no_question_answers_another(digits):
    """A training conversation asks one kind of question, and never twice the same."""
    for record, _ in records(digits / "train"):
        turns = record.get("conversations") or record["messages"]
        questions = [str(turn.get("value") or turn["content"]) for turn in turns[::2]]
        kinds = {kind for kind in ("Read", "How many", "Which", "What colour", "after") for q in questions if kind in q}
        assert len(kinds) == 1 and len(set(questions)) == len(questions) <= 3


def test_forms_and_formats_are_mixed(digits):
    everything = list(records(digits / "train"))
    assert {name for record, _ in everything for name in record} == {"conversations", "messages", "sources"}
    assert {"jpg", "png", "0.jpg", "1.png"} <= {member.extension for _, members in everything for member in members}
    counts = Counter(sum(member.kind == "image" for member in members) for _, members in everything)
    assert 0.07 < counts[0] / 1500 < 0.13 and 0.005 < counts[2] / 1500 < 0.04


def test_the_best_constant_answers_stay_far_below_seeing(digits):
    parts = {part: open_part(digits / part) for part in ("train", "held_out")}
    asked = {part: [prompt_and_truth(data, number) for number in range(len(data))] for part, data in parts.items()}

    def accuracy(fit, on):
        answers = defaultdict(Counter)
        for question, truth in fit:
            answers[question][truth] += 1
        best = {question: count.most_common(1)[0][0] for question, count in answers.items()}
        return np.mean([best.get(question) == truth for question, truth in on])

    assert accuracy(asked["train"], asked["held_out"]) < 0.3
    assert accuracy(asked["held_out"], asked["held_out"]) < 0.35  # the bound of any guess without pixels


def test_equal_parameters_give_equal_bytes(tmp_path):
    small = {"train_samples": 40, "held_out_samples": 8, "shards": 2}
    first, second = make_demo(tmp_path / "a", **small), make_demo(tmp_path / "b", **small)
    names = sorted(path.relative_to(first) for path in first.rglob("*.tar"))
    assert list(map(str, names)) == [
        "held_out/held_out-000000.tar",
        "train/train-000000.tar",
        "train/train-000001.tar",
    ]
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    other = make_demo(tmp_path / "c", **small, seed=1)
    assert all((first / name).read_bytes() != (other / name).read_bytes() for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]  # nothing left behind


def test_a_demo_is_made_once_and_complete(tmp_path, monkeypatch):
    out, small = tmp_path / "d", {"train_samples": 20, "held_out_samples": 5, "shards": 2}
    (tmp_path / ".d.making" / "train").mkdir(parents=True)  # of a killed process
    (tmp_path / ".d.making" / "train" / "train-000009.tar").write_bytes(b"torn")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(demo, "write_shard", lambda path, samples: 1 / 0)
        make_demo(out, **small)
    assert not out.exists()
    make_demo(out, **small)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.tar")}
    assert make_demo(out, **small) == out and {path: path.stat().st_mtime_ns for path in out.rglob("*.tar")} == times
    assert len(times) == 3 and [path.name for path in tmp_path.iterdir()] == ["d"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.tar").write_bytes(b"theirs")
    for folder, kind, changed, words in (
        (out, "digits", {"seed": 3}, r"seed=0 \(wanted 3\)"),
        (tmp_path / "mine", "digits", {}, "is not empty and holds no demo"),
        (out, "cats", {}, "unknown demo"),
        (out, "digits", {"train_samples": 0}, "train_samples=0"),
        (out, "text", {"shards": 0}, "shards=0"),
        (out, "digits", {"text_only_fraction": 1.5}, r"text_only_fraction.*1\.5"),
    ):
        with pytest.raises(DataError, match=words):
            make_demo(folder, kind, **({} if kind == "text" else small) | changed)
    next(out.glob("train/*.tar")).unlink()  # training would go on with fewer samples
    with pytest.raises(DataError, match=r"has \[1, 1\] training and held-out shards, expected \[2, 1\]"):
        make_demo(out, **small)


def test_text_demo(tmp_path):
    out = make_demo(tmp_path / "t", "text", shards=2)
    tokenizer = build_tokenizer("bytes")
    parts = {
        part: ShardDataset(out / part, tokenizer=tokenizer, sequence_length=256, shuffle=False)
        for part in ("train", "held_out")
    }
    texts = {part: [prompt_and_truth(data, n)[1] for n in range(len(data))] for part, data in parts.items()}
    assert len(texts["train"]) > 60 and 6 <= len(texts["held_out"]) < len(texts["train"]) / 4
    assert not set(texts["train"]) & set(texts["held_out"])
    assert all(90 <= len(text) <= 260 for part in texts.values() for text in part)
    with StepLoader(parts["train"], Batching(4, 2), [Reader("language", 0, 1)], workers=0, limit=1) as loader:
        assert next(loader).microbatches[0]["loss_mask"].sum() > 150


def test_answers_about_videos_follow_from_their_frames(tmp_path):
    pytest.importorskip("av")
    small = {"train_samples": 12, "held_out_samples": 48, "shards": 2}
    first, second = (make_demo(tmp_path / name, "video_digits", **small) for name in "ab")
    names = [path.relative_to(first) for path in first.rglob("*.tar")]
    assert len(names) == 3 and all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    digits = load_scans(True)
    by_source = {int(source): str(label) for source, label in zip(digits.sources, digits.labels, strict=True)}
    data = ShardDataset(
        first / "held_out",
        tokenizer=build_tokenizer("bytes", ["<image>"]),
        sequence_length=160,
        media=[images(side=48, tokens=9)],
        sampling=Sampling(4.0, 8),
        shuffle=False,
    )
    kinds = Counter()
    for number, (record, _) in enumerate(records(first / "held_out")):
        question, truth = prompt_and_truth(data, number)
        values = [by_source[source] for source in record["sources"]]
        frames = media_of(data, number, "images")
        assert len(frames) == 8
        # Rows and columns with ink in the first and the last frame.
        ink = [frames[at].max(0).values.float() - 40 for at in (0, 7)]
        rows, columns = ([part.clamp(min=0).sum(axis) for part in ink] for axis in (1, 0))
        if "came" in question:
            assert truth == values["last" in question] and not torch.equal(ink[0], ink[1])
        elif "Which way" in question:
            assert question[-7] in values
            if len(values) == 1:
                before, after = rows if truth in ("up", "down") else columns
                moved = (after.argmax() > before.argmax()).item()
                assert moved == (truth in ("right", "down"))
                kinds["single"] += 1
        else:
            assert truth in values and question.rstrip("?").split()[-1] in ("left", "right", "up", "down")
        kinds[question.split()[1] + question.split()[2]] += 1
    assert {"single", "digitcame", "waydoes", "digitmoves"} == {*kinds}


def test_videos_need_pyav(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match=r"PyAV.*mimo-train\[video\]"):
        make_demo(tmp_path / "v", "video_digits", train_samples=1, held_out_samples=1, shards=1)
    assert not (tmp_path / "v").exists()


# Commands


def run(*arguments):
    return main(["shards", *map(str, arguments)])


@pytest.fixture
def with_bad_samples(tmp_path, small):
    broken = tmp_path / "broken"
    broken.mkdir()
    for shard in small.glob("*.tar"):
        (broken / shard.name).write_bytes(shard.read_bytes())
    members = [("x.jpg", b"no image"), ("x.json", chat("<image>q", "a")), ("y.json", chat("q", "a")), ("z.png", b"")]
    write_tar(broken / "b.tar", members)
    (broken / "c.tar").write_bytes((small / "a-000000.tar").read_bytes()[:-10000])
    return broken


def test_index_command(small, with_bad_samples, capsys):
    assert run("index", small, "--workers", "2") == 0
    assert (
        "2 of 2 shards indexed, 13 samples, 0 of them bad by their headers; records and media are not read"
        in capsys.readouterr().out
    )
    assert (small / "shards.mimo-catalogue").is_file()
    assert run("index", with_bad_samples) == 1
    output = capsys.readouterr()
    assert "3 of 4 shards" in output.out and "b.tar: 3 samples, 1 of them" in output.out
    assert "c.tar" in output.err and "truncated" in output.err


def test_index_command_counts_the_texts_of_a_config(small, capsys):
    data = (f"data.shards={small}", "data.demo=", "data.validation_shards=")
    for counted in (13, 0):
        assert run("index", "vlm_digits", *data) == 0
        output = capsys.readouterr().out
        assert "2 of 2 shards indexed" in output and f"\n{counted} of 13 texts counted now" in output
    assert len(list(small.glob("shards.*.mimo-lengths"))) == 1
    assert run("index", "vlm_digits", *data, "data.pad=sequence") == 0
    assert "need not be counted" in capsys.readouterr().out
    assert run("index", "vlm_digits", *data, "data.padd=sequence") == 1 and "data.pad" in capsys.readouterr().err


def test_inspect_command(small, with_bad_samples, tmp_path, capsys):
    assert run("inspect", small, "--samples", "1", "--cache-dir", tmp_path / "cache") == 0
    output = capsys.readouterr().out
    assert "0 samples bad by their headers; records and media are not read here: `mimo-train shards verify`" in output
    assert "2 shards, 13 samples" in output and "0000  .0.png 20x16" in output and "20 x 16" in output
    assert not list(small.glob("*.mimo-catalogue"))
    assert run("inspect", with_bad_samples) == 1 and "c.tar" in capsys.readouterr().err
    assert run("inspect", tmp_path / "nowhere") == 1 and "data.shards" in capsys.readouterr().err


def test_verify_command(small, with_bad_samples, capsys):
    assert run("verify", small) == 0 and "13 samples checked, 0 bad" in capsys.readouterr().out
    assert run("verify", with_bad_samples) == 1
    output = capsys.readouterr().out
    assert "b.tar: key x: member .jpg" in output and "b.tar: key z" in output and "key y" not in output
    assert "bad shard" in output and "16 samples checked, 2 bad; 1 shard cannot be read" in output


def test_make_demo_command(tmp_path, capsys):
    assert run("make-demo", tmp_path / "d", "--samples", 30, "--held-out", 5) == 0
    assert run("make-demo", tmp_path / "t", "--kind", "text") == 0
    assert run("verify", f"{tmp_path}/d/train,{tmp_path}/t/train") == 0
    assert run("make-demo", tmp_path / "t", "--kind", "text", "--samples", 3) == 1
    assert "fixed size" in capsys.readouterr().err


def test_the_command_line_imports_no_heavy_package():
    heavy = ("torch", "numpy", "PIL", "sklearn", "webdataset")
    code = f"import sys, mimo_train.commands.shards; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

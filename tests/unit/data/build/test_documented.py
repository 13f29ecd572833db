"""The commands of docs/data.md under "What you have", run on what each section is about."""

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import soundfile

from data.index.find_shards import find_shards
from mimo_train.cli import main
from tests.indexed import texts, write_indexed
from tests.tars import write_tar
from tests.unit.config.test_energon import energon
from tests.unit.data.build.test_build import hugging_face
from tests.unit.data.helpers import encode_image, open_index
from tests.videos import make_video

DOCUMENT = (Path(__file__).parents[4] / "docs" / "data.md").read_text()
PART = DOCUMENT.partition("## What you have\n")[2].partition("\n## ")[0]
SECTIONS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", PART, flags=re.S | re.M))
NUMBER = 4
"""Samples of every source."""


def drawn_images(folder):
    folder.mkdir(parents=True)
    for at in range(NUMBER):
        (folder / f"{at}.jpg").write_bytes(encode_image(16, 16, seed=at))


def table(file, rows, delimiter=","):
    with open(file, "w", newline="") as lines:
        csv.writer(lines, delimiter=delimiter).writerows(rows)


def llava():
    drawn_images(Path("images/coco"))
    turns = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "A hill."}]
    records = [{"id": str(at), "image": f"coco/{at}.jpg", "conversations": turns} for at in range(NUMBER)]
    Path("llava.json").write_text(json.dumps(records))


def photos():
    drawn_images(Path("photos"))
    table("photos/photos.csv", [["path", "title"], *([f"{at}.jpg", f"Hill {at}"] for at in range(NUMBER))])


def videos():
    film = make_video(images=4)
    for folder in ("clips", "videos/a"):
        Path(folder).mkdir(parents=True)
        for at in range(NUMBER):
            Path(f"{folder}/{at}.mp4").write_bytes(film)
            Path(f"clips/{at}.txt").write_text("Grey.")
    turns = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "Grey."}]
    records = [{"id": str(at), "video": f"a/{at}.mp4", "conversations": turns} for at in range(NUMBER)]
    Path("llava_video.json").write_text(json.dumps(records))
    captions = [{"idx": "0", "content": "Dark."}, {"idx": "-1", "content": "Grey."}]
    lines = [json.dumps({"video_path": f"a/{at}.mp4", "captions": captions}) for at in range(NUMBER)]
    Path("sharegpt4video.jsonl").write_text("\n".join(lines))
    table("webvid.csv", [["videoid", "page_dir", "name"], *([at, "a", "Grey."] for at in range(NUMBER))])


def speech():
    Path("cv/clips").mkdir(parents=True)
    Path("LibriSpeech/dev-clean/19/198").mkdir(parents=True)
    Path("kaldi/train").mkdir(parents=True)
    for name in [*(f"LibriSpeech/dev-clean/19/198/19-198-{at}.flac" for at in range(NUMBER)), "long.wav"]:
        soundfile.write(name, np.zeros(4 * 16000, dtype=np.float32), 16000)
    for at in range(NUMBER):
        soundfile.write(f"cv/clips/{at}.mp3", np.zeros(16000, dtype=np.float32), 16000)
    rows = [["path", "sentence"], *([f"{at}.mp3", "Hello."] for at in range(NUMBER))]
    table("cv/train.tsv", rows, "\t")
    lines = [f"19-198-{at} HELLO\n" for at in range(NUMBER)]
    Path("LibriSpeech/dev-clean/19/198/19-198.trans.txt").write_text("".join(lines))
    entries = [{"audio_filepath": "long.wav", "offset": at, "duration": 1, "text": "Hello."} for at in range(NUMBER)]
    Path("manifest.json").write_text("\n".join(map(json.dumps, entries)))
    Path("kaldi/train/wav.scp").write_text("long long.wav\n")
    Path("kaldi/train/segments").write_text("".join(f"long-{at} long {at} {at + 1}\n" for at in range(NUMBER)))
    Path("kaldi/train/text").write_text("".join(f"long-{at} HELLO\n" for at in range(NUMBER)))


def pets():
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}
    images = [{"bytes": encode_image(16, 16, "PNG"), "path": None}] * NUMBER
    for split in ("train", "test"):
        file = f"data/{split}-00000-of-00001.parquet"
        hugging_face(Path("pets"), {"image": images, "label": [0, 1] * (NUMBER // 2)}, features, file)


def shards(folder="shards", record=None):
    raw = json.dumps(record or {"caption": "A hill.", "key": "0"}).encode()
    members = [
        (f"{at}.{end}", one) for at in range(NUMBER) for end, one in (("jpg", encode_image(9, 9)), ("json", raw))
    ]
    write_tar(Path(folder) / "00000.tar", members)


def laion():
    shards("laion")
    Path("laion/00000_stats.json").write_text(json.dumps({"successes": NUMBER}))


def album():
    drawn_images(Path("album/summer"))
    for at in range(NUMBER):
        Path(f"album/summer/{at}.txt").write_text("A hill.")


def corpus():
    Path("corpus.jsonl").write_text("\n".join(json.dumps({"text": f"Text {at}."}) for at in range(NUMBER)))


SOURCES = {
    "A LLaVA JSON and its images": llava,
    "A CSV and its images": photos,
    "Videos with captions": videos,
    "Audio with transcripts": speech,
    "Parquet files": pets,
    "A Hugging Face dataset": pets,
    "Output of img2dataset": laion,
    "Images beside captions": album,
    "Texts": corpus,
    ".bin and .idx of Megatron-LM": lambda: write_indexed(Path("corpus_text_document"), texts(1000, longest=300)),
    "WebDataset shards": shards,
    "Energon": lambda: energon(Path("coco")),
}


def test_every_section_is_tried_and_in_the_table():
    assert [*SECTIONS] == [*SOURCES, "Forms of media", "What a build does"]
    linked = re.findall(r"\]\(#([\w-]+)\)", PART.partition("###")[0])
    assert [name.lower().replace(" ", "-").replace(".", "") for name in SOURCES] == [*linked[:-1]][: len(SOURCES)]


@pytest.mark.parametrize("section", SOURCES)
def test_the_commands_of_a_section_do_what_it_says(section, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    SOURCES[section]()
    lines = [
        line for block in re.findall(r"```bash\n(.*?)```", SECTIONS[section], flags=re.S) for line in block.splitlines()
    ]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("mimo-train ")]
    assert commands
    for command in commands:
        # Processes of their own are a test's of the build.
        command = [
            word if before != "--workers" else "1" for before, word in zip(["", *command], command, strict=False)
        ]
        assert main(command) == 0, capsys.readouterr()
        if command[:2] == ["shards", "build"]:
            to = Path(command[command.index("--to") + 1])
            built = [open_index(path) for path in sorted(to.rglob("*.tar"))]
            assert sum(map(len, built)) == NUMBER and not any(index.num_bad for index in built)
            assert main(["shards", "verify", str(to / "train")]) == 0
            assert find_shards(to / "train")

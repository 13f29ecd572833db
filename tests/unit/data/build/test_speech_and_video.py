"""Shards from datasets of videos and speech, and segments of recordings."""

import io
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile

from data.build.build import Settings
from data.errors import DataError
from data.index.find_shards import find_shards
from data.media.audio import decode_audio
from data.rows.samples import Columns
from data.rows.segments import CUT
from data.storage.reader import ShardReader
from mimo_train.cli import main
from tests.unit.data.build.helpers import build, clip, found, image
from tests.unit.data.helpers import open_index
from tests.videos import make_video

RATE, SEEKS = 16000, range(16000, 48000, 1777)


def put(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def lines(records):
    return "\n".join(map(json.dumps, records))


def turns(question, answer):
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


@pytest.fixture(scope="module")
def film():
    return make_video(images=8)


def test_videos_next_to_captions(film, tmp_path):
    files = {"a/0.mp4": film, "a/0.txt": "Grey.", "a/1.mp4": film, "a/1.json": '{"caption": "Greyer."}'}
    built = build(put(tmp_path / "videos", files), tmp_path / "out")
    assert built.media["video"] == 2
    assert found(tmp_path / "out" / "train") == [([64], "Grey."), ([64], {"caption": "Greyer."})]
    put(tmp_path / "videos", {"a/2.avi": film, "a/2.txt": "Grey."})
    with pytest.raises(DataError, match=r"a/2: \.avi cannot be decoded: convert it, video formats are m4v"):
        build(tmp_path / "videos", tmp_path / "other")


def test_a_table_whose_columns_make_up_the_file_names(film, tmp_path):
    """As WebVid has it."""
    table = 'videoid,contentUrl,page_dir,name\n11,https://x.y/11.mp4,01_50,"Grey, dark"\n12,https://x.y/12.mp4,,Grey\n'
    folder = put(tmp_path / "webvid", {"train.csv": table, "videos/01_50/11.mp4": film})
    columns = {"video": "{page_dir}/{videoid}.mp4", "caption": "name"}
    with pytest.raises(DataError, match=r"line 3: 'page_dir' is empty, and a file name needs it"):
        build(folder / "train.csv", tmp_path / "out", media=folder / "videos", columns=columns)
    skip = Settings(seed=None, skip_bad=True, max_bad=1)
    build(folder / "train.csv", tmp_path / "out", skip, folder / "videos", columns)
    ((extents, record),) = found(tmp_path / "out" / "train")
    assert extents == [64] and record["caption"] == "Grey, dark" and record["video"] == "01_50/11.mp4"
    with pytest.raises(DataError, match=r"video=\{page\}/1.mp4: .* has the columns videoid, contentUrl"):
        build(folder / "train.csv", tmp_path / "other", columns={"video": "{page}/1.mp4"})
    with pytest.raises(DataError, match="only image, video, audio join columns"):
        Columns.parse(["caption={name}"])


def test_image_markers_of_videos_and_captions_of_keyframes(film, tmp_path):
    """As LLaVA-Video-178K and ShareGPT4Video have them."""
    folder = put(tmp_path / "media", {"a/0.mp4": film, "still.png": image(4)})
    keyframes = [{"idx": "0", "content": "Dark."}, {"idx": "-1", "content": "Dark, then light."}]
    records = [
        {"video": "a/0.mp4", "conversations": turns("<image>\nWhat is it?", "Grey.")},
        {"video": "a/0.mp4", "image": "still.png", "conversations": turns("<image>\n<video>\nWhat?", "Grey.")},
        {"video_id": "0", "video_path": "a/0.mp4", "keyframe": [0, 4], "captions": keyframes},
    ]
    file = put(tmp_path, {"records.jsonl": lines(records)}) / "records.jsonl"
    built = build(file, tmp_path / "out", media=folder, question="Describe.")
    samples = [record for _, record in found(tmp_path / "out" / "train")]
    assert samples[:2] == records[:2]
    assert samples[2]["conversations"] == turns("<video>\nDescribe.", "Dark, then light.")
    assert built.notes == ["1 record with captions of keyframes: learned is the one of the whole video, idx -1"]
    file.write_text(lines([records[2] | {"captions": keyframes[:1]}]))
    with pytest.raises(DataError, match="expected one caption with idx -1, of the whole video, got 0"):
        build(file, tmp_path / "other", media=folder)


def test_librispeech(tmp_path):
    folder = tmp_path / "LibriSpeech"
    put(folder, {f"dev/19/198/19-198-000{at}.flac": clip(800 + at) for at in range(2)})
    put(folder, {"dev/19/198/19-198.trans.txt": "19-198-0000 HELLO THERE\n19-198-0001 HI\n", "README.TXT": "x"})
    build(folder, tmp_path / "out", question="Transcribe.")
    samples = found(tmp_path / "out" / "train")
    assert [record["conversations"] for _, record in samples] == [
        turns("<audio>\nTranscribe.", "HELLO THERE"),
        turns("<audio>\nTranscribe.", "HI"),
    ]
    assert samples[0][1]["audio"] == "dev/19/198/19-198-0000.flac"
    put(folder, {"train/20/1/20-1.trans.txt": "20-1-0000 HI\n", "train/20/1/20-1-0001.flac": clip(80)})
    with pytest.raises(DataError, match="has the parts dev, train: say which with --split"):
        build(folder, tmp_path / "two")
    with pytest.raises(DataError, match="2 of 2 records") as error:
        build(folder, tmp_path / "two", split="train")
    assert "no file" in str(error.value) and "20-1-0001.flac: no line in 20-1.trans.txt" in str(error.value)


def recording(kind="WAV", subtype="PCM_16", seconds=4, channels=1, rate=RATE):
    """A recording whose loudness shows where a segment is from."""
    noise = np.random.default_rng(0).uniform(-1, 1, (seconds * rate, channels)).cumsum(0)
    wave = (noise / np.abs(noise).max() * 0.9).astype(np.float32)
    raw = io.BytesIO()
    soundfile.write(raw, wave, rate, format=kind, subtype=subtype)
    return raw.getvalue()


def clips_in(folder):
    """The audio of each sample."""
    reader, audio = ShardReader(), []
    for path in find_shards(folder):
        index = open_index(path)
        for row in range(len(index)):
            member = index.members(row)[0]
            raw = reader.read(index.path, member.offset, member.size, member.extension)
            audio.append((member.extension, decode_audio(raw, RATE).numpy()))
    return audio


@pytest.mark.parametrize(
    ("kind", "subtype", "written"),
    [
        ("WAV", "PCM_16", "flac"),
        ("FLAC", "PCM_24", "flac"),
        ("WAV", "ULAW", "flac"),
        ("WAV", "PCM_U8", "flac"),
        ("WAV", "FLOAT", "wav"),
        ("WAV", "PCM_32", "wav"),
        ("OGG", "VORBIS", "flac"),  # libsndfile seeks it wrongly
        ("MP3", "MPEG_LAYER_III", "flac"),
    ],
)
def test_segments_of_a_recording(kind, subtype, written, tmp_path):
    """A NeMo manifest: an entry without an offset begins at 0."""
    name, raw = f"long.{kind.lower()}", recording(kind, subtype, channels=2)
    entries = [
        {"audio_filepath": name, "duration": 1.5, "text": "One."},
        {"audio_filepath": name, "offset": 1.5, "duration": 2.2503, "text": "Two."},
        {"audio_filepath": name, "offset": 3, "text": "Three."},
        {"audio_filepath": name, "offset": 0, "duration": 4.004, "text": "All."},
    ]
    folder = put(tmp_path / "nemo", {name: raw, "manifest.json": lines(entries)})
    built = build(folder / "manifest.json", tmp_path / "out")
    assert built.notes == [f"3 records {CUT}"]
    samples, whole = clips_in(tmp_path / "out" / "train"), decode_audio(raw, RATE).numpy()
    assert [extension for extension, _ in samples] == [*[written] * 3, kind.lower()]
    bounds = [(0, 24000), (24000, 60005), (48000, 64000), (0, 64000)]
    tolerance = 2**-15 if kind in ("OGG", "MP3") else 0
    for (_, wave), (start, end) in zip(samples, bounds, strict=True):
        np.testing.assert_allclose(wave, whole[start:end], rtol=0, atol=tolerance)
    assert found(tmp_path / "out" / "train")[1][1] == entries[1]


def test_libsndfile_seeks_vorbis_inexactly():
    """The reason to decode compressed recordings from their start."""
    raw = recording("OGG", "VORBIS", channels=2)
    complete, _ = soundfile.read(io.BytesIO(raw))
    with soundfile.SoundFile(io.BytesIO(raw)) as file:
        assert any(file.seek(at) and np.abs(file.read(99) - complete[at : at + 99]).max() > 0.01 for at in SEEKS)


def test_segments_in_parts_tables_and_columns(tmp_path):
    def ask(*parts):
        content = [{"type": "text", "text": "What?"}, *parts]
        return [{"role": "user", "content": content}, {"role": "assistant", "content": "Noise."}]

    part = {"type": "audio", "audio": "a.wav", "start": 1, "end": 2}
    records = [
        {"messages": ask(part, part | {"start": 0})},
        {"audio": {"path": "a.wav", "start": "3.5", "end": None}, "caption": "Noise."},
        {"audio": ["a.wav", {"path": "a.wav", "end": 0.5}], "caption": "Noise."},
    ]
    raw = recording()
    folder = put(tmp_path / "audio", {"a.wav": raw, "records.json": json.dumps(records)})
    build(folder / "records.json", tmp_path / "parts")
    assert [extents for extents, _ in found(tmp_path / "parts" / "train")] == [[16000, 32000], [16000], [64000, 16000]]
    assert [len(wave) for _, wave in clips_in(tmp_path / "parts" / "train")] == [16000, 8000, 64000]

    put(folder, {"table.csv": "audio,from,to,text\na.wav,1,2.5,One.\na.wav,,,All.\n"})
    build(folder / "table.csv", tmp_path / "table", columns={"start": "from", "end": "to"})
    assert [len(wave) for _, wave in clips_in(tmp_path / "table" / "train")] == [24000, 64000]
    build(folder / "table.csv", tmp_path / "unnamed")
    assert [len(wave) for _, wave in clips_in(tmp_path / "unnamed" / "train")] == [64000] * 2

    row = {"audio": {"bytes": raw, "path": None}, "start": 1.0, "end": 2.0, "text": "The bytes are the segment."}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "bytes.parquet")
    build(folder / "bytes.parquet", tmp_path / "bytes")
    build(folder / "bytes.parquet", tmp_path / "named", columns={"start": "start", "end": "end"})
    lengths = [len(wave) for name in ("bytes", "named") for _, wave in clips_in(tmp_path / name / "train")]
    assert lengths == [64000, 16000]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"audio": "a.wav", "start": 5, "end": 6}, r"a.wav: the segment 5 to 6 s is outside of the recording, of 4 s"),
        ({"audio": "a.wav", "start": 3, "end": 4.6}, "outside of the recording.*--whole-files"),
        ({"audio": "a.wav", "start": 2, "end": 2}, "a segment must end after its start, got 2 to 2 s"),
        ({"audio": "a.wav", "start": 2, "end": 2.00001}, "has no sample at 16000 Hz"),
        ({"audio": "a.wav", "start": -1, "end": 2}, "'start' must be seconds of the recording, got -1"),
        ({"audio": "a.wav", "start": "00:01", "end": 2}, "'start' must be seconds of the recording, got '00:01'"),
        ({"audio": "a.wav", "start": 1, "offset": 2}, "has both start and offset"),
        ({"audio": ["a.wav", "a.wav"], "start": 1, "end": 2}, "apply to one recording, and the record has 2"),
        ({"audio": {"path": "a.wav", "end": 3}, "start": 1}, "has the segments 1 to the end s and 0 to 3 s of one"),
        ({"video": "a.mp4", "start": 0, "end": 1}, "segments of a video .* are not supported. Cut the file first"),
        ({"audio": "b.wav", "start": 0, "end": 1}, "b.wav: cannot cut 0 to 1 s"),
    ],
)
def test_segments_that_cannot_be_cut(record, message, film, tmp_path):
    folder = put(tmp_path / "audio", {"a.wav": recording(), "a.mp4": film, "b.wav": b"RIFF"})
    put(folder, {"records.json": json.dumps([record | {"caption": "Noise."}])})
    with pytest.raises(DataError, match=message):
        build(folder / "records.json", tmp_path / "out")


def test_files_are_whole_on_demand(tmp_path):
    folder = put(tmp_path / "audio", {"a.wav": recording()})
    put(folder, {"records.json": json.dumps([{"audio": "a.wav", "start": 70, "end": "x", "caption": "Noise."}])})
    assert main(["shards", "build", f"{folder}/records.json", "--to", f"{tmp_path}/out", "--whole-files"]) == 0
    assert [len(wave) for _, wave in clips_in(tmp_path / "out" / "train")] == [64000]
    with pytest.raises(DataError, match="start=... and --whole-files are both given"):
        Columns.parse(["start=begin"], whole_files=True)


def test_a_data_directory_of_kaldi(tmp_path):
    folder = put(tmp_path / "data", {"wav/a.wav": recording(), "wav/b.flac": clip(800)})
    put(folder, {"wav.scp": "a wav/a.wav\nb\twav/b.flac\nc sph2pipe c.sph |\n"})
    put(folder, {"segments": "a-1 a 0.5 1.0\na-2 a 1.0 -1\nb-1 b 0 0.1\nc-1 c 0 1\nd-1 a 0 1\n"})
    put(folder, {"text": "a-1 HELLO THERE\na-2\tHI\nb-1 HO\nc-1 NO\ne-1 NO\n"})
    build(folder, tmp_path / "out", Settings(seed=None, skip_bad=True, max_bad=9))
    assert [len(wave) for _, wave in clips_in(tmp_path / "out" / "train")] == [8000, 48000, 1600]
    assert [record["text"] for _, record in found(tmp_path / "out" / "train")] == ["HELLO THERE", "HI", "HO"]
    reasons = (tmp_path / "out" / "left_out.jsonl").read_text()
    for reason in (
        "has a command for c",
        "line 5: no line `e-1 RECORDING START END` in segments",
        "d-1: no line in text",
    ):
        assert reason in reasons
    (folder / "segments").unlink()
    put(folder, {"text": "a HELLO\nb HO\n", "wav.scp": "a wav/a.wav\nb wav/b.flac\n"})
    build(folder, tmp_path / "whole")
    assert [len(wave) for _, wave in clips_in(tmp_path / "whole" / "train")] == [64000, 1600]

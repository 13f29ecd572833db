"""Tokens, pixels, times and positions of odd videos are those of the processor and class of transformers."""

import io
import json
import weakref

import numpy as np
import pytest
import torch

from data.media.headers import parse_video_header_bytes
from data.media.options import Bounds
from data.media.video import decode_frames
from mimo_train.config.errors import ConfigError
from tests.dist.all_types.flow import composed, make, outcome
from tests.dist.all_types.test_all_types import ALL, BOUND, PACKAGES
from tests.dist.ranks import run_ranks
from tests.tars import write_tar
from tests.videos import ODD_VIDEOS

SMALL = {"size": {"shortest_edge": 4096, "longest_edge": 2**16}, "max_frames": 16}
TOTAL = {"size": {"shortest_edge": 4096, "longest_edge": 2**20}, "max_frames": 16}
KINDS = {"qwen2_vl": SMALL, "qwen3_vl": TOTAL} | ({"qwen2_5_vl": SMALL, "glm46v": {}} if ALL else {})
"""Types: pixels by the class, times in the text, seconds in positions, text around frames; options of the processor."""
DEFAULT = "modules.images.encoder.video and default fps=2.0"
MINUTES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), ("16", DEFAULT, "576 of 20000")),
    "qwen3_vl": ("16", "modules.images.encoder.video", "480 of 20000"),
    "glm46v": ("120", "the model's processor", "27840 of 20000"),
}
"""What `check` says of a minute of video: frames, by which they are chosen, tokens."""
REJECTED = {
    "qwen2_vl": [
        ({"max_frames": "many"}, "expected int, got str"),
        ({"max_frames": 1}, "chooses no frames of 600"),
        ({"size": 32}, "cannot process it"),
        ({"patch_size": 7}, "patch_size is 14 in the weights, and set to 7. Remove it"),
    ],
    "qwen3_vl": [
        ({"num_frames": 4}, "fps is 2 by default: set it to null"),
        ({"rescale_factor": 0.5}, "frames must be normalized as images are"),
        ({"merge_size": 1}, "merge_size is 2 in the weights"),
    ],
    "glm46v": [({"fps": 1.0}, "Glm46VVideoProcessor ignores fps. Remove it")],
}
"""Options that are config errors, and what these say."""
LONG = "4 hours"
FEW = ("minicpmv4_7", "qwen2_5_vl", "qwen3_vl")
"""Types that always run: positions by the class and tiles, seconds in positions, features of several layers."""


def _types():
    if not ALL:
        return FEW
    from scripts.model_tables import tier_of_parts, types_of_parts

    return sorted(kind for kind, name in types_of_parts().items() if "image" in tier_of_parts(kind, name).media)


@pytest.mark.parametrize("kind", _types())
def test_a_type_is_trained_on_videos(kind, tmp_path):
    if kind in PACKAGES:
        pytest.importorskip(PACKAGES[kind])
    (found,) = run_ranks(outcome, 1, kind, tmp_path, True)
    if isinstance(found, str):
        pytest.skip(found)
    assert found.keys == [] and found.same_ids
    assert found.logits < BOUND and found.resumed < BOUND


def test_odd_videos(tmp_path):
    assert run_ranks(_compared, 1, tmp_path) == [[*KINDS]]


def _compared(folder):
    from transformers import Glm46VVideoProcessor, Qwen3VLVideoProcessor

    from encoders.transformers_media.videos import reads_option

    assert not reads_option(Glm46VVideoProcessor(), "fps") and reads_option(Qwen3VLVideoProcessor(), "fps")
    videos = {name: made() for name, made in ODD_VIDEOS.items()}
    frames = {name: _every_frame(raw) for name, raw in videos.items()}
    for kind, options in KINDS.items():
        names = [name for name in videos if name != LONG or options]
        _compare(kind, folder / kind, {name: videos[name] for name in names}, frames, options)
    return [*KINDS]


def _every_frame(raw):
    """Return (frames, their number per second, frames per second as floats)."""
    import av

    with av.open(io.BytesIO(raw)) as file:
        stream = file.streams.video[0]
        count, rate = sum(1 for _ in file.decode(video=0)), float(stream.average_rate)
        if not stream.frames:  # Matroska, of which libavformat estimates the rate and transformers reads no frame
            rate = float(parse_video_header_bytes(raw).rate)
    return torch.stack([*decode_frames(raw, range(count), Bounds(seconds=20000))]), rate


def _compare(kind, folder, videos, frames, options):
    from transformers import AutoProcessor
    from transformers.video_utils import VideoMetadata

    from mimo_train.inputs.datasets import shard_dataset, tokenizer_of, training_sources
    from mimo_train.layout.run import resolve
    from mimo_train.preflight.check.media import add_media
    from mimo_train.preflight.check.report import Report

    folder.mkdir()
    make(kind, folder, videos=True)
    messages = [
        {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "what moves?"}]},
        {"role": "assistant", "content": "a wall"},
    ]
    members = []
    for number, raw in enumerate(videos.values()):
        members += [(f"{number:02}.json", json.dumps({"messages": messages}).encode()), (f"{number:02}.mp4", raw)]
    write_tar(folder / "samples.tar", members)
    overrides = (f"modules.images.encoder.video={json.dumps(options)}", "data.bounds.seconds=20000")
    cfg = composed(folder, "video", "data.sequence_length=20000", *overrides)
    tokenizer, encoder = tokenizer_of(cfg), cfg.modules["images"].encoder
    dataset, report = shard_dataset(cfg, tokenizer, training_sources(cfg)), Report()
    encoder.video = options | {"rescale_factor": 0.5}
    other = shard_dataset(cfg, tokenizer, training_sources(cfg))
    assert other.lengths_keys() != dataset.lengths_keys(), "lengths of texts are kept for a processor's options"
    encoder.video = options
    for rejected, message in REJECTED.get(kind, ()):
        with pytest.raises(ConfigError, match=f"^modules.images.encoder.video: .*{message}"):
            resolve(composed(folder, "video", f"modules.images.encoder.video={json.dumps(rejected)}"))
    add_media(report, cfg)
    assert report.tables[-1].rows == [("images", *MINUTES[kind])]
    processor = AutoProcessor.from_pretrained(folder / "model")
    part = processor.video_processor
    processor.video_processor = type(part).from_dict(part.to_dict(), **options)
    text, reader, pad = processor.apply_chat_template(messages), encoder.videos(), tokenizer.placeholder_id("<image>")
    for extent in ((300, 500, 8, 2, 1), (20, 30, 8, 2, 1)):
        _resized_one_at_a_time(reader, extent)
    for number, name in enumerate(videos):
        every, rate = frames[name]
        if len(every) == 1:  # of which the processors of Qwen-VL take none
            every = every.expand(2, -1, -1, -1)
        count, _, height, width = every.shape
        metadata = VideoMetadata(
            total_num_frames=count, fps=rate, height=height, width=width, duration=count / rate,
            frames_indices=[0, 0],
        )  # fmt: skip
        how = {**reader.sampling, "video_metadata": [metadata], "return_metadata": True}
        how |= {"do_sample_frames": not name.startswith("one frame"), "return_mm_token_type_ids": True}
        batch = processor(text=[text], videos=[every], return_tensors="pt", **how)
        sample, bad = dataset.read_text(number)
        assert bad is None, (kind, name, bad)
        video = processor.tokenizer.convert_tokens_to_ids(reader.mark)
        ids = batch["input_ids"][0]
        expected = torch.where(ids == video, pad, ids)
        assert sample.input_ids[: sample.length].tolist() == expected.tolist(), (kind, name)
        np.testing.assert_array_equal(sample.positions[:, : sample.length], _positions(folder / "model", batch))
        if hasattr(encoder, "pixel_mean"):
            continue  # pixels on the device, see test_media_half
        ((item,), bad) = dataset.read_media(number, "images")
        assert bad is None and item["pixel_values_videos"].equal(batch["pixel_values_videos"]), (kind, name)
        assert item["video_grid_thw"].equal(batch["video_grid_thw"]), (kind, name)


def _resized_one_at_a_time(reader, extent):
    frames = torch.randint(0, 256, (len(reader.frames(*extent)), 3, *extent[:2]), dtype=torch.uint8)
    originals = []

    def decoded():
        for frame in frames:
            assert sum(original() is not None for original in originals) < 2, "frames stay at their original size"
            frame = frame.clone()
            originals.append(weakref.ref(frame))
            yield frame

    expected, _ = reader._process(frames, extent)
    found = reader.read(decoded(), extent)
    assert len(originals) == len(frames) > 2
    assert all(torch.as_tensor(found[name]).equal(torch.as_tensor(value)) for name, value in expected.items())


def _positions(folder, batch):
    """Return positions of a text in transformers, [3, S]."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).base_model
    names = ("input_ids", "mm_token_type_ids", "video_grid_thw", "second_per_grid_ts")
    return model.get_rope_index(**{name: batch[name] for name in names if name in batch})[0][:, 0].numpy()

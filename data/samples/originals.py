"""A sample as its record has it: the conversation, and the media before they are fitted to a module."""

from collections import deque

from data.media.audio import decode_sound
from data.media.decode import decode_image_file
from data.media.video import decode_frames, decode_video
from data.records.conversation import Conversation
from data.samples.media_spec import MediaInput
from data.samples.sample_meta import extent_of
from data.samples.shard_dataset import ShardDataset

RATE = 16000
"""Samples per second with which sound is tried."""


def read_conversation(dataset: ShardDataset, number: int) -> Conversation:
    """Return a sample's conversation, with the first of its answers. Raises SampleError if it is bad."""
    return dataset.preference(dataset.meta(number)).answers[0]


def read_originals(dataset: ShardDataset, number: int) -> dict[str, list[MediaInput | bytes]]:
    """Return by kind the media at the places of a sample's conversation: images, also frames of videos that are read as
    images, as uint8 [3, H, W] in their own size; audio files, and other video files. Raises SampleError if one is
    bad."""
    meta, media = dataset.meta(number), dict[str, list[MediaInput | bytes]]()
    chosen = next((module.video_frames for module in dataset.modules if module.video_frames), None)
    for kind, members in meta.members.items():
        items = media.setdefault(kind, [])
        for member in members:
            if member.frame is not None and member.frame.number > 0:
                continue  # decoded with the first frame of its video
            raw = dataset.read_member(meta, member)
            if member.is_sound:
                decode_sound(raw, RATE, member.frames * RATE // 1000, dataset.bounds)  # a damaged one is bad
            elif member.frame is not None:
                items += decode_video(raw, member.frame.of, dataset.bounds)
            elif member.kind == "video" and chosen is not None:
                deque(decode_frames(raw, chosen(*extent_of(member)), dataset.bounds), maxlen=0)  # damaged ones are bad
                media.setdefault("video", []).append(raw)
            else:
                items.append(raw if kind == "audio" else decode_image_file(raw, dataset.bounds, dataset.background))
    return media


def read_videos(dataset: ShardDataset, number: int, most: int) -> list[bytes]:
    """Return the video files of a sample, up to `most` bytes in all; none of a bad sample or a blind dataset."""
    meta, videos = dataset.meta(number), []
    for member in () if dataset.blind else meta.members.get("image", ()):
        is_first = member.frame is None or member.frame.number == 0
        if member.kind == "video" and is_first and member.size <= most:
            most -= member.size
            videos.append(dataset.read_member(meta, member))
    return videos

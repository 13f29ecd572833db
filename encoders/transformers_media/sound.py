"""The sound of videos, whose tokens a processor writes between those of the frames: Qwen-Omni's `load_audio_from_video`
(`use_audio_in_video` before transformers 5.23)."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from encoders.errors import EncoderError
from encoders.transformers_media.directory import hf_config, pad_id
from encoders.transformers_media.processor import Text, processor_of
from encoders.transformers_media.video_keys import FRAMES
from encoders.transformers_media.videos import TIMES, VideoProcessor, videos_of


class VideoSound:
    """The text of videos with sound. Thread-safe.

    Attributes:
        identity: text that changes with what determines the tokens of a video with sound.
    """

    def __init__(self, path: str, videos: VideoProcessor):
        """Raise EncoderError if the processor of the directory cannot write the tokens of sound between those of
        frames, or times in its options differ from those of config.json."""
        self._videos, self._processor = videos, videos.processor
        name, config = type(self._processor).__name__, hf_config(path)
        if not hasattr(self._processor, "replace_video_with_audio_token"):
            raise EncoderError(f"is true, and {name} does not read the sound of videos. Set it to false")
        self._audio = processor_of(path, "audio", pad_id(config, "audio"))
        self._options = {option: videos.option(option) for option in TIMES}
        for option, value in self._options.items():
            if getattr(config, option, value) != value:
                raise EncoderError(
                    f"{option} is {value:g} in {name}, and {getattr(config, option):g} in config.json. Set both alike"
                )
        self._has_positions = config.model_type.startswith("qwen3")
        self.identity = f"sound {self._options} {self._audio.identity}"
        tokens = self._processor.tokenizer
        starts = self._processor.audio_bos_token, self._processor.audio_eos_token
        self._begin, self._end = (tokens.convert_tokens_to_ids(token) for token in starts)
        self._pads = {str(self._processor.video_token): videos.pad, str(self._processor.audio_token): self._audio.pad}

    def rows(self, *extent: int) -> int:
        """Return the number of tokens of the sound of a video. Errors as for `MediaProcessor.rows`."""
        return self._audio.rows(extent[FRAMES], 1000)

    def grid(self, *extent: int) -> tuple[int, int, int, float, int, int] | None:
        """Return `VideoProcessor.grid` with the tokens of sound, and the position that its start and end take: 0 for
        Qwen2.5-Omni, where they share those of the video's. Errors as for both."""
        grid = self._videos.grid(*extent[:FRAMES])
        return grid and (*grid, self.rows(*extent), int(self._has_positions))

    def text(self, *extent: int) -> Text:
        """Return the text of a video with sound, see `processor.Text`. Errors as for `VideoProcessor.text` and
        `rows`."""
        sizes = self._videos.sizes(*extent[:FRAMES])
        video = {
            "video_grid_thw": sizes["video_grid_thw"],
            "video_second_per_grid": sizes["video_second_per_grid"].tolist(),
        }
        sound = {"num_audio_tokens": [self.rows(*extent)]}
        text = self._processor.replace_video_with_audio_token(video, 0, sound, 0, **self._options)
        # Not by the tokenizer, which would keep the text of each video.
        begin, end = self._processor.audio_bos_token, self._processor.audio_eos_token
        inside, ids = text.removeprefix(begin).removesuffix(end), list[int]()
        video_token, audio_token = self._pads
        for number, frames in enumerate(inside.split(audio_token)):
            if frames.replace(video_token, ""):
                raise EncoderError(f"{type(self._processor).__name__} writes text between frames and sound: {frames!r}")
            ids += [self._audio.pad] * (number > 0) + [self._videos.pad] * (len(frames) // len(video_token))
        return "", (self._begin, *ids, self._end), ""


@cache
def _sound_of(path: str, pad: int, options: str) -> VideoSound:
    return VideoSound(path, videos_of(path, pad, json.loads(options)))


def sound_of(path: str, pad: int, options: Mapping[str, Any]) -> VideoSound:
    """Return how the processor of a directory writes videos with sound; it is loaded once. Errors as for `VideoSound`.

    Args:
        pad, options: those of `videos_of`.
    """
    return _sound_of(path, pad, json.dumps(options, sort_keys=True))

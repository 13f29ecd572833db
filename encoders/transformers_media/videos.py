"""Videos as the processor of a directory of `transformers` reads them: the frames that it chooses, their text with its
times, and the tensors that the model gets. Frames and text follow from the extent of a video in the index: height and
width in pixels, number of frames, and numerator and denominator of its frames per second."""

import inspect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from huggingface_hub.dataclasses import validate_typed_dict
from transformers import __version__
from transformers.video_utils import VideoMetadata

from encoders.errors import EncoderError
from encoders.transformers_media.directory import hf_config
from encoders.transformers_media.frame_resizing import Decode, record_resizes, resize_by_frame
from encoders.transformers_media.processor import SIZES, MediaProcessor, Text, load_processor

type Processed = tuple[dict[str, Any], Text]
type Extent = tuple[int, int, int, int, int]

DEFAULTS = {"fps": 2.0}, {"num_frames": 32}, {"fps": 1.0, "num_frames": 64}
"""Options for processors that choose no frames by themselves. The first is that of Qwen-VL's own tools; processors
without `max_frames` start from the second. The first one that a processor takes counts."""
EXAMPLE: Extent = (64, 96, 600, 30, 1)
"""Extent of a video with which the choice of frames is tried."""
SMALL: Extent = (64, 96, 2, 2, 1)
"""As EXAMPLE, for the text."""
RESIZED: tuple[Extent, ...] = ((60, 100, 6, 2, 1), (150, 50, 4, 2, 1), (720, 1270, 4, 2, 1))
"""Extents of videos that are enlarged and reduced, with which resizing is tried."""
PIXELS = "pixel_values_videos"
SECONDS = "video_second_per_grid"
SIZE_TENSORS = "video_grid_thw", "second_per_grid_ts", SECONDS, "target_sizes_videos"
"""Values of processors with the sizes of videos and their seconds per grid, on which positions depend."""
NUMBERS = "_prepend_local_ids"
"""Method of processors that number the images of a text, and some its videos too (MiniCPM)."""
TIMES = "seconds_per_chunk", "position_id_per_seconds"
"""Options by which Qwen-Omni's processor joins frames and sound."""
_CHOICES = "fps", "num_frames"
"""Options that choose frames."""
_PROBES = {"fps": (0.5, 4.0), "num_frames": (8, 16), "max_frames": (4, 8), "min_frames": (100, 200)}
"""Values for which a processor that reads the option chooses different frames of EXAMPLE."""
_FIXED = "patch_size", "temporal_patch_size", "merge_size"
"""Options that follow from the weights."""
_CALL_OPTIONS = {
    *("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata"),
    *("return_metadata", "return_tensors"),
}
"""Options that each call sets, and `sample_frames` does not get."""


class VideoProcessor:
    """The video half of a processor. Thread-safe.

    Attributes:
        mark: the text that a chat template writes for a video.
        identity: text that changes with what determines the tokens of a video.
        pad: id of the tokens that features replace.
        processor: the processor of transformers.
        options: the options of each call of the video processor.
        sampling: the options that choose frames, if the processor chooses none by itself.
    """

    def __init__(self, images: MediaProcessor, options: Mapping[str, Any]):
        """
        Args:
            options: options of the video processor, by its names: `fps`, `num_frames`, `max_frames`, `size`, ...

        Raises:
            EncoderError: the processor reads no videos, or an option is unknown or rejected.
        """
        processor = images.processor
        part, mark = getattr(processor, "video_processor", None), getattr(processor, "video_token", None)
        if part is None or mark is None:
            raise EncoderError(f"{type(processor).__name__} reads no videos")
        self.mark = str(mark)
        known = part.valid_kwargs.__annotations__.keys() - _CALL_OPTIONS
        if unknown := options.keys() - known:
            raise EncoderError(
                f"{type(part).__name__} has no option {sorted(unknown)[0]}. It has {', '.join(sorted(known))}"
            )
        for name, value in options.items():
            # VideoLLaMA 3 gets the size of its squares with each video.
            is_fixed = name in _FIXED and f"video_{name}s" not in processor.model_input_names
            if is_fixed and value != getattr(part, name):
                raise EncoderError(f"{name} is {getattr(part, name)} in the weights, and set to {value}. Remove it")
            if name in _PROBES and value is not None and not reads_option(part, name):
                raise EncoderError(f"{type(part).__name__} ignores {name}. Remove it")
        # As attributes too, like those of a file: Qwen3-VL ignores `max_frames` in a call (transformers 5.23).
        if options:
            try:
                given = {name: value for name, value in options.items() if value is not None}
                validate_typed_dict(part.valid_kwargs, given)
                part = type(part).from_dict(part.to_dict(), **options)
            except Exception as error:  # of many classes
                raise EncoderError(f"{type(part).__name__} rejects options {dict(options)}: {_line(error)}") from error
            processor = copy(processor)
            processor.video_processor = part
        self._images, self._part, self.pad = images, part, images.pad
        self.processor: Any = processor
        merged = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs)
        given = {name: value for name, value in merged["videos_kwargs"].items() if value is not None} | {**options}
        if "use_token_compression" in known:  # the number of tokens would depend on pixels
            given["use_token_compression"] = False
        if "cap_pixels_per_frame" in known:  # the default of transformers 5.23, which warns on every process
            given.setdefault("cap_pixels_per_frame", False)
        self._merged, self.options, self._unread = merged, given, {*images.unread, "video_metadata"}
        self.sampling = self._choose_sampling(options)
        used = json.dumps([given, self.sampling], default=str, sort_keys=True)
        self.identity = f"{type(processor).__name__} {__version__} {part.to_json_string()} {used}"
        self._of_extent = lru_cache(SIZES)(self._of_empty)
        self._is_numbered = hasattr(processor, NUMBERS) and self._has_numbers()
        if options:
            try:
                self.rows(*EXAMPLE)
            except EncoderError as error:
                raise EncoderError(f"{error}. Options: {dict(options)}") from error

    def frames(self, *extent: int) -> Sequence[int]:
        """Return the numbers of the frames that are read, ascending. Raise EncoderError if the processor cannot choose
        frames."""
        return [int(number) for number in self._numbers(extent, self.sampling)]

    def text(self, extent: Sequence[int], number: int = 0) -> Text:
        """Return the text of a video, the sample's `number`-th from 0: see `processor.Text`. Raise EncoderError if the
        processor cannot process it."""
        text = self._of_extent(*extent)[0]
        return self._images.numbered(text, number) if self._is_numbered else text

    def rows(self, *extent: int) -> int:
        """Return the number of tokens that features replace. Errors as for `text`."""
        return self._of_extent(*extent)[0][1].count(self.pad)

    def sizes(self, *extent: int) -> dict[str, torch.Tensor]:
        """Return the values of `SIZE_TENSORS`, by name. Errors as for `text`."""
        return self._of_extent(*extent)[1]

    def read(self, frames: Iterable[torch.Tensor], extent: Sequence[int]) -> dict[str, Any]:
        """Return the tensors that the model gets of a video, its tokens as `input_ids`, the number of its features as
        `rows`, and `medium`: "video".

        Args:
            frames: those of `frames`, each uint8 [3, height, width].

        Raises:
            EncoderError: its text is not that of its extent.
        """
        inputs, text = self._process_each(frames, extent)
        expected, ids = self._of_extent(*extent)[0], text[1]
        if text != expected:
            raise EncoderError(
                f"{type(self._part).__name__} makes {len(ids)} tokens of a video of {[*extent]}, and "
                f"{len(expected[1])} others of an empty one of this size"
            )
        rows = ids.count(self.pad)
        return {**inputs, "input_ids": torch.tensor([ids]), "rows": rows, "medium": "video"}

    def grid(self, *extent: int) -> tuple[int, int, int, float] | None:
        """Return rows, columns and times of a video's features, and the positions between two times, for classes that
        compute positions from seconds per grid alone (Qwen-Omni); None for others. Errors as for `text`, and for
        fractions of a position, which Qwen3-Omni has."""
        seconds = self.sizes(*extent).get(SECONDS)
        if seconds is None:
            return None
        times, rows, columns = self.sizes(*extent)["video_grid_thw"][0].tolist()
        config = hf_config(self._images.path)
        interval = float(seconds[0].float()) * config.position_id_per_seconds
        if interval % 1 and config.model_type.startswith("qwen3"):
            raise EncoderError(f"positions of its times are {interval:g} apart. Set encoder.video.fps to 1 or 2")
        return rows // self.merge, columns // self.merge, times, interval

    def option(self, name: str) -> Any:
        """Return an option of the processor for all kinds of media; None without it."""
        return self._merged.get(name, getattr(self.processor, name, None))

    @property
    def merge(self) -> int:
        """Side of the squares of patches that one feature has."""
        return int(self._part.merge_size)

    @property
    def normalization(self) -> tuple[list[float], list[float]] | None:
        """Mean and standard deviation of each channel, of pixels in [0, 1]; None if pixels are scaled otherwise."""
        part = self._part
        is_usual = part.do_rescale and part.do_normalize and math.isclose(part.rescale_factor, 1 / 255)
        return ([*part.image_mean], [*part.image_std]) if is_usual else None

    def frame_pairs(self, decode: Decode, extent: Sequence[int], times: Sequence[int]) -> torch.Tensor:
        """Return the resized frames of some times, as the tower of Qwen-VL joins them, uint8 [times, frames of a patch,
        3, height, width].

        Args:
            times: numbers from 0, ascending. Frames of others are not decoded.
        """
        numbers = self.frames(*extent)
        if self._resizes_frames:  # the last frame repeats
            processor, calls = record_resizes(self.processor)
            self._process(self._empty(extent, "meta"), extent, processor)
            each, (resize,) = self._part.temporal_patch_size, calls
            chosen = [numbers[min(time * each + at, len(numbers) - 1)] for time in times for at in range(each)]
            return torch.cat([resize(frame[None]) for frame in decode(chosen)]).unflatten(0, (len(times), each))
        inputs, _ = self._process(torch.stack([*decode(numbers)]), extent, do_rescale=False, do_normalize=False)
        total, rows, columns = inputs["video_grid_thw"][0].tolist()
        merge, side, frames_of_patch = self.merge, self._part.patch_size, self._part.temporal_patch_size
        squares = (total, rows // merge, columns // merge, merge, merge, 3, frames_of_patch, side, side)
        patches = inputs[PIXELS].view(squares).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
        return patches.reshape(total, frames_of_patch, 3, rows * side, columns * side)[[*times]]

    def resized(self, frames: Iterable[torch.Tensor], extent: Sequence[int]) -> torch.Tensor:
        """Return frames as the model gets them, but for rescaling and normalising, uint8 [frames, 3, height, width]."""
        inputs, _ = self._process_each(frames, extent, do_rescale=False, do_normalize=False)
        return inputs[PIXELS].flatten(0, -4)

    def _choose_sampling(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the default of `sampling`, which other options do not change. Raise EncoderError if an option is
        rejected."""
        if not options:
            return self._default_sampling()
        is_chosen = any(options.get(name) is not None for name in _CHOICES)
        sampling = videos_of(self._images.path, self._images.pad, {}).sampling
        if is_chosen:  # SmolVLM needs both; elsewhere one excludes the other
            sampling = {name: value for name, value in sampling.items() if len(sampling) > 1 and name not in options}
        count = options.get("num_frames")
        frames = max(EXAMPLE[2], 2 * count) if isinstance(count, int) else EXAMPLE[2]
        try:
            self._numbers((*EXAMPLE[:2], frames, *EXAMPLE[3:]), sampling)
        except EncoderError as error:
            others = [name for name in _CHOICES if name not in options and getattr(self._part, name, None) is not None]
            remedy = "".join(f". {name} is {getattr(self._part, name)} by default: set it to null" for name in others)
            raise EncoderError(f"{error}. Options: {dict(options)}{remedy if is_chosen else ''}") from error
        return sampling

    def _default_sampling(self) -> dict[str, Any]:
        bounded = "max_frames" in self._part.valid_kwargs.__annotations__
        tried: list[dict[str, Any]] = [{}] if self._part.do_sample_frames else []
        reason: Exception | None = None
        for sampling in (*tried, *(DEFAULTS if bounded else DEFAULTS[1:])):
            try:
                self._numbers(EXAMPLE, sampling)
            except EncoderError as error:
                reason = reason or error
                continue
            return sampling
        raise EncoderError(f"{reason}") from reason

    def _numbers(self, extent: Sequence[int], sampling: Mapping[str, Any]) -> Any:
        """Return the frame numbers as the processor chooses them."""
        part, frames, options = self._part, extent[2], _attributes(self._part)
        options |= {**{name: value for name, value in self.options.items() if name in options}, **sampling}
        if sampling.get("num_frames", 0) > frames:
            options["num_frames"] = frames
        of_patch = options.get("temporal_patch_size") or 1
        try:
            if frames >= of_patch:  # or else a frame repeats: some processors raise an error
                return part.sample_frames(metadata=_metadata(extent), **options)
            return [*range(frames), *[frames - 1] * (of_patch - frames)]
        except Exception as error:  # of many classes, also for few frames
            if frames <= (options.get("num_frames") or of_patch):
                return list(range(frames))
            raise EncoderError(f"{type(part).__name__} chooses no frames of {frames}: {_line(error)}") from error

    def _process_each(self, frames: Iterable[torch.Tensor], extent: Sequence[int], **further: bool) -> Processed:
        """Return `_process` of frames that are resized one at a time if the processor allows it."""
        if self._resizes_frames:
            return self._process_by_frame(frames, extent, **further)
        return self._process(torch.stack([*frames]), extent, **further)

    def _process_by_frame(self, frames: Iterable[torch.Tensor], extent: Sequence[int], **further: bool) -> Processed:
        """Return `_process` of frames that are resized one at a time where the processor resizes all of them, once."""
        processor = resize_by_frame(self.processor, frames, (len(self.frames(*extent)), 3, *extent[:2]))
        return self._process(self._empty(extent, "meta"), extent, processor, **further)

    @cached_property
    def _resizes_frames(self) -> bool:
        """True if `_process_by_frame` returns the same as `_process`."""
        random = torch.Generator().manual_seed(1)
        try:
            for extent in RESIZED:
                shape = len(self.frames(*extent)), 3, *extent[:2]
                frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
                expected, _ = self._process(frames, extent)
                inputs, _ = self._process_by_frame(iter(frames), extent)
                if not all(torch.as_tensor(inputs[name]).equal(torch.as_tensor(expected[name])) for name in expected):
                    return False
        except Exception:  # of many classes: it looks at pixels first, resizes frames twice, or not at all
            return False
        return True

    def _process(
        self, frames: torch.Tensor, extent: Sequence[int], processor: Any = None, **further: bool
    ) -> Processed:
        """Return the tensors and the text that the processor, by default its own, makes of frames [N, 3, H, W]."""
        metadata = _metadata(extent)
        metadata.frames_indices = self._numbers(extent, self.sampling)
        options = {
            **self.options,
            **self.sampling,
            "do_sample_frames": False,
            "video_metadata": [metadata],
            "return_tensors": "pt",
            "return_metadata": True,
            **further,
        }
        process = (processor or self.processor)._process_videos
        if "audio" in inspect.signature(process).parameters:  # Qwen-Omni
            others = {name: self.option(name) for name in TIMES}
            options = {**self._merged, **others, "load_audio_from_video": False, "videos_kwargs": options}
        inputs, texts = process([frames], **options)
        start, ids, end = self._images.split(texts[0])
        video_pad = self.processor.tokenizer.convert_tokens_to_ids(self.mark)
        ids = tuple(self.pad if token == video_pad else token for token in ids)
        inputs = {name: value for name, value in inputs.items() if name not in self._unread}
        if PIXELS in inputs and PIXELS not in self.processor.model_input_names:
            # InternVL: `__call__` gives the frames as images.
            inputs["pixel_values"] = inputs.pop(PIXELS).flatten(0, 1)
        return inputs, (start, ids, end)

    def _has_numbers(self) -> bool:
        """True if the processor numbers videos as it does images."""
        height, width, *_ = SMALL
        empty = torch.zeros(SMALL[2], 3, height, width, dtype=torch.uint8)
        options = {"video_metadata": [_metadata(SMALL)], "do_sample_frames": False, "return_tensors": "pt"}
        inputs = self.processor(text=[self.mark], videos=[empty], return_text_replacement_offsets=True, **options)
        written = inputs["text_replacement_offsets"][0][0]["replacement"]
        return written != self.processor._process_videos([empty], **(self.options | options))[1][0]

    def _empty(self, extent: Sequence[int], device: str) -> torch.Tensor:
        """Return black frames of a video, uint8 [frames, 3, height, width]."""
        frame = torch.zeros(1, 3, *extent[:2], dtype=torch.uint8, device=device)
        return frame.expand(len(self.frames(*extent)), -1, -1, -1)

    def _of_empty(self, *extent: int) -> tuple[Text, dict[str, torch.Tensor]]:
        reason = None
        # On the meta device no pixel is computed; some processors look at them.
        for device in ("meta", "cpu"):
            try:
                inputs, text = self._process(self._empty(extent, device), extent)
            except Exception as error:
                reason = error
                continue
            types = {SECONDS: torch.float64}
            return text, {
                name: torch.as_tensor(inputs[name], dtype=types.get(name)) for name in SIZE_TENSORS if name in inputs
            }
        raise EncoderError(f"{type(self._part).__name__} cannot process it: {_line(reason)}") from reason


def _attributes(part: Any) -> dict[str, Any]:
    """Return the values of a video processor's options."""
    return {name: getattr(part, name, None) for name in part.valid_kwargs.__annotations__.keys() - _CALL_OPTIONS}


def reads_option(part: Any, name: str) -> bool:
    """True if a video processor chooses frames by an option: GLM-4.6V ignores `fps` (transformers 5.23)."""
    chosen = []
    for value in _PROBES[name]:
        probed = type(part).from_dict(part.to_dict(), **{name: value})
        try:
            numbers = probed.sample_frames(metadata=_metadata(EXAMPLE), **_attributes(probed))
        except Exception:  # of many classes: another option excludes it
            return True
        chosen.append([int(number) for number in numbers])
    return chosen[0] != chosen[1]


def _line(error: Exception | None) -> str:
    """Return the message of an error as one line."""
    return " ".join(str(error).split()).rstrip(".")


def _metadata(extent: Sequence[int]) -> VideoMetadata:
    height, width, frames, numerator, denominator = extent
    rate = numerator / denominator
    return VideoMetadata(total_num_frames=frames, fps=rate, width=width, height=height, duration=frames / rate)


NOT_SPLIT = ("kimi_k25",)
"""Types whose `get_video_features` in transformers 5.23 fails: it joins times, and then splits features as if not."""


def reads_videos(path: str, pad: int) -> bool:
    """True if a model of transformers reads videos as such."""
    try:
        return hf_config(path).model_type not in NOT_SPLIT and videos_of(path, pad, {}).rows(*EXAMPLE) > 0
    except EncoderError:
        return False


@cache
def _videos_of(path: str, pad: int, options: str) -> VideoProcessor:
    return VideoProcessor(load_processor(path, "image", pad), json.loads(options))


def videos_of(path: str, pad: int, options: Mapping[str, Any]) -> VideoProcessor:
    """Return the video half of the processor of a directory, which is loaded once. Errors as for `VideoProcessor`."""
    return _videos_of(path, pad, json.dumps(options, sort_keys=True))

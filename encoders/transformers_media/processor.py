"""The processor of a directory of `transformers`: the text that an image or audio item becomes, and the tensors that
the model gets of it. Text is known from sizes alone: the processor runs once on an empty item of each size."""

import math
import re
from bisect import bisect_left
from functools import cache, lru_cache, partial
from threading import Lock
from typing import Any

import torch
from PIL import Image

from encoders.errors import EncoderError

SIZES = 2**16
"""Sizes whose text is kept."""
USUAL = (3, 336, 336)
"""Shape of an image whose text is tried."""
VOXTRAL_FRAMES = 8
"""Frames of audio that a token of Voxtral stands for."""


class MediaProcessor:
    """The processor of images (`kind` image) or of audio (audio). Thread-safe.

    Attributes:
        mark: the text that a chat template writes for an item.
        start, end: plain text that the processor writes around the tokens of an image, which text next to it may join.
        pad_token: the token that features replace.
        identity: text that changes with what determines the tokens of an item.
        sample_rate: samples per second of audio; 0 for images.
    """

    def __init__(self, path: str, kind: str, pad: int):
        """Load the processor.

        Args:
            pad: id of the tokens that features replace.

        Raises:
            EncoderError: transformers has no processor for the directory, or it takes no item of this kind.
        """
        from transformers import AutoProcessor, __version__

        try:
            processor = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # processors raise errors of many classes
            reason = str(error).strip().partition("\n")[0]
            raise EncoderError(f"cannot load the processor of {path}: {reason}") from error
        part = getattr(processor, "image_processor", None) if kind == "image" else processor._audio_processor
        tokenizer = getattr(processor, "tokenizer", None)
        if part is None or tokenizer is None:
            raise EncoderError(f"the processor of {path} ({type(processor).__name__}) takes no {kind}")
        self.path, self.kind, self.pad, self._processor, self._tokenizer = path, kind, pad, processor, tokenizer
        self.sample_rate = int(part.sampling_rate) if kind == "audio" else 0
        self.mark = self._mark()
        self.pad_token = str(tokenizer.convert_ids_to_tokens(pad))
        self.identity = f"{type(processor).__name__} {__version__} {processor.to_json_string()} {pad}"
        options = processor._merge_kwargs(tokenizer_init_kwargs=tokenizer.init_kwargs)
        self._options = options["images_kwargs" if kind == "image" else "audio_kwargs"] | {"return_tensors": "pt"}
        if kind == "audio":
            self._options["sampling_rate"] = self.sample_rate
        elif "use_image_special_tokens" in options:  # LFM2-VL
            self._options["use_image_special_tokens"] = options["use_image_special_tokens"]
        self._unread = {"input_ids", "attention_mask", "token_type_ids", *processor.unused_input_names}
        self.start = self.end = ""
        self._tokenized = lru_cache(SIZES)(self._tokenize)
        self._tokenized("")  # the first call sets options of the shared Rust object
        self._of_image = lru_cache(SIZES)(self._of_empty_image)
        self._of_audio: dict[int, tuple[int, ...]] = {}
        self._lengths: list[int] = []
        self._lock = Lock()
        if kind == "image":
            self.start, self.end = self._around_an_image()

    def ids(self, extent0: int, extent1: int) -> tuple[int, ...]:
        """Return the tokens of an item: those that features replace, and separators between them.

        Args:
            extent0, extent1: height and width in pixels, or samples and samples per second.

        Raises:
            EncoderError: the processor cannot process an item of this size.
        """
        if self.kind == "image":
            return self._of_image(extent0, extent1)[0]
        return self._of_length(self.length(extent0, extent1))

    def rows(self, extent0: int, extent1: int) -> int:
        """Return the number of tokens that features replace. Arguments and errors as for `ids`."""
        return self.ids(extent0, extent1).count(self.pad)

    def patches(self, height: int, width: int) -> tuple[int, int, int] | None:
        """Return the patches of an image in time, height and width; None if the processor does not say."""
        return self._of_image(height, width)[1]

    def grid(self, height: int, width: int) -> tuple[int, int] | None:
        """Return (rows, columns) of the features of an image; None if they form no grid."""
        ids, patches = self._of_image(height, width)
        rows = ids.count(self.pad)
        if patches is None or patches[0] != 1 or not rows:
            return None
        merge = math.isqrt(patches[1] * patches[2] // rows)
        grid = patches[1] // merge, patches[2] // merge
        return grid if grid[0] * grid[1] == rows else None

    def length(self, samples: int, rate: int) -> int:
        """Return the samples of audio at the processor's rate."""
        return -(-samples * self.sample_rate // rate)

    def cuts(self, seconds: float) -> bool:
        """True if the processor leaves out the end of audio of this length."""
        items = silence_and_tone(self.length(int(seconds * 1000), 1000), self.sample_rate)
        silence, tone = (self._process(item)[0] for item in items)
        return all(value.equal(tone[name]) for name, value in silence.items() if isinstance(value, torch.Tensor))

    def read(self, item: torch.Tensor) -> dict[str, Any]:
        """Return the tensors that the model gets of an item, its tokens as `input_ids`, and the number of its features
        as `rows`.

        Args:
            item: uint8 [3, height, width], or float32 [samples] at `sample_rate`.

        Raises:
            EncoderError: its tokens are not those of its size.
        """
        inputs, ids = self._process(item)
        expected = self._of_image(*item.shape[1:])[0] if self.kind == "image" else self._of_length(len(item))
        if ids != expected:
            raise EncoderError(
                f"{type(self._processor).__name__} makes {len(ids)} tokens of an item of {[*item.shape]}, and "
                f"{len(expected)} of an empty one of this size"
            )
        return {**inputs, "input_ids": torch.tensor([ids]), "rows": ids.count(self.pad)}

    def _process(self, item: torch.Tensor) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Return the processor's tensors and tokens of an item."""
        process = self._processor._process_images if self.kind == "image" else self._processor._process_audio
        if hasattr(self._processor, "_retrieve_input_features"):
            process = partial(_voxtral, self._processor)
        try:
            inputs, texts = process([[item]] if self.kind == "image" else [item.numpy()], **self._options)
            if not (texts[0].startswith(self.start) and texts[0].endswith(self.end)):
                sizes = f"{[*item.shape]} other text than for {[*USUAL]} ({self.start!r}, {self.end!r})"
                raise EncoderError(f"{type(self._processor).__name__} writes around an item of {sizes}")
            ids = self._tokenized(texts[0][len(self.start) : len(texts[0]) - len(self.end)])
        except NotImplementedError:  # a processor that writes the whole text itself
            text_options = {"text": [self.mark], "add_special_tokens": False, "return_tensors": "pt"}
            image = Image.fromarray(item.permute(1, 2, 0).numpy())
            inputs = self._processor(images=[[image]], **text_options)
            ids = tuple(inputs["input_ids"][0].tolist())
        return {name: value for name, value in inputs.items() if name not in self._unread}, ids

    def _around_an_image(self) -> tuple[str, str]:
        """Return the text in front of the first special token of an image, and behind the last."""
        try:
            _, texts = self._processor._process_images([[torch.zeros(USUAL, dtype=torch.uint8)]], **self._options)
        except Exception:  # it writes all text itself, or `ids` reports the error of each size
            return "", ""
        special = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        pattern = "|".join(map(re.escape, sorted({self.mark, self.pad_token, *special}, key=len, reverse=True)))
        spans = [match.span() for match in re.finditer(pattern, texts[0])]
        return (texts[0][: spans[0][0]], texts[0][spans[-1][1] :]) if spans else ("", "")

    def _of_empty_image(self, height: int, width: int) -> tuple[tuple[int, ...], tuple[int, int, int] | None]:
        reason: Exception | None = None
        # On the meta device no pixel is computed; some processors look at them.
        for device in ("meta", "cpu"):
            try:
                inputs, ids = self._process(torch.zeros(3, height, width, dtype=torch.uint8, device=device))
            except Exception as error:
                reason = error
                continue
            grid = inputs.get("image_grid_thw")
            return ids, None if grid is None else tuple(grid[0].tolist())
        raise EncoderError(f"{type(self._processor).__name__} cannot process it: {reason}") from reason

    def _of_length(self, length: int) -> tuple[int, ...]:
        """Return the tokens of audio. All lengths between two with the same have these: longer audio has no fewer."""
        with self._lock:
            if length in self._of_audio:
                return self._of_audio[length]
            at = bisect_left(self._lengths, length)
            around = {self._of_audio[known] for known in self._lengths[max(at - 1, 0) : at + 1]}
            if len(around) == 1 and 0 < at < len(self._lengths):
                return around.pop()
        try:
            ids = self._process(torch.zeros(length))[1]
        except Exception as error:
            raise EncoderError(f"{type(self._processor).__name__} cannot process it: {error}") from error
        with self._lock:
            if length not in self._of_audio:
                self._of_audio[length] = ids
                self._lengths.insert(bisect_left(self._lengths, length), length)
        return ids

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _mark(self) -> str:
        names = (f"{self.kind}_placeholder_token", f"{self.kind}_token")
        for owner in (self._processor, self._tokenizer):
            for name in names:
                token = getattr(owner, name, None)
                if token is not None:
                    return str(getattr(token, "content", token))
        raise EncoderError(f"{type(self._processor).__name__} of {self.path} has no {self.kind} token")


def _voxtral(processor: Any, audio: list[Any], **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the tensors of audio and its text as Voxtral's processor does by means of mistral_common (`AudioEncoder`
    of 1.13), which requires an older numpy than ours: the processor pads audio to chunks of 30 seconds."""
    frames = processor._retrieve_input_features(audio, **options)
    tokens = frames.size(0) * frames.size(2) // VOXTRAL_FRAMES
    return {"input_features": frames}, [f"[BEGIN_AUDIO]{processor.audio_token * tokens}"]


def silence_and_tone(length: int, rate: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two items of audio, [length], that differ in their last tenth of a second alone."""
    silence = torch.zeros(length)
    tone = silence.clone()
    tone[-rate // 10 :] = torch.linspace(-1, 1, rate // 10)[-length:]
    return silence, tone


@cache
def processor_of(path: str, kind: str, pad: int) -> MediaProcessor:
    """Return the processor of a directory, which is loaded once."""
    return MediaProcessor(path, kind, pad)

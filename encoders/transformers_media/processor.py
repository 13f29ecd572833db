"""The processor of a directory of `transformers`: the text that an image or audio item becomes, and the tensors that
the model gets of it. Text is known from sizes alone: the processor runs once on an empty item of each size."""

import inspect
import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache, partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image

from encoders.errors import EncoderError

FRAMES = "feature_attention_mask"
"""Name of the mask of the frames that Qwen-Omni takes of `input_features`, which its processor pads to 300 s, 15 MB."""
SIZES = 2**16
"""Sizes whose text is kept."""
TRIED = (64, 64), (336, 672)
"""Sizes of images (height, width) with which the text of numbered images is tried."""
VOXTRAL_FRAMES = 8
"""Frames of audio for each token of Voxtral."""
SIZE_TENSORS = "image_grid_thw", "target_sizes"
"""Tensors of processors with the sizes of images, on which positions depend."""

type Text = tuple[str, tuple[int, ...], str]
"""The tokens of an item from its first special token to its last, and the plain text in front of them and behind, which
text next to it may join."""


class MediaProcessor:
    """The processor of images (`kind` image) or of audio (audio). Thread-safe.

    Attributes:
        mark: the text that a chat template writes for an item.
        pad_token: the token that features replace.
        types: ids of the tokens of an item that its model's mask counts as those of an image.
        identity: text that changes with what determines the tokens of an item.
        processor: the processor of transformers.
        unread: names of its tensors that the model does not get.
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
        self.path, self.kind, self.pad = path, kind, pad
        self.processor: Any = processor
        self._tokenizer = tokenizer
        self.sample_rate = int(part.sampling_rate) if kind == "audio" else 0
        self.mark = self._mark()
        types = getattr(processor, "image_token_ids", ()) if kind == "image" else ()
        self.types = tuple(token for token in types if token is not None)
        self.pad_token = str(tokenizer.convert_ids_to_tokens(pad))
        self.identity = f"{type(processor).__name__} {__version__} {processor.to_json_string()} {pad}"
        options = processor._merge_kwargs(tokenizer_init_kwargs=tokenizer.init_kwargs)
        of_kind = options["images_kwargs" if kind == "image" else "audio_kwargs"]
        self._options = of_kind | {"return_tensors": "pt"}
        if kind == "audio":
            # Keys of the tokenizer that are null would replace the defaults of Gemma 4's extractor.
            self._options = {key: value for key, value in self._options.items() if value is not None}
            self._options["sampling_rate"] = self.sample_rate
        elif "use_image_special_tokens" in options:  # LFM2-VL
            self._options["use_image_special_tokens"] = options["use_image_special_tokens"]
        self.unread = {"input_ids", "attention_mask", "token_type_ids", *processor.unused_input_names}
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        tokens = sorted({self.mark, self.pad_token, *special}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, tokens)))
        self._tokenized = lru_cache(SIZES)(self._tokenize)
        self._tokenized("")  # the first call sets options of the shared Rust object
        self._of_image = lru_cache(SIZES)(self._of_empty_image)
        self._of_audio: dict[int, Text] = {}
        self._lengths: list[int] = []
        self._lock = Lock()

    def text(self, extent0: int, extent1: int, number: int = 0) -> Text:
        """Return the text of an item, by its size and its number in the sample.

        Args:
            extent0, extent1: height and width in pixels, or samples and samples per second.
            number: 0 for the first item of a sample.

        Raises:
            EncoderError: the processor cannot process an item of this size.
        """
        if self.kind == "image":
            return self.numbered(self._of_image(extent0, extent1)[0], number)
        return self.numbered(self._of_length(self.length(extent0, extent1)), number)

    def numbered(self, text: Text, number: int) -> Text:
        """Return the text of an item with what the processor writes around the `number`-th of a sample, from 0."""
        start, ids, end = text
        before, after = self._around(number)
        if before:
            start, first, between = self.split(before + start)
            ids = (*first, *self._tokenized(between), *ids)
        if after:
            between, last, end = self.split(end + after)
            if last:
                ids = (*ids, *self._tokenized(between), *last)
            else:
                end = between
        return start, ids, end

    def rows(self, extent0: int, extent1: int) -> int:
        """Return the number of tokens that features replace. Arguments and errors as for `text`."""
        return self.text(extent0, extent1)[1].count(self.pad)

    def patches(self, height: int, width: int) -> tuple[int, int, int] | None:
        """Return the patches of an image in time, height and width; None if the processor does not say."""
        grid = self.sizes(height, width).get("image_grid_thw")
        return None if grid is None else tuple(grid[0].tolist())

    def sizes(self, height: int, width: int) -> dict[str, torch.Tensor]:
        """Return the tensors with the size of an image that the model gets, by name."""
        return self._of_image(height, width)[1]

    def grid(self, height: int, width: int) -> tuple[int, int] | None:
        """Return (rows, columns) of the features of an image; None if they form no grid."""
        rows, patches = self.rows(height, width), self.patches(height, width)
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
        """Return the tensors that the model gets of an item, the tokens of its size as `input_ids`, and the number of
        its features as `rows`.

        Args:
            item: uint8 [3, height, width], or float32 [samples] at `sample_rate`.

        Raises:
            EncoderError: its text is not that of its size.
        """
        inputs, text = self._process(item)
        expected = self._of_image(*item.shape[1:])[0] if self.kind == "image" else self._of_length(len(item))
        ids = text[1]
        if text != expected:
            raise EncoderError(
                f"{type(self.processor).__name__} makes {len(ids)} tokens of an item of {[*item.shape]}, and "
                f"{len(expected[1])} others of an empty one of this size"
            )
        if FRAMES in inputs:  # the model takes no others
            frames = int(inputs[FRAMES].sum())
            inputs |= {name: inputs[name][..., :frames].clone() for name in (FRAMES, "input_features")}
        return {**inputs, "input_ids": torch.tensor([ids]), "rows": ids.count(self.pad)}

    def _process(self, item: torch.Tensor) -> tuple[dict[str, Any], Text]:
        """Return the processor's tensors and text of an item."""
        try:
            inputs, replacement = self._replace(item)
            text = self.split(replacement)
        except NotImplementedError:  # a processor that writes the whole text itself
            inputs = self._run([item.permute(1, 2, 0).numpy()])
            text = "", tuple(inputs["input_ids"][0].tolist()), ""
        return {name: value for name, value in inputs.items() if name not in self.unread}, text

    def _replace(self, item: torch.Tensor) -> tuple[Any, str]:
        """Return the processor's tensors of an item, and what it writes for the mark."""
        process = self.processor._process_images if self.kind == "image" else self.processor._process_audio
        if hasattr(self.processor, "_retrieve_input_features"):
            process = partial(_voxtral, self.processor)
        elif "audio_kwargs" in inspect.signature(process).parameters:
            process = partial(_nemotron, self.processor)
        inputs, texts = process([[item]] if self.kind == "image" else [item.numpy()], **self._options)
        return inputs, texts[0]

    def _run(self, images: Sequence[np.ndarray], **options: Any) -> Any:
        """Return what the processor makes of the marks of a sample's images, each uint8 [height, width, 3]."""
        options |= {"text": [self.mark * len(images)], "add_special_tokens": False, "return_tensors": "pt"}
        files = [Image.fromarray(image) for image in images]
        try:
            return self.processor(images=[files], **options)
        except ValueError:  # it takes no list for each text
            return self.processor(images=files, **options)

    def split(self, text: str) -> Text:
        """Return a text as tokens and plain text around them; without a special token it is the text in front."""
        spans = [match.span() for match in self._special.finditer(text)]
        if not spans:
            return text, (), ""
        first, end = spans[0][0], spans[-1][1]
        return text[:first], self._tokenized(text[first:end]), text[end:]

    def _around(self, number: int) -> tuple[str, str]:
        """Return what the processor writes around the text of an item's size, by the item's number in its sample."""
        numbers = self._numbers
        if len(numbers) > 1 and number >= len(numbers):
            known, numbers = numbers, self._numbers_of([TRIED[0]] * max(2 * len(numbers), number + 1))
            self._require_alike(numbers[: len(known)], known)
            self._numbers = numbers
        return numbers[min(number, len(numbers) - 1)]

    def require_independent_items(self) -> None:
        """Raise EncoderError if the text of an image depends on the other images of its sample."""
        self._around(0)

    @cached_property
    def _numbers(self) -> list[tuple[str, str]]:
        """Return `_around` of the first two images of a sample, or once if images have no numbers. A processor that
        does not take marks alone has none. Raise EncoderError if the text of an image depends on other images."""
        if self.kind != "image":
            return [("", "")]
        small, large = TRIED
        try:
            tried = [self._numbers_of(sizes) for sizes in ([small], [small, large], [large, small])]
        except EncoderError:
            raise
        except Exception:  # `text` reports the error of each size
            return [("", "")]
        self._require_alike(tried[1][:1], tried[0])
        self._require_alike(tried[1], tried[2])
        return tried[1] if tried[1][0] != tried[1][1] else tried[0]

    def _require_alike(self, text: Any, expected: Any) -> None:
        if text != expected:
            raise EncoderError(f"{type(self.processor).__name__} writes other text for an image next to others")

    def _numbers_of(self, sizes: Sequence[tuple[int, int]]) -> list[tuple[str, str]]:
        """Return `_around` of a sample's images of these sizes."""
        images = [np.zeros((*size, 3), dtype=np.uint8) for size in sizes]
        inputs = self._run(images, return_text_replacement_offsets=True)
        if "text_replacement_offsets" not in inputs:
            return [("", "")] * len(sizes)
        numbers = []
        for image, replaced in zip(images, inputs["text_replacement_offsets"][0], strict=True):
            expected = self._replace(torch.tensor(image).permute(2, 0, 1))[1]
            before, text, after = replaced["replacement"].partition(expected)
            self._require_alike(text, expected)
            numbers.append((before, after))
        return numbers

    def _of_empty_image(self, height: int, width: int) -> tuple[Text, dict[str, torch.Tensor]]:
        reason: Exception | None = None
        # On the meta device no pixel is computed; some processors look at them.
        for device in ("meta", "cpu"):
            try:
                inputs, text = self._process(torch.zeros(3, height, width, dtype=torch.uint8, device=device))
            except Exception as error:
                reason = error
                continue
            return text, {name: inputs[name] for name in SIZE_TENSORS if name in inputs}
        raise EncoderError(f"{type(self.processor).__name__} cannot process it: {reason}") from reason

    def _of_length(self, length: int) -> Text:
        """Return the text of audio. All lengths between two with the same have this: longer audio has no less."""
        with self._lock:
            if length in self._of_audio:
                return self._of_audio[length]
            at = bisect_left(self._lengths, length)
            around = {self._of_audio[known] for known in self._lengths[max(at - 1, 0) : at + 1]}
            if len(around) == 1 and 0 < at < len(self._lengths):
                return around.pop()
        try:
            text = self._process(torch.zeros(length))[1]
        except Exception as error:
            raise EncoderError(f"{type(self.processor).__name__} cannot process it: {error}") from error
        with self._lock:
            if length not in self._of_audio:
                self._of_audio[length] = text
                self._lengths.insert(bisect_left(self._lengths, length), length)
        return text

    def begin(self) -> str:
        """Return what the processor writes in front of every text that does not begin with it (Molmo 2)."""
        try:
            ids = self.processor(text=["a"], add_special_tokens=False)["input_ids"][0]
        except Exception:  # it takes no text alone
            return ""
        text = str(self._tokenizer.decode(ids))
        return text.removesuffix("a") if len(ids) > len(self._tokenized("a")) else ""

    def chat_begins_with(self, begin: str) -> bool:
        """True if the chat template writes this in front of a conversation; also without a template."""
        if not getattr(self.processor, "chat_template", None):
            return True
        chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
        return str(self.processor.apply_chat_template(chat)).startswith(begin)

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _mark(self) -> str:
        names = (f"{self.kind}_placeholder_token", f"{self.kind}_token")
        for owner in (self.processor, self._tokenizer):
            for name in names:
                token = getattr(owner, name, None)
                if token is not None:
                    return str(getattr(token, "content", token))
        raise EncoderError(f"{type(self.processor).__name__} of {self.path} has no {self.kind} token")


def _voxtral(processor: Any, audio: list[Any], **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the tensors of audio and its text as Voxtral's processor does by means of mistral_common (`AudioEncoder`
    of 1.13), which requires an older numpy than ours: the processor pads audio to chunks of 30 seconds."""
    frames = processor._retrieve_input_features(audio, **options)
    tokens = frames.size(0) * frames.size(2) // VOXTRAL_FRAMES
    return {"input_features": frames}, [f"[BEGIN_AUDIO]{processor.audio_token * tokens}"]


def _nemotron(processor: Any, audio: list[Any], **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the tensors of audio and its text as the processor of Nemotron Omni does in its `__call__`."""
    features, mask, tokens = processor._process_audio(audio, options)
    inputs = {"input_features": features, "input_features_mask": mask}
    return inputs, [processor.replace_audio_token({"num_tokens": tokens}, 0)]


def silence_and_tone(length: int, rate: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two items of audio, [length], that differ in their last tenth of a second alone."""
    silence = torch.zeros(length)
    tone = silence.clone()
    tone[-rate // 10 :] = torch.linspace(-1, 1, rate // 10)[-length:]
    return silence, tone


@cache
def load_processor(path: str, kind: str, pad: int) -> MediaProcessor:
    """Return the processor of a directory, which is loaded once. Errors as for `MediaProcessor`."""
    return MediaProcessor(path, kind, pad)


def processor_of(path: str, kind: str, pad: int) -> MediaProcessor:
    """Return `load_processor` of one whose items are independent. Raise EncoderError for others."""
    processor = load_processor(path, kind, pad)
    processor.require_independent_items()
    return processor

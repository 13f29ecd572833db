"""Messages of lmms-eval as turns of text and media files, and what a task asks of the decoding."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.records.conversation import Conversation, Part, Turn
from mimo_train.config.errors import UserError
from mimo_train.evaluation.generation.options import Sampling

LOCAL = "shards"
"""Name of the task that is made from samples of shards."""
SEED = 1234
"""Seed of tasks that draw tokens; lmms-eval's own default."""


@dataclass(frozen=True)
class Request:
    """A conversation to answer."""

    turns: tuple[Turn, ...]
    files: tuple[tuple[str, bytes], ...] = ()
    """(kind, file) of its media, in their order: `image`, `video` or `audio`."""


@dataclass(frozen=True)
class Decoding:
    """How a task wants an answer to be decoded."""

    sampling: Sampling
    max_new_tokens: int | None
    """None: up to the end of the sequence."""
    stops: tuple[str, ...]
    """An answer ends before the first of these texts."""

    def cut(self, text: str) -> str:
        """Return an answer up to the first stop text."""
        for stop in self.stops:
            text = text.split(stop, 1)[0]
        return text.strip()


def decoding_of(options: Mapping[str, Any]) -> Decoding:
    """Read a task's `generation_kwargs`. Raises UserError for what would change answers and is not supported."""
    options = {name: value for name, value in options.items() if value is not None and name not in _OF_OTHER_MODELS}
    stops = options.pop("until", ())
    temperature = float(options.pop("temperature", 1.0 if options.get("do_sample") else 0.0))
    is_drawn = options.pop("do_sample", True) and temperature > 0
    sampling = Sampling(
        temperature if is_drawn else 0.0,
        int(options.pop("top_k", 0)) if is_drawn else 0,
        float(options.pop("top_p", 1)) if is_drawn else 1.0,
        SEED,
    )
    options = {name: value for name, value in options.items() if is_drawn or name not in ("top_k", "top_p", "seed")}
    max_new_tokens = options.pop("max_new_tokens", None)
    beams = options.pop("num_beams", 1)
    if options := options | ({"num_beams": beams} if beams != 1 else {}):
        raise UserError(f"generation_kwargs: {options} is not supported. Remove it from the task")
    return Decoding(sampling, max_new_tokens, (stops,) if isinstance(stops, str) else tuple(stops))


_OF_OTHER_MODELS = ("image_aspect_ratio",)
"""Options of LLaVA's first code; our preprocessing is the model's own."""


def messages_of(conversation: Conversation, media: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return a conversation of shards as lmms-eval's messages; `media` by kind as `read_originals` gives them."""
    from PIL import Image

    remaining = {kind: iter(items) for kind, items in media.items()}
    messages = []
    for turn in conversation.turns:
        content: list[dict[str, Any]] = []
        for part in turn.parts:
            if part.kind == "text":
                content.append({"type": "text", "text": part.text})
                continue
            item = next(remaining[part.kind])
            url = item if isinstance(item, bytes) else Image.fromarray(item.permute(1, 2, 0).numpy())
            content.append({"type": part.kind, "url": url})
        messages.append({"role": turn.role, "content": content})
    return messages


def request_of(messages: Sequence[Mapping[str, Any]]) -> Request:
    """Return lmms-eval's messages as a request. Raises UserError for media in an unknown form."""
    turns, files = [], []
    for message in messages:
        content, parts = message["content"], []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            kind = part["type"]
            if kind == "text":
                parts.append(Part("text", part["text"]))
                continue
            parts.append(Part(kind))
            files.append((kind, _file(kind, part["url"])))
        turns.append(Turn(message["role"], tuple(parts)))
    return Request(tuple(turns), tuple(files))


def _file(kind: str, value: Any) -> bytes:
    """Return a medium as a file, without loss: a Pillow image, a path, a data URL, or a mapping of `datasets`."""
    if isinstance(value, bytes):
        return value
    if hasattr(value, "save"):
        return png(value)
    if isinstance(value, Mapping):
        if value.get("bytes"):
            return value["bytes"]
        if "array" in value:
            import soundfile

            buffer = io.BytesIO()
            soundfile.write(buffer, value["array"], value["sampling_rate"], format="WAV", subtype="FLOAT")
            return buffer.getvalue()
        value = value.get("path") or value.get("url") or value
    if isinstance(value, str) and value.startswith("data:"):
        return base64.b64decode(value.partition(",")[2])
    if isinstance(value, str | Path) and Path(value).is_file():
        return Path(value).read_bytes()
    raise UserError(f"the {kind} of a document is {str(value)[:80]!r}, which is no file here, image or array")


def png(image: Any) -> bytes:
    """Return a Pillow image as a PNG file."""
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        image = image.convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()

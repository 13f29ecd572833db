"""Markers of media as other model families write them, in the texts of records.

Those that are special tokens there, such as `<|vision_start|><|image_pad|><|vision_end|>`, always stand for media, as
`<image>` does. Those that may also be text, such as `[IMG]`, do so in a question, and only if they make the markers as
many as the media of the sample.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from data.errors import RecordError
from data.records.conversation import MARKERS
from data.text_format import plural

_PATH = r"(?:[^<>\s]{0,300}|[^<>\n]{0,300}\.\w{1,5})"
"""A path or an address; other words between two markers are a text."""
_SPECIAL = {
    "image": (
        r"(?:<\|vision_start\|>)?(?:<\|image_pad\|>)+(?:<\|vision_end\|>)?",  # Qwen2-VL to Qwen3-VL
        r"(?:<img>)?(?:<IMG_CONTEXT>)+(?:</img>)?",  # InternVL
        r"<start_of_image>(?:(?:<image_soft_token>)*<end_of_image>)?|(?:<image_soft_token>)+",  # Gemma 3
        r"(?:<\|(?:image_start|begin_of_image)\|>)?<\|image\|>(?:<\|(?:image_end|end_of_image)\|>)?",  # Llama, GLM-V
        r"<\|media_start\|>image<\|media_content\|>(?:<\|media_pad\|>)+<\|media_end\|>",  # Kimi-VL
        r"(?:<Img>)?<ImageHere>(?:</Img>)?|<image_placeholder>",  # MiniGPT-4, XComposer, DeepSeek-VL
        rf"<image>{_PATH}</image>",  # MiniCPM-V
    ),
    "video": (
        r"(?:<\|vision_start\|>)?(?:<\|video_pad\|>)+(?:<\|vision_end\|>)?|<\|video\|>",
        rf"<video>{_PATH}</video>",
    ),
    "audio": (
        r"(?:<\|audio_bos\|>)?(?:<\|AUDIO\|>)+(?:<\|audio_eos\|>)?",  # Qwen2-Audio
        r"(?:<\|audio_start\|>)?(?:<\|audio_pad\|>)+(?:<\|audio_end\|>)?",  # Qwen3-Omni
        r"(?:<audio_soft_token>)+|<\|audio\|>",
        rf"<audio>{_PATH}</audio>",  # Qwen-Audio
    ),
}
_AMBIGUOUS = {
    "image": rf"\[IMG\](?!{_PATH}\[/)|<img>{_PATH}</img>|<(?:Image|IMAGE)>(?:</(?:Image|IMAGE)>)?",
    "video": r"\[VIDEO\]|<(?:Video|VIDEO)>(?:</(?:Video|VIDEO)>)?",
    "audio": r"\[AUDIO\]|<(?:Audio|AUDIO)>(?:</(?:Audio|AUDIO)>)?",
}
_OF_KIND = {kind: re.compile("|".join(patterns)) for kind, patterns in _SPECIAL.items()}
_MAYBE_OF_KIND = {kind: re.compile(pattern) for kind, pattern in _AMBIGUOUS.items()}
_NUMBERED = {kind: re.compile(rf"<\|?{kind}[ _-]?(\d+)\|?>") for kind in _SPECIAL}
_HINTS = (
    *("_pad|>", "IMG_CONTEXT>", "start_of_image>", "_soft_token>", "|image|>", "|video|>", "|audio|>", "|AUDIO|>"),
    *("ImageHere>", "image_placeholder>", "</image>", "</video>", "</audio>", "</img>", "[IMG]", "[VIDEO]", "[AUDIO]"),
    *("<Image>", "<IMAGE>", "<Video>", "<VIDEO>", "<Audio>", "<AUDIO>"),
)
"""Every marker has one of these in it, or is numbered; they are sought first, which is quick."""
_NUMBERED_ANY = re.compile(r"<\|?(?:image|video|audio)[ _-]?\d")
_MARKER_OF = {kind: marker for marker, kind in MARKERS.items()}
_USERS = ("human", "user")


def special_marker(text: str) -> str | None:
    """Return the first marker of another family in a text that is a special token there; None if there is none."""
    if not _may_have(text):
        return None
    return next((found[0] for pattern in _OF_KIND.values() if (found := pattern.search(text))), None)


def with_our_markers(
    turns: Sequence[Any], role_field: str, content_field: str, media: Mapping[str, int]
) -> Sequence[Any]:
    """Return the turns of a record with `<image>`, `<video>` and `<audio>` in place of other families' markers, where
    their content is a text. These turns are copies.

    Args:
        media: kind -> members of the sample; without any kind no run could take media, and everything stays text.

    Raises:
        RecordError: markers that may be text do not fit the media, as our markers do not either.
    """
    contents = {at: turn.get(content_field) for at, turn in enumerate(turns) if isinstance(turn, dict)}
    texts = {at: text for at, text in contents.items() if isinstance(text, str)}
    if not media or not _may_have("\n".join(texts.values())):
        return turns
    asked = [at for at in texts if turns[at].get(role_field) in _USERS]
    for kind, marker in _MARKER_OF.items():
        texts = {at: _OF_KIND[kind].sub(marker, text) for at, text in texts.items()}
        numbers = [int(number) for text in texts.values() for number in _NUMBERED[kind].findall(text)]
        if numbers in (list(range(len(numbers))), list(range(1, len(numbers) + 1))):
            texts = {at: _NUMBERED[kind].sub(marker, text) for at, text in texts.items()}
        found = [one[0] for at in asked for one in _MAYBE_OF_KIND[kind].finditer(texts[at])]
        ours, members = sum(text.count(marker) for text in texts.values()), media.get(kind, 0)
        if found and members and ours + len(found) == members:
            texts |= {at: _MAYBE_OF_KIND[kind].sub(marker, texts[at]) for at in asked}
        elif found and members and ours != members:
            raise RecordError(
                f" has {ours} {marker} and {plural(len(found), 'marker')} such as {found[0][:80]!r}, but the sample "
                f"has {plural(members, f'{kind} member')}. Write {marker} at the place of each"
            )
    return [turn | {content_field: texts[at]} if at in texts else turn for at, turn in enumerate(turns)]


def _may_have(text: str) -> bool:
    """False if a text has no marker of another family for certain."""
    if text.count("<") == sum([text.count(marker) for marker in MARKERS]) and "[" not in text:
        return False
    return any(hint in text for hint in _HINTS) or _NUMBERED_ANY.search(text) is not None

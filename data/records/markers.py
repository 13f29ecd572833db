"""Media markers of other model families, and unknown markers, in the texts of records.

Special tokens, such as `<|vision_start|><|image_pad|><|vision_end|>`, always stand for media. Ambiguous markers, such
as `[IMG]`, stand for media only in a question, and only if the record then has as many markers as members. `<image>`
marks a video in a sample with videos and no image, as in LLaVA-Video-178K.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from data.errors import RecordError
from data.records.conversation import MARKERS
from data.text_format import plural

_PATH = r"(?:[^<>\s]{0,300}|[^<>\n]{0,300}\.\w{1,5})"
"""A path or URL; other words between two tags are text."""
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
_SPECIAL_OF = {kind: re.compile("|".join(patterns)) for kind, patterns in _SPECIAL.items()}
_AMBIGUOUS_OF = {kind: re.compile(pattern) for kind, pattern in _AMBIGUOUS.items()}
_NUMBERED_OF = {kind: re.compile(rf"<\|?{kind}[ _-]?(\d+)\|?>") for kind in _SPECIAL}
_HINTS = (
    *("_pad|>", "IMG_CONTEXT>", "start_of_image>", "_soft_token>", "|image|>", "|video|>", "|audio|>", "|AUDIO|>"),
    *("ImageHere>", "image_placeholder>", "</image>", "</video>", "</audio>", "</img>", "[IMG]", "[VIDEO]", "[AUDIO]"),
    *("<Image>", "<IMAGE>", "<Video>", "<VIDEO>", "<Audio>", "<AUDIO>"),
)
"""Substrings to search first: every marker contains one of them or is numbered."""
_NUMBERED = re.compile(r"<\|?(?:image|video|audio)[ _-]?\d")
_UNKNOWN = re.compile(r"<\|?(?:image|audio|video|speech|sound)(?:[ _-]?\d+)?\|?>|<ImageHere>|<image_placeholder>")
_USERS = ("human", "user")


def require_no_marker(text: str, where: str, allowed: Mapping[str, str], *, has_media: bool = False) -> None:
    """Raise RecordError for a marker that would be trained as text.

    Args:
        where: start of the error message.
        allowed: markers that stand for media in this text.
        has_media: True to reject special tokens of other families too.
    """
    if marker := unknown_marker(text, allowed) or (special_marker(text) if has_media else None):
        raise RecordError(
            f"{where}: {marker} marks the place of an image, audio or video, and nothing takes it there. Remove it, or "
            "write the text as a typed part of a message, which is literal"
        )


def unknown_marker(text: str, allowed: Mapping[str, str]) -> str | None:
    """Return the first unknown media marker in a text; None if there is none."""
    return next((marker for marker in _UNKNOWN.findall(text) if marker not in allowed), None) if "<" in text else None


def special_marker(text: str) -> str | None:
    """Return the first special token of another family in a text; None if there is none."""
    if not _may_have(text):
        return None
    return next((match[0] for pattern in _SPECIAL_OF.values() if (match := pattern.search(text))), None)


def with_our_markers(
    turns: Sequence[Any], role_field: str, content_field: str, media: Mapping[str, int]
) -> Sequence[Any]:
    """Replace other families' markers in text contents by `<image>`, `<video>` and `<audio>`. Changed turns are copies.

    Without `media` (kind -> members), all text stays as it is. Raises RecordError, to follow the name of the turns, if
    neither the ambiguous markers nor ours match the members.
    """
    contents = {at: turn.get(content_field) for at, turn in enumerate(turns) if isinstance(turn, dict)}
    texts = {at: text for at, text in contents.items() if isinstance(text, str)}
    if media.get("video") and not media.get("image"):
        joined = "\n".join(texts.values())
        if joined.count("<image>") == media["video"] and "<video>" not in joined:
            texts = {at: text.replace("<image>", "<video>") for at, text in texts.items()}
            turns = [turn | {content_field: texts[at]} if at in texts else turn for at, turn in enumerate(turns)]
    if not media or not _may_have("\n".join(texts.values())):
        return turns
    questions = [at for at in texts if turns[at].get(role_field) in _USERS]
    for marker, kind in MARKERS.items():
        texts = {at: _SPECIAL_OF[kind].sub(marker, text) for at, text in texts.items()}
        numbers = [int(number) for text in texts.values() for number in _NUMBERED_OF[kind].findall(text)]
        if numbers in (list(range(len(numbers))), list(range(1, len(numbers) + 1))):
            texts = {at: _NUMBERED_OF[kind].sub(marker, text) for at, text in texts.items()}
        ambiguous = [match[0] for at in questions for match in _AMBIGUOUS_OF[kind].finditer(texts[at])]
        ours, members = sum(text.count(marker) for text in texts.values()), media.get(kind, 0)
        if ambiguous and members and ours + len(ambiguous) == members:
            texts |= {at: _AMBIGUOUS_OF[kind].sub(marker, texts[at]) for at in questions}
        elif ambiguous and members and ours != members:
            raise RecordError(
                f" has {ours} {marker} and {plural(len(ambiguous), 'marker')} such as {ambiguous[0][:80]!r}, but the "
                f"sample has {plural(members, f'{kind} member')}. Write {marker} at the place of each"
            )
    return [turn | {content_field: texts[at]} if at in texts else turn for at, turn in enumerate(turns)]


def _may_have(text: str) -> bool:
    """Return False if a text cannot contain a marker of another family."""
    if text.count("<") == sum([text.count(marker) for marker in MARKERS]) and "[" not in text:
        return False
    return any(hint in text for hint in _HINTS) or _NUMBERED.search(text) is not None

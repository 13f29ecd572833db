"""What tools in the field leave in records: failed downloads, half of a surrogate pair, a newline at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from data.errors import NotDownloaded, RecordError
from data.records.conversation import Conversation
from data.text_format import Key, shown


def text_of_file(text: str) -> str:
    """Return the content of a text file without the line break that ends its last line."""
    return text.removesuffix("\n").removesuffix("\r")


def failed_download(record: Any) -> bool:
    """True if img2dataset or video2dataset recorded that the media of this record could not be downloaded."""
    return isinstance(record, dict) and str(record.get("status")).startswith("failed_to_")


def require_download(record: Any, key: Key, media: Mapping[str, int]) -> None:
    """Raises NotDownloaded for a record without media whose download failed."""
    if not any(media.values()) and failed_download(record):
        raise NotDownloaded(f"key {key!r}: status is {shown(record['status'])} and the sample has no media")


def require_characters(conversation: Conversation, key: Key) -> None:
    """Raises RecordError for half of a surrogate pair, which JSON can spell and no tokenizer takes."""
    texts = [part.text for turn in conversation.turns for part in turn.parts]
    others = [turn.fields for turn in conversation.turns if turn.fields] + [*conversation.tools]
    try:
        for text in [*texts, *(json.dumps(other, ensure_ascii=False) for other in others)]:
            text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(error.object[error.start]):04x}"
        raise RecordError(f"key {key!r}: {code} in its text is half of a surrogate pair, not a character") from error

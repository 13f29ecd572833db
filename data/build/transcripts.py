"""Transcripts of speech corpora: LibriSpeech's `*.trans.txt`, and data directories of Kaldi."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.errors import DataError, RecordError

TRANSCRIPTS = ".trans.txt"
KALDI = ("wav.scp", "text")
"""Files of a Kaldi data directory; `segments` is optional."""
_TO_THE_END = "-1"  # end of a segment, as `extract-segments` of Kaldi reads it

Line = tuple[str, Any]
"""(where, record or RecordError)."""


def transcript_lines(file: Path, root: Path) -> Iterator[Line]:
    """Yield the lines `ID TEXT` of a transcript of LibriSpeech. The recordings are `ID.flac` next to it, and each must
    have a line. File names are relative to `root`. Raises DataError."""
    where, names = file.relative_to(root), set()
    for number, name, text in _named_lines(file):
        names.add(name)
        yield f"{where}: line {number}", {"id": name, "audio": f"{where.parent / name}.flac", "text": text}
    for recording in sorted(file.parent.glob("*.flac")):
        if recording.stem not in names:
            yield str(recording.relative_to(root)), RecordError(f"no line in {file.name}")


def require_one_corpus(files: list[Path], root: Path) -> None:
    """Raise DataError if transcripts, SPEAKER/CHAPTER/FILE in a part of LibriSpeech, are of several parts."""
    parts = sorted({str(file.relative_to(root).parents[2]) for file in files if len(file.relative_to(root).parts) > 3})
    if len(parts) > 1:
        raise DataError(f"{root} has the parts {', '.join(parts)}: say which with --split")


def kaldi_lines(folder: Path) -> Iterator[Line]:
    """Yield the utterances of a Kaldi data directory, those of `text` first. Raises DataError."""
    recordings = {name: path for _, name, path in _named_lines(folder / "wav.scp")}
    segments = folder / "segments"
    timed = {name: line for _, name, line in _named_lines(segments)} if segments.exists() else None
    spoken = set()
    for number, name, text in _named_lines(folder / "text"):
        spoken.add(name)
        try:
            yield f"text: line {number}", {"id": name, "text": text} | _audio_of(name, recordings, timed)
        except RecordError as error:
            yield f"text: line {number}", error
    for name in sorted((recordings if timed is None else timed).keys() - spoken):
        yield name, RecordError("no line in text")


def _audio_of(name: str, recordings: Mapping[str, str], timed: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the recording of an utterance, and its segment if there are `timed` ones. Raises RecordError."""
    segment: dict[str, Any] = {}
    if timed is not None:
        fields = timed.get(name, "").split()
        if len(fields) < 3:
            raise RecordError(f"no line `{name} RECORDING START END` in segments")
        name, segment = fields[0], {"start": fields[1], "end": None if fields[2] == _TO_THE_END else fields[2]}
    if name not in recordings:
        raise RecordError(f"no line of {name} in wav.scp")
    if recordings[name].endswith("|"):
        raise RecordError(f"wav.scp has a command for {name}, which is not run. Write its output to a file")
    return {"audio": recordings[name]} | segment


def _named_lines(file: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (number, first word, rest) of each line. Raises DataError."""
    try:
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    name, _, rest = line.strip().replace("\t", " ", 1).partition(" ")
                    yield number, name, rest.strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error.reason} at byte {error.start})") from error

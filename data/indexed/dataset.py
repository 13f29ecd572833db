"""Samples that are windows of token files: sample number -> `sequence_length` tokens and one more, the last target.

The documents of a file form one text, whose window i has tokens [i S, i S + S + 1): every token but the first is a
target once an epoch. Tokens after the last full window of a file, at most S, are dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from data.errors import DataError
from data.indexed.file import WHOLE, IndexedFile, Part
from data.indexed.find import find_indexed
from data.order.sources import Source, fingerprint_of, order_of
from data.order.step import StepSamples, TextSample
from data.samples.bad_samples import BadSample, BadSamples
from data.samples.protocol import Samples
from data.storage.files import RETRIES
from data.storage.reader import ShardReader
from data.storage.url import Place
from data.text.tokens import Tokenizer
from data.text_format import plural


class TokenDataset(Samples):
    """Windows of .bin and .idx files.

    sources: sources of such files (`is_indexed`); tokenizer: the files' tokenizer; sequence_length: S; seed, shuffle,
    shuffle_block: see `GlobalOrder`; part: first and last share of each file's documents; separate: report document
    ends, and give the last token of a document no target; keep_text, read_retries: as in `ShardDataset`.

    Raises DataError (an unusable file, a source without a full window, an unknown token) and ReadError.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        tokenizer: Tokenizer,
        sequence_length: int,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_block: int = 1,
        part: Part = WHOLE,
        separate: bool = False,
        keep_text: bool = False,
        read_retries: int = RETRIES,
    ) -> None:
        self.sources, self.tokenizer, self.sequence_length = tuple(sources), tokenizer, sequence_length
        self.keep_text, self.lookups, self._separate = keep_text, {}, separate
        self.reader = ShardReader(read_retries)
        files_of_sources = [_files_of(source, read_retries) for source in self.sources]
        self.files = [file for files in files_of_sources for file in files]
        self.shards: Sequence[Place] = [file.path for file in self.files]
        self._ends_of_sources = np.cumsum([len(files) for files in files_of_sources])
        spans = [span_of(file, part) for file in self.files]
        self._firsts = np.array([first for first, _ in spans], dtype=np.int64)
        counts = [windows_in(end - first, sequence_length) for first, end in spans]
        self._ends = np.cumsum(counts)
        self._begins = self._ends - counts
        self._require_windows(counts, spans, part)
        sizes, contents = [file.version.size for file in self.files], [file.content for file in self.files]
        of_files = self._ends_of_sources.tolist(), counts, contents
        self.order = order_of(self.sources, *of_files, seed, shuffle, shuffle_block, 0.0, False)
        self.lengths = np.broadcast_to(np.int32(sequence_length), int(self._ends[-1]))
        self.allowed_bad_samples = 0
        self.bad_samples = BadSamples(0)
        names = list(zip((path.name for path in self.shards), sizes, contents, counts, strict=True))
        of_windows = f"{fingerprint_of(names, self._ends_of_sources.tolist(), 0.0)} {sequence_length} {part}"
        self.fingerprint = hashlib.sha256(of_windows.encode()).hexdigest()[:32]
        self.text_fingerprint = tokenizer.fingerprint

    def locate(self, number: int) -> tuple[Place, str]:
        """Return (.bin file, "document 5, token 1000"): the sample's start, counted from 0."""
        file, first = self._window(number)
        return file.path, f"document {file.document_at(first)}, token {first}"

    def identity(self, number: int) -> str:
        file, first = self._window(number)
        return f"{file.path.resolve()}|{file.content}|{first}|{self.sequence_length}"

    def plan_step(self, first: int, size: int) -> StepSamples:
        lengths = np.full(size, self.sequence_length, dtype=np.int64)
        if not self._separate:
            return StepSamples({}, {}, {}, lengths)
        return StepSamples({}, {}, {}, lengths, self._documents(np.arange(first, first + size)))

    def read_text(self, number: int) -> tuple[TextSample, BadSample | None]:
        """Return the tokens of a sample; none is bad. Raises DataError for a token that the tokenizer lacks."""
        file, first = self._window(number)
        tokens = file.read(self.reader, first, self.sequence_length + 1).astype(np.int64)
        self._require_known(tokens, file, first)
        loss_mask, documents = np.ones(self.sequence_length, dtype=np.float32), None
        if self._separate:
            ends = file.ends_in(first, self.sequence_length)
            loss_mask[ends - 1] = 0  # the next token is in another document
            documents = (*ends[ends < self.sequence_length].tolist(), self.sequence_length)
        questions = ((0, ""),) if self.keep_text else None
        sample = TextSample(
            number, tokens[:-1], tokens[1:], loss_mask, self.sequence_length, None, questions, documents=documents
        )
        return sample, None

    def close(self) -> None:
        self.reader.close()

    def _window(self, number: int) -> tuple[IndexedFile, int]:
        files, firsts = self._windows(np.array([number]))
        return self.files[int(files[0])], int(firsts[0])

    def _windows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (file indexes, first tokens) of samples, int64."""
        rows = self.order.rows(numbers)
        files = np.searchsorted(self._ends, rows, side="right")
        return files, self._firsts[files] + (rows - self._begins[files]) * self.sequence_length

    def _documents(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return the tokens of each document in samples."""
        lengths = [np.zeros(0, dtype=np.int64)] * len(numbers)
        files, firsts = self._windows(numbers)
        for file in np.unique(files).tolist():
            places = np.flatnonzero(files == file)
            of_file = self.files[file].lengths_in(firsts[places], self.sequence_length)
            for place, of_sample in zip(places.tolist(), of_file, strict=True):
                lengths[place] = of_sample
        return lengths

    def _require_known(self, tokens: np.ndarray, file: IndexedFile, first: int) -> None:
        size = self.tokenizer.text_size
        if 0 <= tokens.min() and tokens.max() < size:
            return
        at = int(np.flatnonzero((tokens < 0) | (tokens >= size))[0])
        raise DataError(
            f"data.tokenizer: {file.path} has the id {tokens[at]} (token {first + at}, in document "
            f"{file.document_at(first + at)}), and the tokenizer has the ids 0 to {size - 1}: give the folder of the "
            "tokenizer that the file was made with"
        )

    def _require_windows(self, counts: Sequence[int], spans: Sequence[tuple[int, int]], part: Part) -> None:
        begin = 0
        for source, end in zip(self.sources, self._ends_of_sources.tolist(), strict=True):
            if not sum(counts[begin:end]):
                longest = max(last - first for first, last in spans[begin:end])
                of = "" if part == WHOLE else f" in documents from {part[0]:.2%} to {part[1]:.2%} of each"
                raise DataError(
                    f"{source.key}: no sample in {plural(end - begin, 'file')}, of which the longest has {longest} "
                    f"tokens{of}: a sample of data.sequence_length {self.sequence_length} needs "
                    f"{self.sequence_length + 1}"
                )
            begin = end


def span_of(file: IndexedFile, part: Part) -> tuple[int, int]:
    """Return the tokens [first, end) of a part of a file's documents, rounded as by Megatron-LM's `--split`."""
    documents = np.array([round(share * file.documents) for share in part])
    first, end = file.starts(documents).tolist()
    return first, end


def windows_in(tokens: int, sequence_length: int) -> int:
    """Return the number of full samples in `tokens` tokens."""
    return max(tokens - 1, 0) // sequence_length


def _files_of(source: Source, read_retries: int) -> list[IndexedFile]:
    try:
        return [IndexedFile(path, read_retries) for path in find_indexed(source.shards)]
    except DataError as error:
        message = str(error)
        message = (
            message.replace("data.shards", source.key, 1) if "data.shards" in message else f"{source.key}: {message}"
        )
        raise type(error)(message) from error

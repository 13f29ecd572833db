"""User errors of this package. Every message names the cause and the remedy."""


class DataError(ValueError):
    """Shards, records, a tokenizer or demo parameters that cannot be used."""


class ShardError(DataError):
    """An unusable shard: compressed, truncated, damaged, or changed while a run reads it."""


class ReadError(DataError):
    """A persistent I/O error. It says nothing about the sample, so it ends the run."""


class MemoryShortage(DataError):
    """Memory ran out over a sample within its bounds. The sample is not bad, so this ends the run."""


class MissingLibrary(DataError):
    """A library that decodes a sample is not installed. The sample is not bad, so this ends the run."""


OF_THE_MACHINE = (MemoryShortage, MissingLibrary)
"""Errors of this machine rather than of the sample."""


class SampleError(DataError):
    """A bad sample; a stand-in replaces it."""

    remedy = ""
    """End of a sentence: a config key that helps; empty if none does."""


class DecodeError(SampleError):
    """An image or audio item that cannot be decoded."""


class RecordError(SampleError):
    """An unusable record. The message names the sample's key."""


class NothingToLearn(RecordError):
    """A null caption or answer: bad, or without loss with `data.null_captions=skip`."""

    what = "without a caption or answer to learn"
    """Describes the records, after their number."""

    remedy = "data.null_captions=skip takes such samples without loss"


class NotDownloaded(NothingToLearn):
    """A record of img2dataset or video2dataset whose media could not be downloaded."""

    what = "whose media could not be downloaded"


class SeveralAnswers(RecordError):
    """A record with several answers, for a model whose tokens before an answer see each other."""

    remedy = "give each answer its own record, or exclude the earlier ones from the loss"


class UnknownRecord(RecordError):
    """A record without any known field."""

    remedy = "data.fields says what else is read, such as data.fields.caption=json[KEY]"


class TooManyBadSamples(DataError):
    """More bad samples than `data.max_bad_samples` allows."""


def reason_of(error: Exception) -> str:
    """Return in one line why a sample is bad. Raises MissingLibrary or MemoryShortage if one is the cause."""
    if isinstance(error, MissingLibrary):
        raise error
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # the second is torch's RuntimeError
        raise MemoryShortage(
            f"{reason}: memory ran out over one sample: give the machine more, use fewer data.workers, or lower "
            "data.bounds"
        ) from error
    is_plain = isinstance(error, (SampleError, RuntimeError)) and not isinstance(error, RecursionError)
    return reason if is_plain or not lines else f"{type(error).__name__}: {reason}"

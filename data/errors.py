"""User errors of this package. Every message names the cause and the remedy."""


class DataError(ValueError):
    """Shards, records, a tokenizer or demo parameters that cannot be used."""


class ShardError(DataError):
    """A shard that cannot be used: compressed, truncated, damaged, or changed while a run reads it."""


class ReadError(DataError):
    """An I/O error that did not pass. It says nothing about a sample: the run ends."""


class MemoryShortage(DataError):
    """Memory ran out over a sample within its bounds. Another machine may read it: it is not bad, and the run ends."""


class MissingLibrary(DataError):
    """A library that decodes a sample is not installed. Another machine reads it: it is not bad, and the run ends."""


OF_THE_MACHINE = (MemoryShortage, MissingLibrary)
"""What an error over a sample says of this machine, and nothing of the sample."""


class SampleError(DataError):
    """A sample that cannot be used: it is bad, and a stand-in takes its place."""

    remedy = ""
    """Key of a run's config that helps, as the end of a sentence; empty: none does."""


class DecodeError(SampleError):
    """An image or an audio clip that cannot be decoded."""


class RecordError(SampleError):
    """A record that cannot be used. The message names the sample's key."""


class NothingToLearn(RecordError):
    """A record whose caption or answer is null: bad, or without loss with `data.null_captions=skip`."""

    what = "without a caption or answer to learn"
    """The records, as they follow their number."""

    remedy = "data.null_captions=skip takes such samples without loss"


class NotDownloaded(NothingToLearn):
    """A record of img2dataset or video2dataset whose media could not be downloaded."""

    what = "whose media could not be downloaded"


class UnknownRecord(RecordError):
    """A record with none of the names that say what it is."""

    remedy = "data.fields says what else is read, such as data.fields.caption=json[KEY]"


class TooManyBadSamples(DataError):
    """More bad samples than `data.max_bad_samples` allows."""


def reason_of(error: Exception) -> str:
    """What made a sample bad, in a line: of whatever a decoder, a tokenizer or a template raises.

    Raises:
        MemoryShortage: it says that memory ran out.
        MissingLibrary: it is one.
    """
    if isinstance(error, MissingLibrary):
        raise error
    lines = str(error).strip().splitlines()
    said = lines[0] if lines else type(error).__name__
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # the second is torch's RuntimeError
        raise MemoryShortage(
            f"{said}: memory ran out over one sample: give the machine more, use fewer data.workers, or lower "
            "data.bounds"
        ) from error
    known = isinstance(error, (SampleError, RuntimeError)) and not isinstance(error, RecursionError)
    return said if known or not lines else f"{type(error).__name__}: {said}"

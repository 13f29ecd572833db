"""User errors of this package. Every message names the cause and the remedy."""


class DataError(ValueError):
    """Shards, records, a tokenizer or demo parameters that cannot be used."""


class ShardError(DataError):
    """A shard that cannot be used: compressed, truncated, damaged, or changed while a run reads it."""


class SampleError(DataError):
    """A sample that cannot be read: it is bad, and a stand-in takes its place."""


class ReadError(SampleError):
    """A member that could not be read in full."""


class DecodeError(SampleError):
    """A picture or an audio clip that cannot be decoded."""


class RecordError(SampleError):
    """A record that cannot be used. The message names the sample's key."""


class TooManyBadSamples(DataError):
    """More bad samples than `data.max_bad_samples` allows."""

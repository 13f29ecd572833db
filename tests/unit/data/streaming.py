"""Streams of the small shards, for tests of reading in order."""

from data.bounds import BOUNDS
from data.fields import NO_FIELDS
from data.pipeline import Source, StreamDataset
from data.streams.shard import StreamedShard
from data.tokens import build_tokenizer
from tests.unit.data.helpers import images


def stream(shards, **options):
    media = options.pop("media", (images(),))
    tokenizer = build_tokenizer("bytes", [item.placeholder for item in media])
    options = {"sequence_length": 24, "max_bad_samples": 99} | options
    return StreamDataset(Source("", str(shards)), tokenizer=tokenizer, media=media, **options)


def one_shard(place, bounds=BOUNDS):
    return [sample.index.key(0) for sample in StreamedShard(place, bounds, NO_FIELDS, 0, 0).each()]

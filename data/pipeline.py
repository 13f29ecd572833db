"""The interface for training programs: the dataset, and the loader that cuts it into steps."""

from data.errors import DataError, TooManyBadSamples
from data.indexed.dataset import TokenDataset
from data.loader import StepLoader
from data.media.options import Resize
from data.order.packing import Packing
from data.order.sources import Source
from data.order.step import Batching, Microbatch, Reader, StepBatch, TextSample
from data.order.step_plan import Padding, StepPlan
from data.samples.bad_samples import BadSample, BadSamples, require_budget
from data.samples.media_spec import Media
from data.samples.protocol import MEDIA, Lookup, MicrobatchMedia, SampleMedia, Samples
from data.samples.shard_dataset import ShardDataset
from data.workers import GivesUp, WaitGivenUp, never

__all__ = [
    "MEDIA",
    "BadSample",
    "BadSamples",
    "Batching",
    "DataError",
    "ShardDataset",
    "GivesUp",
    "Lookup",
    "Media",
    "Microbatch",
    "MicrobatchMedia",
    "Packing",
    "Padding",
    "Reader",
    "Resize",
    "SampleMedia",
    "Samples",
    "Source",
    "StepBatch",
    "StepLoader",
    "StepPlan",
    "TextSample",
    "TokenDataset",
    "TooManyBadSamples",
    "WaitGivenUp",
    "never",
    "require_budget",
]

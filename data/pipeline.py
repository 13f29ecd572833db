"""What a training program needs of this package: the dataset, and the loader that cuts it into steps."""

from data.bad_samples import BadSample, BadSamples, require_budget
from data.collate import TextSample
from data.dataset import Dataset
from data.errors import DataError, TooManyBadSamples
from data.features import MEDIA, Lookup, MicrobatchMedia, SampleMedia
from data.indexed.dataset import TokenDataset
from data.loader import StepLoader
from data.media.resize import Resize
from data.outline import Media
from data.packing import Packing
from data.samples import Samples
from data.sources import MixedOrder, Source
from data.step import Batching, Microbatch, Reader, StepBatch
from data.step_plan import Padding, StepPlan
from data.text_lengths import TextLengths
from data.waiting import GivesUp, WaitGivenUp, never

__all__ = [
    "MEDIA",
    "BadSample",
    "BadSamples",
    "Batching",
    "DataError",
    "Dataset",
    "GivesUp",
    "Lookup",
    "Media",
    "Microbatch",
    "MicrobatchMedia",
    "MixedOrder",
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
    "TextLengths",
    "TextSample",
    "TokenDataset",
    "TooManyBadSamples",
    "WaitGivenUp",
    "never",
    "require_budget",
]

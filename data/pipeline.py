"""What a training program needs of this package: the dataset, and the loader that cuts it into steps."""

from data.bad_samples import BadSample, require_budget
from data.collate import TextSample
from data.dataset import Dataset, Media
from data.errors import DataError, TooManyBadSamples
from data.features import Lookup, MicrobatchMedia, SampleMedia
from data.loader import MEDIA, Batching, Reader, StepBatch, StepLoader

__all__ = [
    "MEDIA",
    "BadSample",
    "Batching",
    "DataError",
    "Dataset",
    "Lookup",
    "Media",
    "MicrobatchMedia",
    "Reader",
    "SampleMedia",
    "StepBatch",
    "StepLoader",
    "TextSample",
    "TooManyBadSamples",
    "require_budget",
]

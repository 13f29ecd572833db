"""What a training program needs of this package: the dataset, and the loader that cuts it into steps."""

from data.collate import TextSample
from data.dataset import Dataset, Media
from data.faults import Fault, FaultLog, TooManyBadSamples
from data.loader import Batching, Reader, StepBatch, StepLoader

__all__ = [
    "Batching",
    "Dataset",
    "Fault",
    "FaultLog",
    "Media",
    "Reader",
    "StepBatch",
    "StepLoader",
    "TextSample",
    "TooManyBadSamples",
]

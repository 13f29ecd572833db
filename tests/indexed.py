"""Writing .bin and .idx files as Megatron-LM's `preprocess_data.py` does."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

END = 258
"""Of a text, of the tokenizer `bytes`."""


def write_indexed(prefix: Path, documents: Sequence[Sequence[int]], dtype=np.uint16, **options) -> Path:
    """PREFIX.bin and PREFIX.idx of documents of one sequence each. Returns the prefix."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, **options)
    for document in documents:
        builder.add_item(torch.tensor(document, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    builder.data_file.close()
    return prefix


def texts(number: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Documents of bytes, each with its end, of some lengths."""
    random = np.random.default_rng(seed)
    return [[*random.integers(97, 123, random.integers(1, longest)).tolist(), END] for _ in range(number)]

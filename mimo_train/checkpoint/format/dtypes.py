"""Types of elements of stored tensors, as torch has them."""

import torch

from mimo_train.checkpoint.format.index import SIZES

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}

assert {name: dtype.itemsize for name, dtype in TYPES.items()} == SIZES

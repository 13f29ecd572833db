"""The tensors of a file that `torch.save` wrote, such as `pytorch_model.bin`: where each is in the file.

Only the pickle inside is read, by torch's restricted unpickler, and no tensor is allocated. torch is imported when the
first such file is read.
"""

import pickle
from pathlib import Path
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

from mimo_train.config.pretrained.safetensors_header import Entry, Unreadable, require_no_pointer

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Names of dtypes as safetensors has them, by torch's."""


class Unsupported(Unreadable):
    """A file of torch that holds what is not read here."""

    remedy = "load it with the library that wrote it, and save it as safetensors"


def read_bin_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of a file by name.

    Raises:
        Unreadable: it is damaged, holds anything but tensors, or is in torch's format from before version 1.6.
        OSError: it cannot be read.
    """
    require_no_pointer(path)
    try:
        if not is_zipfile(path):
            raise Unsupported("was cut short, or is no file of torch.save since version 1.6")
        with ZipFile(path) as file:
            is_plain = all(member.compress_type == ZIP_STORED for member in file.infolist())
    except (BadZipFile, NotImplementedError, UnicodeDecodeError) as error:
        raise Unreadable(f"is damaged ({error})") from error
    if not is_plain:
        raise Unsupported("has compressed members")
    import torch

    try:
        tensors = torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Unsupported("holds more than tensors, which is not unpickled (weights_only=True)") from error
    except OSError:
        raise
    except Exception as error:  # whatever a damaged pickle makes the unpickler raise
        raise Unreadable(f"is damaged ({str(error).splitlines()[0] if str(error) else error!r})") from error
    if not isinstance(tensors, dict) or not tensors:
        raise Unsupported(f"holds {type(tensors).__name__}, expected tensors by name")
    size, entries = path.stat().st_size, {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise Unsupported(f"holds {type(tensor).__name__} as {name!r:.80}, expected a tensor")
        dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None or not tensor.is_contiguous():
            raise Unsupported(f"has {name} as {tensor.dtype} with strides {tensor.stride()}")
        # torch records where the bytes of a storage begin in the file.
        begin = tensor.untyped_storage()._checkpoint_offset
        assert begin is not None, name
        begin += int(tensor.storage_offset()) * tensor.element_size()
        if begin + tensor.nbytes > size:
            raise Unreadable(f"has {size} bytes, and {name} ends at {begin + tensor.nbytes}")
        entries[name] = Entry(begin, tuple(tensor.shape), dtype)
    return entries
